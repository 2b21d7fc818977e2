"""The functions that a notebook calls: train from a mapping, watch it, load the result and ask it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import leantune
from leantune.checkpoint.run_folder import RunFolder
from tests.distributed.ranks import rows


def mapping(model: Path, tmp_path: Path, **sections: Any) -> dict[str, Any]:
    records = [{"prompt": f"number {i}", "completion": "Paris " * (1 + i % 4)} for i in range(12)]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return {
        "model": str(model),
        "data": {"train": str(tmp_path / "records.jsonl"), "validation_share": 0.2},
        "method": {"name": "loreft", "rank": 2},
        "train": {
            "micro_batch_size": 2,
            "global_batch_size": 4,
            "learning_rate": 0.01,
            "device": "cpu",
            "epochs": 2,
        },
        "output": {"dir": str(tmp_path / "run")},
        **sections,
    }


@pytest.mark.parametrize("devices", [1, 2])
def test_train_watch_load_generate(
    devices: int, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`notify` was silent as soon as other processes trained; or the result could not be loaded."""
    seen: list[dict[str, Any]] = []
    config = mapping(model, tmp_path, strategy={"devices": devices})
    result = leantune.train(config, notify=seen.append, quiet=True)
    assert result is not None
    folder = RunFolder.open(result.folder)
    assert seen == rows(folder)
    assert [row["step"] for row in seen if "loss" in row] == list(range(1, result.steps + 1))
    assert result.last_loss == [row["loss"] for row in seen if "loss" in row][-1]
    assert result.eval_loss == [row["eval_loss"] for row in seen if "eval_loss" in row][-1]
    assert capfd.readouterr().out == "", "quiet printed"
    if devices == 1:
        trained = leantune.load(result.folder)
        answers = trained.generate(["number 3", "number 4"], leantune.Sampling(max_new_tokens=5))
        assert len(answers) == 2
        assert all(isinstance(answer, str) for answer in answers)


def test_an_exception_in_notify_ends_the_run_and_is_the_users(model: Path, tmp_path: Path) -> None:
    """An error in the user's own function was swallowed, or wrapped into something else."""

    def notify(row: dict[str, Any]) -> None:
        raise ZeroDivisionError("the user's own")

    with pytest.raises(ZeroDivisionError, match="the user's own"):
        leantune.train(mapping(model, tmp_path), notify=notify, quiet=True)


def test_wrong_settings_raise_with_every_problem(model: Path, tmp_path: Path) -> None:
    """A notebook got the first problem only, or a SystemExit."""
    wrong = mapping(model, tmp_path, method={"name": "lorra"}, train={"epochs": -1})
    with pytest.raises(leantune.ConfigError) as caught:
        leantune.train(wrong)
    assert len(caught.value.problems) == 2
    assert not (tmp_path / "run").exists()


def test_resume_from_a_notebook(model: Path, tmp_path: Path) -> None:
    """The result of a resumed run lacked what came before the stop."""
    result = leantune.train(mapping(model, tmp_path), quiet=True)
    again = leantune.resume(tmp_path / "run", quiet=True)
    assert result is not None
    assert again is not None
    assert (again.steps, again.first_loss, again.last_loss) == (
        result.steps,
        result.first_loss,
        result.last_loss,
    )
