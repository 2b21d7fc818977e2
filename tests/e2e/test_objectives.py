"""Classes, preferences and rewards from a file of records to their use, and the page that shows them."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import leantune
from leantune.config import validate
from leantune.config.yaml import parse_yaml_value
from leantune.errors import CheckpointError, ConfigError, DataError
from leantune.methods.head import head_of
from tests.distributed.ranks import evaluations

PAGE = (Path(__file__).parents[2] / "docs" / "objectives.md").read_text(encoding="utf-8")
WORDS = ("name", "people", "old", "capital", "age", "woman")
TEXTS = [
    {"text": f"{WORDS[i % 6]} {WORDS[i // 6 % 6]} {('no', 'yes')[i % 2]}", "label": ("bad", "good")[i % 2]}
    for i in range(48)
]
PAIRS = [
    {
        "prompt": f"Question {WORDS[i % 6]}:",
        "chosen": f"twelve {WORDS[i // 6 % 6]}",
        "rejected": "said the man",
    }
    for i in range(48)
]


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def place(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one finished run of each objective: classification, dpo, reward."""
    folder = tmp_path_factory.mktemp("objectives")
    texts, pairs = write(folder / "texts.jsonl", TEXTS), write(folder / "pairs.jsonl", PAIRS)
    runs: dict[str, tuple[Path, Any]] = {
        "classification": (texts, {"name": "loreft", "rank": 4, "position": "f1+l1"}),
        "dpo": (pairs, {"name": "lora", "rank": 4}),
        "reward": (pairs, [{"name": "lora", "rank": 4}, {"name": "loreft", "rank": 2}]),
    }
    for objective, (data, method) in runs.items():
        leantune.train(
            {
                "model": str(model),
                "data": {"train": str(data), "validation_share": 0.25, "template": "plain", "cache": False},
                "method": method,
                "objective": objective,
                "train": {"micro_batch_size": 6, "learning_rate": 1e-2, "device": "cpu", "epochs": 6.0},
                "output": {"dir": str(folder / objective)},
            },
            quiet=True,
        )
    return folder


@pytest.mark.parametrize("objective", ["classification", "dpo", "reward"])
def test_what_can_be_told_apart_is_learned(objective: str, place: Path) -> None:
    """Held-out texts and pairs are told apart, and the loss that is reported is the one that was measured."""
    model = leantune.load(place / objective)
    last = evaluations(model.trained.run)[-1]  # pyright: ignore[reportArgumentType]
    assert last["eval_accuracy"] == 1.0
    assert last["eval_records" if objective == "classification" else "eval_pairs"] == 12
    result = leantune.evaluate(model)
    assert result.values["accuracy"] == 1.0
    best = min(row["eval_loss"] for row in evaluations(model.trained.run))  # pyright: ignore[reportArgumentType]
    assert result.values["loss"] == pytest.approx(best, rel=1e-5)
    data = place / ("texts.jsonl" if objective == "classification" else "pairs.jsonl")
    assert leantune.evaluate(model, str(data)).values["accuracy"] == 1.0


def test_classes_come_back_in_the_order_of_the_texts(place: Path) -> None:
    """Sorted by length for the forward pass, the answers were left in that order; or the labels swapped."""
    model = leantune.load(place / "classification")
    texts = [record["text"] for record in TEXTS] + ["old " * 30 + "yes"]
    wanted = [record["label"] for record in TEXTS] + ["good"]
    assert model.classify(texts, batch_size=5) == wanted
    assert model.classify([("old people", "no")]) == ["bad"]
    assert model.classify([]) == []
    with pytest.raises(DataError, match="text 2: empty text"):
        model.classify(["a", " "])


def test_rewards_prefer_the_chosen_answers_and_do_not_depend_on_the_batch(place: Path) -> None:
    model = leantune.load(place / "reward")
    prompts, chosen = [p["prompt"] for p in PAIRS[:5]], [p["chosen"] for p in PAIRS[:5]]
    good = model.reward(prompts, chosen)
    bad = model.reward(prompts, ["said the man"] * 5)
    assert all(a > b for a, b in zip(good, bad, strict=True))
    assert model.reward(prompts[2:3], chosen[2:3])[0] == pytest.approx(good[2], rel=1e-4)
    with pytest.raises(DataError, match="1 prompts, but 2 answers"):
        model.reward(["a"], ["b", "c"])


