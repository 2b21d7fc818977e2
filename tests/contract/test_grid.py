"""Every cell of the grid that is not refused trains, saves, loads and answers.

The cells with several processes are tested in `tests/distributed`.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import leantune
from leantune.config.grid import BASES, METHODS, STRATEGIES, refusal
from tests.fixtures import tiny_model_folder

ONE_PROCESS = [name for name in STRATEGIES if name == "single"]
CELLS = [cell for cell in itertools.product(METHODS, BASES, ONE_PROCESS) if refusal(*cell) is None]
PROMPT = "SELECT name FROM"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "records.jsonl"
    rows = [
        {
            "prompt": f"SELECT name {'FROM employees ' * (i % 3)}WHERE age > {i}",
            "completion": f"there are {i}",
        }
        for i in range(8)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def run(model: Path, data: Path, folder: Path, **axes: Any) -> Any:
    config = {
        "model": str(model),
        "data": {"train": str(data), "format": "prompt_completion"},
        "train": {"max_steps": 2, "micro_batch_size": 2, "global_batch_size": 4, "learning_rate": 1e-2},
        "output": {"dir": str(folder)},
        **axes,
    }
    return leantune.train(config, quiet=True)


@pytest.mark.parametrize(("method", "base", "strategy"), CELLS)
def test_a_cell_trains_and_its_result_answers(
    method: str, base: str, strategy: str, model: Path, data: Path, tmp_path: Path
) -> None:
    result = run(model, data, tmp_path / "run", method=method, base=base, strategy=strategy)
    assert (result.ending, result.steps) == ("finished", 2)
    assert result.first_loss is not None
    assert result.last_loss < result.first_loss
    assert 0 < result.trainable_parameters <= result.total_parameters
    assert (result.folder / "model").is_dir() == (method == "full")
    assert (result.folder / "adapter").is_dir() == (method != "full")

    loaded = leantune.load(result.folder, device="cpu")
    sampling = leantune.Sampling(max_new_tokens=4)
    answers = loaded.generate([PROMPT, PROMPT], sampling)
    assert len(answers) == 2
    assert answers[0] == answers[1]
    assert loaded.trained.attached.name == method


@pytest.mark.parametrize("method", METHODS)
def test_training_moves_the_trained_weights_and_no_others(
    method: str, model: Path, data: Path, tmp_path: Path
) -> None:
    result = run(model, data, tmp_path / "run", method=method)
    trained: Any = leantune.load(result.folder, device="cpu").trained.model
    before: Any = leantune.load(model, device="cpu").trained.model
    weights = trained.state_dict()
    differing = [name for name, value in before.state_dict().items() if not torch.equal(weights[name], value)]
    assert bool(differing) == (method == "full")


@pytest.mark.parametrize("method", METHODS)
def test_the_same_run_twice_gives_the_same_losses(
    method: str, model: Path, data: Path, tmp_path: Path
) -> None:
    first, second = (run(model, data, tmp_path / name, method=method) for name in ("a", "b"))
    assert (first.first_loss, first.last_loss) == (second.first_loss, second.last_loss)


def test_an_adapter_folder_loads_without_its_run(model: Path, data: Path, tmp_path: Path) -> None:
    result = run(model, data, tmp_path / "run", method="loreft")
    moved = tmp_path / "elsewhere"
    (result.folder / "adapter").rename(moved)
    loaded = leantune.load(moved, device="cpu")
    assert loaded.trained.attached.name == "loreft"
    assert len(loaded.generate(PROMPT, leantune.Sampling(max_new_tokens=2))) == 1
