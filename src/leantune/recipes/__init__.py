"""Run files that come with the package."""
