"""Evaluation reads records as training does, and measures what the run measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from leantune.checkpoint.trained import Trained, load_trained
from leantune.data.encode import EncodingRules, encode_examples
from leantune.data.formats import read_examples
from leantune.data.readers import Row
from leantune.errors import ConfigError, DataError
from leantune.evaluate import run as run_module
from leantune.evaluate.run import evaluate_model
from leantune.generate.sampling import Sampling
from tests.fixtures import tiny_model_folder
from tests.runs import tiny_run

SHORT = Sampling(max_new_tokens=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> Trained:
    return load_trained(folder, device="cpu")


def write(path: Path, records: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("record", "columns"),
    [
        ({"instruction": "Greet.", "response": "GOLD"}, {"output": "response"}),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "GOLD"}]}, {}),
        ({"text": "### Human: a### Assistant: GOLD"}, {}),
        ({"prompt": "p", "completion": "GOLD", "output": "another"}, {}),
        ({"q": "1 + 1?", "a": "#### 2"}, {"question": "q", "answer": "a"}),
        (
            {"q": "?", "schema": "CREATE TABLE t (a INTEGER)", "sql": "SELECT a FROM t"},
            {"question": "q", "context": "schema", "answer": "sql"},
        ),
    ],
)
def test_the_answer_of_every_shape_and_column_is_found(
    record: dict[str, Any], columns: dict[str, str], tmp_path: Path, model: Trained,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The raw record was searched for the answer, and only after all answers were generated."""
    example = next(read_examples([Row(record, "r")], "auto", columns)[1])
    monkeypatch.setattr(run_module, "generate", lambda *_, **__: [example.answer])
    result = evaluate_model(model, write(tmp_path / "r.jsonl", [record]), columns=columns)
    (judged,) = result.scores.values()
    assert judged.correct == 1
    assert result.values.keys() == {"loss", "perplexity", judged.metric}


def test_plain_text_has_a_loss_only(tmp_path: Path, model: Trained, folder: Path) -> None:
    """The default metric was exact match, which found no answer; a chat template refused the records."""
    data = write(tmp_path / "t.jsonl", [{"text": "the old man"}, {"text": "the woman"}])
    result = evaluate_model(model, data)
    assert result.values.keys() == {"loss", "perplexity"}
    assert result.answers == []
    briefed = load_trained(tiny_run(tmp_path / "run", folder, data={"system": "Be brief."}).path)
    assert evaluate_model(briefed, data).num_records == 2


def test_a_record_without_an_answer_is_named_before_anything_is_generated(
    tmp_path: Path, model: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "generate", lambda *_, **__: pytest.fail("generated in vain"))
    records = [{"prompt": "p", "completion": "a"}, {"prompt": "q", "completion": ""}]
    with pytest.raises(DataError, match=r"p\.jsonl: record 2: it has no answer .*exact_match"):
        evaluate_model(model, write(tmp_path / "p.jsonl", records))


def test_the_loss_counts_what_the_run_counted(tmp_path: Path, folder: Path) -> None:
    """train_on, max_length and too_long of the run were ignored, and nobody was told what was left out."""
    records = [{"instruction": "Greet.", "output": "Hello " * n} for n in (1, 2, 60)]
    data = write(tmp_path / "a.jsonl", records)
    rows = [Row(record, "r") for record in records]
    rules = {"max_length": 40, "train_on": "all"}
    cases: list[tuple[Literal["truncate", "drop"], int, int]] = [("truncate", 3, 1), ("drop", 2, 0)]
    for too_long, kept, truncated in cases:
        run = tiny_run(tmp_path / too_long, folder, data={**rules, "too_long": too_long})
        trained = load_trained(run.path, device="cpu")
        result = evaluate_model(trained, data, ["loss"])
        encoded = encode_examples(
            read_examples(rows)[1], trained.template, EncodingRules(40, too_long, "all"), source=data
        )
        assert result.facts == encoded.facts
        assert (encoded.facts.num_kept, encoded.facts.num_truncated) == (kept, truncated)
        assert result.as_dict()["loss_records"]["kept"] == kept
        longer = evaluate_model(trained, data, ["loss"], max_length=1000)
        assert longer.facts is not None
        assert longer.facts.num_kept == 3
        assert longer.values != result.values


def test_the_runs_own_validation_records_cannot_be_chosen_from(tmp_path: Path, folder: Path) -> None:
    """max_records without data was ignored."""
    run = tiny_run(tmp_path / "run", folder)
    trained = load_trained(run.adapter, device="cpu")
    with pytest.raises(ConfigError, match="no validation records of its own"):
        evaluate_model(trained)
    rows = [Row({"instruction": "Greet.", "output": "Hello"}, "r", index) for index in range(3)]
    rules = EncodingRules(64)
    records = encode_examples(read_examples(rows)[1], trained.template, rules, source="v")
    records.save(run.records / "validation.safetensors")
    result = evaluate_model(trained)
    assert result.num_records == 3
    assert result.values.keys() == {"loss", "perplexity"}
    with pytest.raises(ConfigError, match="are about records that are named"):
        evaluate_model(trained, max_records=2)
    with pytest.raises(ConfigError, match="gsm8k: needs the records themselves"):
        evaluate_model(trained, metrics=["gsm8k"])


def test_a_run_in_bf16_is_measured_in_bf16(tmp_path: Path, folder: Path) -> None:
    """Weights in bf16 met fp32 factors outside the autocast that training ran in."""
    data = write(tmp_path / "a.jsonl", [{"instruction": "Greet.", "output": "Hello there"}])
    losses: list[float] = []
    for precision in ("fp32", "bf16_mixed"):
        run = tiny_run(tmp_path / precision, folder, train={"precision": precision})
        trained = load_trained(run.path, device="cpu")
        losses.append(evaluate_model(trained, data, ["loss"]).values["loss"])
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
