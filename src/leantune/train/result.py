"""The final numbers of a run, and the file that keeps them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from leantune.checkpoint.run_folder import RunFolder


@dataclass(frozen=True)
class RunResult:
    """What a run came to. Losses are means over supervised tokens; tokens_per_second counts all tokens.

    `best_step` is that of the lowest validation loss, `exported_step` that of the weights in
    adapter/ or model/; `eval_loss` is the last one measured; `peak_memory_gib` is that of the rank
    that used most.
    """

    folder: Path
    ending: str
    steps: int
    first_loss: float | None
    last_loss: float | None
    eval_loss: float | None
    best_step: int | None
    exported_step: int
    trainable_parameters: int
    total_parameters: int
    tokens: int
    seconds: float
    tokens_per_second: float
    peak_memory_gib: float


def write_result(folder: RunFolder, result: RunResult) -> None:
    """Keep the result with the run."""
    folder.write_json("result.json", {**asdict(result), "folder": str(result.folder)})


def read_result(folder: RunFolder) -> RunResult:
    """The result of a finished run; raises `CheckpointError` if it has none."""
    values = folder.read_json("result.json")
    known = {key: values[key] for key in RunResult.__dataclass_fields__}
    return RunResult(**{**known, "folder": folder.path})
