"""The configuration of a run. Imports no torch.

Its parts need no more than they use: only what names `RunConfig` brings pydantic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leantune.config.load import apply_overrides, apply_preset, load_config, to_tree, to_yaml, validate
    from leantune.config.schema import RunConfig

__all__ = ["RunConfig", "apply_overrides", "apply_preset", "load_config", "to_tree", "to_yaml", "validate"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'leantune.config' has no attribute {name!r}")
    import importlib

    module = "schema" if name == "RunConfig" else "load"
    return getattr(importlib.import_module(f"leantune.config.{module}"), name)
