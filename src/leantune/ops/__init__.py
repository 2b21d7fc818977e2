"""Pure tensor functions: no module state, no configuration."""
