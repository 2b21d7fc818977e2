"""Extra places for the metrics: TensorBoard, Trackio and Weights & Biases, imported only if asked for."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from leantune.errors import ConfigError

_PACKAGES = {"tensorboard": "tensorboard", "trackio": "trackio", "wandb": "wandb"}


class Tracker(Protocol):
    """A place for numbers by step. What it raises is reported once and never stops the run."""

    name: str

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record named numbers of a step; NaN and infinity may be among them."""
        ...

    def close(self) -> None:
        """Send what is pending and end."""
        ...


def check_trackers(names: Iterable[str]) -> None:
    """Raise `ConfigError` with the install command of every tracker whose package is missing.

    Imports nothing, so it can run before any work is done.
    """
    problems: list[str] = []
    for name in names:
        if name not in _PACKAGES:
            known = ", ".join(sorted(_PACKAGES))
            problems.append(f"output.trackers: {name!r} is not one of {known}")
        elif not _is_installed(_PACKAGES[name]):
            problems.append(
                f"output.trackers: {name} is not installed; install it with "
                f'`uv pip install "leantune[{name}]"`, or remove it from the list'
            )
    if problems:
        raise ConfigError(problems)


def open_trackers(
    names: Iterable[str],
    folder: Path,
    *,
    project: str,
    config: Mapping[str, Any],
    first_step: int = 1,
) -> list[Tracker]:
    """Start the trackers of the run in `folder`, whose name becomes the run's; for one process only.

    config: plain values shown beside the run; first_step: the first step that will be logged (more
    than 1 for a resumed run). Raises `ConfigError` if one is missing or cannot start.
    """
    chosen = list(names)
    check_trackers(chosen)
    opened: list[Tracker] = []
    for name in chosen:
        try:
            opened.append(_open(name, folder, project, config, first_step))
        except Exception as error:
            for tracker in opened:
                tracker.close()
            hint = "; log in with `wandb login`, or set WANDB_MODE=offline" if name == "wandb" else ""
            raise ConfigError(f"output.trackers: {name} cannot start: {error}{hint}") from error
    return opened


class TensorBoardTracker:
    """Event files in `<run>/tensorboard`; rows of an abandoned part of a resumed run are hidden."""

    name = "tensorboard"

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        purge = first_step if first_step > 1 else None
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(_tag(key), value, step)

    def close(self) -> None:
        self._writer.close()


class ServiceTracker:
    """Trackio or Weights & Biases: both have runs with `log(values, step=)` and `finish()`."""

    def __init__(self, name: str, run: Any) -> None:
        self.name = name
        self._run = run

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # Their stores hold JSON, so a number that is not finite is left out; metrics.jsonl has it.
        finite = {_tag(key): value for key, value in values.items() if math.isfinite(value)}
        self._run.log(finite, step=step)

    def close(self) -> None:
        self._run.finish()


def _open(name: str, folder: Path, project: str, config: Mapping[str, Any], first_step: int) -> Tracker:
    if name == "tensorboard":
        return TensorBoardTracker(folder, first_step)
    # The names are those of the packages; a resumed run is a second one in the same group.
    module = importlib.import_module(_PACKAGES[name])
    run_name = folder.absolute().name
    options: dict[str, Any] = {"project": project, "group": run_name, "config": dict(config)}
    if name == "wandb":
        options["dir"] = str(folder)
    resumed = f"-from-{first_step}" if first_step > 1 else ""
    return ServiceTracker(name, module.init(name=f"{run_name}{resumed}", **options))


def _tag(key: str) -> str:
    """Group the curves: `eval_loss` becomes `eval/loss`, `loss` becomes `train/loss`."""
    return f"eval/{key.removeprefix('eval_')}" if key.startswith("eval_") else f"train/{key}"


def _is_installed(package: str) -> bool:
    """A folder of that name in the working directory (wandb makes one) is not the package."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
