"""`objective` and the rules between it and the other sections."""

from __future__ import annotations

from typing import Any

import pytest

from leantune.config import apply_overrides, load_config, to_tree, validate
from leantune.config.objectives import ClassificationObjective, DpoObjective
from leantune.errors import ConfigError


def tree(**sections: Any) -> dict[str, Any]:
    return {"model": "demo", "data": {"train": "records.jsonl", **sections.pop("data", {})}, **sections}


def test_the_default_is_the_next_token_and_a_name_stands_for_its_section() -> None:
    assert validate(tree()).objective.name == "next_token"
    objective = validate(tree(objective="dpo")).objective
    assert isinstance(objective, DpoObjective)
    assert objective.beta == 0.1


def test_overrides_reach_into_the_section() -> None:
    plain = tree()
    assert apply_overrides(plain, ["objective=dpo", "objective.beta=0.5"]) == []
    assert validate(plain).objective == DpoObjective(beta=0.5)


def test_labels_are_texts_whatever_yaml_reads(tmp_path: Any) -> None:
    """`labels: [no, yes]` is false and true in YAML 1.1, and 0 and 1 are numbers."""
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: demo\ndata: {train: a.jsonl}\n"
        "objective: {name: classification, labels: [0, 1, true, maybe]}\n"
    )
    objective = load_config(path).objective
    assert isinstance(objective, ClassificationObjective)
    assert objective.labels == ("0", "1", "true", "maybe")


def test_a_resolved_configuration_reads_back() -> None:
    config = validate(tree(objective={"name": "classification", "labels": ["b", "a"]}))
    assert validate(to_tree(config)) == config


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"objective": "dpo", "method": "full"}, "method: full has no adapter"),
        ({"objective": "reward", "method": "llama_pro"}, "method: llama_pro has no adapter"),
        (
            {"objective": "dpo", "method": {"name": "lora", "train_embeddings": True}},
            "method.train_embeddings: changes the model itself",
        ),
        (
            {"objective": "reward", "method": [{"name": "lora", "train_embeddings": True}, "loreft"]},
            "method.train_embeddings: trains the output head, which is not used",
        ),
        ({"objective": "classification", "data": {"train": "dummy"}}, "needs classification records"),
        ({"objective": "dpo", "data": {"format": "alpaca"}}, "set data.format: preference"),
        ({"objective": "dpo", "data": {"train_on": "all"}}, "data.train_on: has no effect"),
        ({"objective": "dpo", "train": {"loss_chunk_tokens": 8}}, "train.loss_chunk_tokens: has no effect"),
        ({"data": {"format": "preference"}}, "set objective: dpo or reward"),
        ({"data": {"format": "classification"}}, "set objective: classification"),
        ({"objective": {"name": "classification", "labels": ["a", "b", "a"]}}, "a named twice"),
        ({"objective": {"name": "classification", "labels": ["a"]}}, "at least 2"),
        ({"objective": "clasification"}, "did you mean classification"),
        ({"objective": {"name": "dpo", "bta": 1}}, "did you mean objective.beta"),
        ({"objective": {"name": "dpo", "beta": 0}}, "objective.beta"),
        ({"objective": {"name": "reward", "beta": 1}}, "beta belongs to dpo"),
    ],
)
def test_what_cannot_be_obeyed_is_refused(sections: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem.replace(".", r"\.")):
        validate(tree(**sections))
