"""The configuration of a run. Imports no torch."""

from leantune.config.load import apply_overrides, load_config, to_tree, to_yaml, validate
from leantune.config.schema import RunConfig

__all__ = ["RunConfig", "apply_overrides", "load_config", "to_tree", "to_yaml", "validate"]
