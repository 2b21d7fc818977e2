"""Every cell of the grid that is not refused trains, saves, loads and answers.

The cells with several processes are tested in `tests/distributed`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import leantune
from leantune.bases import load_base
from leantune.config.grid import METHODS
from leantune.models.expand import plan_expansion
from leantune.models.source import resolve_model
from tests.grid import CELLS, SETTINGS

PROMPT = "SELECT name FROM"
WHOLE_MODELS = {"full", "llama_pro"}  # methods that save one
NAMES = {"together": "lora+loreft"}  # of what is made of others


@pytest.fixture(scope="module")
def model(wide_folder: Callable[[str], Path]) -> Path:
    return wide_folder("llama")


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


def run(model: Path, data: Path, folder: Path, method: str, base: str = "dense") -> Any:
    config = {
        "model": str(model),
        "data": {"train": str(data), "format": "prompt_completion"},
        "method": {"name": method, **SETTINGS.get(method, {})},
        "base": base,
        "train": {"max_steps": 2, "micro_batch_size": 2, "global_batch_size": 4, "learning_rate": 1e-2},
        "output": {"dir": str(folder)},
    }
    return leantune.train(config, quiet=True)


@pytest.mark.parametrize(("method", "base"), CELLS)
def test_a_cell_trains_and_its_result_answers(
    method: str, base: str, model: Path, data: Path, tmp_path: Path
) -> None:
    """And its parameters are counted in values of the model, not in bytes of codes that stand for them."""
    result = run(model, data, tmp_path / "run", method, base)
    assert (result.ending, result.steps) == ("finished", 2)
    assert result.first_loss is not None
    assert result.last_loss < result.first_loss
    original = sum(p.numel() for p in load_base("dense", resolve_model(str(model))).parameters())
    new = 0 if method == "full" else result.trainable_parameters
    assert result.trainable_parameters > 0
    assert result.total_parameters == original + new
    assert (result.folder / "model").is_dir() == (method in WHOLE_MODELS)
    assert (result.folder / "adapter").is_dir() == (method not in WHOLE_MODELS)

    loaded = leantune.load(result.folder, device="cpu")
    sampling = leantune.Sampling(max_new_tokens=4)
    answers = loaded.generate([PROMPT, PROMPT], sampling)
    assert len(answers) == 2
    assert answers[0] == answers[1]
    assert loaded.trained.attached.name == NAMES.get(method, method)


@pytest.mark.parametrize("method", METHODS)
def test_training_moves_the_trained_weights_and_no_others(
    method: str, model: Path, data: Path, tmp_path: Path
) -> None:
    """Of a model with new blocks, the old ones are found behind them again, as they were."""
    result = run(model, data, tmp_path / "run", method)
    trained: Any = leantune.load(result.folder, device="cpu").trained.model
    before: Any = leantune.load(model, device="cpu").trained.model
    weights = trained.state_dict()
    if method == "llama_pro":
        expansion = plan_expansion(before.config, SETTINGS[method]["blocks"])
        names = expansion.names(trained)
        new = tuple(f"{name}." for name in expansion.new_names(trained))
        weights = {names(n)[0]: w for n, w in weights.items() if not n.startswith(new)}
    moved = {n: not torch.equal(weights[n], value) for n, value in before.state_dict().items()}
    assert any(moved.values()) == (method == "full")
    assert all(moved.values()) == (method == "full")


@pytest.mark.parametrize("method", METHODS)
def test_the_same_run_twice_gives_the_same_losses(
    method: str, model: Path, data: Path, tmp_path: Path
) -> None:
    first, second = (run(model, data, tmp_path / name, method) for name in ("a", "b"))
    assert (first.first_loss, first.last_loss) == (second.first_loss, second.last_loss)


@pytest.mark.parametrize(
    ("method", "base"), [("loreft", "dense"), ("lora", "nf4"), ("dora", "hqq"), ("together", "nf4")]
)
def test_an_adapter_folder_loads_without_its_run(
    method: str, base: str, model: Path, data: Path, tmp_path: Path
) -> None:
    """Away from its run, an adapter of a packed base was put on the dense one, and said something else."""
    result = run(model, data, tmp_path / "run", method, base)
    tokens = torch.arange(6, 40).unsqueeze(0)
    moved = tmp_path / "elsewhere"
    at_home = leantune.load(result.folder, device="cpu").trained
    (result.folder / "adapter").rename(moved)
    away = leantune.load(moved, device="cpu").trained
    assert away.attached.name == NAMES.get(method, method)
    lengths = torch.tensor([20])
    with torch.no_grad(), at_home.attached.edits(lengths), away.attached.edits(lengths):
        logits = [trained.model(input_ids=tokens).logits for trained in (at_home, away)]
    assert torch.equal(*logits)
