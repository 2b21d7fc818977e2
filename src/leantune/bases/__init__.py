"""How the frozen weights are stored: one file a base, found by its name; and how they are loaded."""

from leantune.bases.building import BuiltBase, build_base
from leantune.bases.filling import RowNorms, fill, load_base

__all__ = ["BuiltBase", "RowNorms", "build_base", "fill", "load_base"]
