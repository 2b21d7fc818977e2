"""Finds a method by the name of its file, and a saved adapter's method by its files."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from torch import nn

from leantune import methods
from leantune.errors import ModelError
from leantune.methods.protocol import Attached
from leantune.methods.together import TOGETHER, join

_NOT_METHODS = {
    *("choice", "embeddings", "factors", "interventions", "prompts", "protocol", "reft_places", "registry"),
    "together",
}
# Parts of a run that save files like a method, but are none.
_PARTS = {"head"}


def method_names() -> list[str]:
    """All methods, in alphabetical order."""
    return sorted(name for module in _modules() if module not in _PARTS for name in _served(module))


def adapter_config_files() -> list[str]:
    """The files by which saved adapters are known: one name for each format, in alphabetical order."""
    files = (getattr(_module(name), "CONFIG_FILE", None) for name in _modules())
    return sorted({file for file in files if file is not None})


def attach(name: str, model: nn.Module, settings: Mapping[str, Any], seed: int) -> Attached:
    """Attach a method to a model whose weights are frozen.

    `settings` are the keys of the run's `method` section without its name. The new
    parameters depend on `seed` and on their names alone, not on the process. A `together` attaches
    each of its parts.
    """
    if name == TOGETHER:
        parts = [dict(part) for part in settings["parts"]]
        return join([attach(part.pop("name"), model, part, seed) for part in parts])
    for module in _modules():
        if name in _served(module):
            extra = {"method": name} if name != module else {}
            return _module(module).attach(model, seed=seed, **extra, **settings)
    raise ModelError(f"method {name!r} is unknown; expected one of {', '.join(method_names())}")


def attach_saved(config_file: str, model: nn.Module, config: Mapping[str, Any]) -> Attached | None:
    """Attach the method whose adapters have a configuration file of this name (None: no method has).

    Of methods that share a file, it is the one whose `accepts` takes this content. The parameters
    are new; `Attached.load` gives them the saved values.
    """
    for name in _modules():
        module = _module(name)
        accepts = getattr(module, "accepts", None)
        if getattr(module, "CONFIG_FILE", None) == config_file and (accepts is None or accepts(config)):
            attached = module.attach(model, seed=0, **module.settings_from(config))
            attached.check_saved(config)
            return attached
    return None


def _modules() -> list[str]:
    return sorted(m.name for m in pkgutil.iter_modules(methods.__path__) if m.name not in _NOT_METHODS)


def _served(module: str) -> tuple[str, ...]:
    """The methods of a file: the one it is named after, or those that it names."""
    return getattr(_module(module), "METHODS", (module,))


def _module(name: str) -> Any:
    return importlib.import_module(f"leantune.methods.{name}")
