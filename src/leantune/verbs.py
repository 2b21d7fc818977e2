"""Packages that are also verbs: `leantune.train(config)` trains, `leantune.train.loop` is the module."""

from __future__ import annotations

from types import ModuleType
from typing import Any


class VerbPackage(ModuleType):
    """The class of a package that can be called as the function of its name in `leantune.api`."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from leantune import api

        return getattr(api, self.__name__.rpartition(".")[2])(*args, **options)
