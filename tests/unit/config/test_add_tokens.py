"""Added tokens and trained embeddings in a run file: obeyed, or refused with the fix."""

from __future__ import annotations

from typing import Any

import pytest

from leantune.config import load_config, validate
from leantune.errors import ConfigError

BASE: dict[str, Any] = {"data": {"train": "x.jsonl"}}
TOKENS = {"name": "m", "add_tokens": ["<a>", "<b>"]}


def problems_of(**changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate({**BASE, "model": "m", **changes})
    return caught.value.problems


def test_tokens_come_from_a_list_or_an_override() -> None:
    assert validate({**BASE, "model": TOKENS, "method": "full"}).model.add_tokens == ("<a>", "<b>")
    words = ["model.name=m", "data.train=x", "method=full", "model.add_tokens=[<a>, <b>]"]
    assert load_config(None, words).model.add_tokens == ("<a>", "<b>")
    assert validate({**BASE, "model": "m"}).model.add_tokens == ()


@pytest.mark.parametrize("method", ["lora", "dora", "loreft"])
def test_tokens_need_embeddings_that_are_trained(method: str) -> None:
    """With frozen embeddings the new tokens stayed the mean of all others, and so each other's equals."""
    (problem,) = problems_of(model=TOKENS, method=method)
    assert f"model.add_tokens: method {method}" in problem
    assert "set method.train_embeddings: true, or use method full" in problem
    trained = validate({**BASE, "model": TOKENS, "method": {"name": method, "train_embeddings": True}})
    assert trained.method.model_dump()["train_embeddings"] is True


def test_llama_pro_cannot_train_embeddings_and_says_what_can() -> None:
    (problem,) = problems_of(model=TOKENS, method="llama_pro")
    assert "use lora, dora or a ReFT method with train_embeddings, or use method full" in problem


@pytest.mark.parametrize(
    ("tokens", "part"), [(["<a>", " "], "' ' is blank"), (["<a>", "<b>", "<a>"], "'<a>' named twice")]
)
def test_lists_that_mean_nothing_are_refused(tokens: list[str], part: str) -> None:
    (problem,) = problems_of(model={"name": "m", "add_tokens": tokens}, method="full")
    assert part in problem


@pytest.mark.parametrize("method", ["lora", "loreft"])
def test_8bit_optimizers_know_that_embeddings_are_sharded(method: str) -> None:
    """Interventions are whole on each rank, but not the embeddings trained with them."""
    sections = {
        "method": {"name": method, "train_embeddings": True},
        "train": {"optimizer": "adamw_8bit"},
        "strategy": {"name": "fsdp"},
    }
    (problem,) = problems_of(**sections)
    assert problem.endswith("use adamw")
    assert "does not go with sharded parameters" in problem
