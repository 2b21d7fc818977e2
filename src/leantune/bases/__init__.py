"""How the frozen weights are stored: one file a base, found by its name."""

from leantune.bases.registry import load_base

__all__ = ["load_base"]