def test_an_adapter_folder_alone_knows_its_classes(place: Path, model: Path, tmp_path: Path) -> None:
    """Away from its run, the head came back without its labels or its values."""
    shutil.copytree(place / "classification" / "adapter", tmp_path / "copy")
    moved = leantune.load(tmp_path / "copy", base=str(model), template="plain")
    here = leantune.load(place / "classification")
    one, two = head_of(moved.trained.attached), head_of(here.trained.attached)
    assert one is not None
    assert two is not None
    assert one.labels == two.labels == ("bad", "good")
    assert torch.equal(one.module.weight, two.module.weight)
    texts = [record["text"] for record in TEXTS[:6]]
    assert moved.classify(texts) == here.classify(texts)
    result = leantune.evaluate(moved, str(place / "texts.jsonl"))
    assert result.values["accuracy"] == 1.0


def test_a_head_config_of_another_kind_is_refused(place: Path, model: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "reward" / "adapter", tmp_path / "copy")
    path = tmp_path / "copy" / "head_config.json"
    path.write_text(path.read_text().replace("leantune-head", "other"))
    with pytest.raises(CheckpointError, match="is not a head of leantune-head 1"):
        leantune.load(tmp_path / "copy", base=str(model))


def test_what_has_a_head_does_not_write_and_what_has_none_does_not_judge(place: Path, tmp_path: Path) -> None:
    """An answer from a model that was never trained to give one would be taken for its own."""
    classes, rewards, dpo = (leantune.load(place / name) for name in ("classification", "reward", "dpo"))
    with pytest.raises(ConfigError, match=r"objective classification and does not write answers; .*classify"):
        classes.generate("old people")
    with pytest.raises(ConfigError, match=r"objective reward and does not write answers; .*reward\("):
        list(rewards.stream("old people"))
    assert isinstance(dpo.generate("Question age:")[0], str)
    for verb in (lambda: dpo.classify(["a"]), lambda: rewards.classify(["a"])):
        with pytest.raises(ConfigError, match="was not trained with objective classification"):
            verb()
    with pytest.raises(ConfigError, match="was not trained with objective reward"):
        classes.reward(["a"], ["b"])
    with pytest.raises(CheckpointError, match="has a trained head"):
        leantune.merge(place / "reward", tmp_path / "merged")
    with pytest.raises(ConfigError, match="exact_match judge answers"):
        leantune.evaluate(classes, str(place / "texts.jsonl"), ["exact_match"])


def test_a_model_that_learned_from_pairs_still_answers_questions(place: Path, tmp_path: Path) -> None:
    """Every evaluation of a DPO run wanted pairs."""
    questions = write(tmp_path / "q.jsonl", [{"prompt": "Question age:", "completion": "twelve age"}])
    result = leantune.evaluate(place / "dpo", str(questions))
    assert set(result.values) == {"loss", "perplexity", "exact_match"}
    assert len(result.answers) == 1


def test_one_class_and_unknown_classes_are_told_before_a_run(model: Path, tmp_path: Path) -> None:
    one = write(tmp_path / "one.jsonl", [{"text": "a b", "label": "x"}] * 4)
    tree: dict[str, Any] = {
        "model": str(model),
        "data": {"train": str(one), "template": "plain", "cache": False},
        "objective": "classification",
        "output": {"dir": str(tmp_path / "run")},
    }
    with pytest.raises(DataError, match="all records have the label x"):
        leantune.train(tree, quiet=True)
    tree["objective"] = {"name": "classification", "labels": ["y", "z"]}
    with pytest.raises(DataError, match=r"one.jsonl:1: the label 'x' is none of the classes y, z"):
        leantune.train(tree, quiet=True)
    assert not (tmp_path / "run").exists()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_run_files_of_the_page_validate() -> None:
    objectives = [validate(parse_yaml_value(block)).objective.name for block in blocks("yaml")]
    assert objectives == ["classification", "dpo", "reward"]


def test_the_code_of_the_page_runs(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "reviews.jsonl", TEXTS[:10])
    write(tmp_path / "pairs.jsonl", PAIRS[:6])
    printed = io.StringIO()
    for block in blocks("python"):
        with contextlib.redirect_stdout(printed):
            exec(block.replace('"demo"', repr(str(model))), {})
    lines = printed.getvalue().splitlines()
    assert any(re.fullmatch(r"\['(good|bad)', '(good|bad)'\]", line) for line in lines)
    assert any(re.fullmatch(r"\[-?\d+\.\d+, -?\d+\.\d+\]", line) for line in lines)
