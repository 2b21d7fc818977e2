"""leantune: fine-tune large language models on the hardware you have.

    import leantune
    result = leantune.train("run.yaml", ["train.epochs=2"])
    model = leantune.load(result.folder)
    print(model.generate("How many singers are older than 30?"))

Importing the package imports neither torch nor pydantic; the first use of a verb does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leantune.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    LaunchError,
    LeantuneError,
    ModelError,
    NumericsError,
)

if TYPE_CHECKING:
    from leantune.api import (
        EditSettings,
        Model,
        RunResult,
        Sampling,
        compare,
        evaluate,
        export,
        generate,
        import_pyreft,
        load,
        merge,
        resume,
        train,
    )
    from leantune.config import RunConfig

__version__ = "0.1.0"

_FROM_API = (
    "EditSettings",
    "Model",
    "RunResult",
    "Sampling",
    "compare",
    "evaluate",
    "export",
    "generate",
    "import_pyreft",
    "load",
    "merge",
    "resume",
    "train",
)

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "EditSettings",
    "LaunchError",
    "LeantuneError",
    "Model",
    "ModelError",
    "NumericsError",
    "RunConfig",
    "RunResult",
    "Sampling",
    "compare",
    "evaluate",
    "export",
    "generate",
    "import_pyreft",
    "load",
    "merge",
    "resume",
    "train",
]


def __getattr__(name: str) -> Any:
    home = "leantune.api" if name in _FROM_API else "leantune.config" if name == "RunConfig" else None
    if home is not None:
        import importlib

        return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'leantune' has no attribute {name!r}")
