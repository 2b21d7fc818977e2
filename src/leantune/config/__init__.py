"""The configuration of a run. Imports no torch."""

from leantune.config.load import apply_overrides, apply_preset, load_config, to_tree, to_yaml, validate
from leantune.config.schema import RunConfig

__all__ = ["RunConfig", "apply_overrides", "apply_preset", "load_config", "to_tree", "to_yaml", "validate"]
