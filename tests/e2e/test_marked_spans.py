"""A run that edits marked spans and trains subspaces: the same tokens and dimensions in every later use."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from leantune import api
from leantune.checkpoint.trained import load_trained
from leantune.cli.main import main
from leantune.data.records import EncodedRecords
from leantune.evaluate.run import evaluate_model
from leantune.generate.edits import EditSettings
from leantune.generate.prompts import encode_prompts
from leantune.generate.sampling import Sampling
from tests.fixtures import tiny_model_folder

SHORT = Sampling(max_new_tokens=6)
SUBSPACES = ("formal", "sql", None)


def _ids_of(model: api.Model, prompt: str) -> list[int]:
    parts = model.trained
    return encode_prompts(parts.model, parts.tokenizer, [prompt], 1, parts.attached.markers)[0].ids


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with records and the run that was trained on them."""
    place = tmp_path_factory.mktemp("marked")
    rows = [
        {"prompt": f"the [[old man {i}]] said", "completion": f" name {i % 3}", "subspaces": SUBSPACES[i % 3]}
        for i in range(12)
    ]
    (place / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree: dict[str, Any] = {
        "model": str(tiny_model_folder(place / "tiny")),
        "data": {
            "train": str(place / "a.jsonl"),
            "validation_share": 0.25,
            "template": "plain",
            "markers": ["[[", "]]"],
            "cache": False,
        },
        "method": {
            "name": "loreft",
            "rank": 4,
            "position": "markers",
            "subspaces": {"formal": "0-1", "sql": "2-3"},
        },
        "train": {"max_steps": 6, "global_batch_size": 3, "learning_rate": 0.05, "device": "cpu"},
        "output": {"dir": str(place / "run")},
    }
    api.train(tree, quiet=True)
    return place


def test_the_run_measures_its_validation_records_as_it_did(place: Path) -> None:
    """Marks and subspaces were told in training only."""
    trained = load_trained(place / "run")
    last = [json.loads(line) for line in (place / "run/metrics.jsonl").read_text().splitlines()]
    best = min(row["eval_loss"] for row in last if "eval_loss" in row)
    assert evaluate_model(trained).values["loss"] == pytest.approx(best, rel=1e-5)
    records = EncodedRecords.load(place / "run/records/train.safetensors")
    assert records.marked is not None
    assert records.subspaces is not None
    assert records.subspaces.shape == (9, 4)


def test_strength_zero_measures_and_answers_as_the_base_does(place: Path) -> None:
    trained, base = load_trained(place / "run"), load_trained(place / "run", untouched=True)
    off = EditSettings(strength=0.0)
    data = str(place / "a.jsonl")
    edited, untouched = (
        evaluate_model(t, data, edits=e) for t, e in ((trained, off), (base, EditSettings()))
    )
    assert edited.values == pytest.approx(untouched.values)
    assert edited.answers == untouched.answers
    assert evaluate_model(trained, data, ["loss"]).values["loss"] < edited.values["loss"]


def test_records_are_measured_on_the_subspaces_that_they_choose(place: Path) -> None:
    """Evaluation edited every dimension for every record."""
    trained = load_trained(place / "run")
    loss = {
        subspaces: evaluate_model(
            trained, str(place / "a.jsonl"), ["loss"], edits=EditSettings(subspaces=subspaces)
        ).values["loss"]
        for subspaces in (None, ("formal",), ("formal", "sql"))
    }
    assert len(set(loss.values())) == 3
    chosen = evaluate_model(trained, str(place / "a.jsonl"), max_records=1, sampling=SHORT).answers
    formal = EditSettings(subspaces=("formal",))
    model = api.Model(trained)
    assert chosen == model.generate("the [[old man 0]] said", SHORT, edits=formal)


def test_an_adapter_folder_knows_its_markers(place: Path, tmp_path: Path) -> None:
    """Away from its run, an adapter left the markers in the text and edited nothing."""
    shutil.copytree(place / "run/adapter", tmp_path / "adapter")
    prompt = "the [[old man]] said"
    alone = api.load(tmp_path / "adapter", template="plain")
    assert alone.trained.attached.markers == ("[[", "]]")
    text = alone.complete([prompt], SHORT)
    assert text == api.load(place / "run").complete([prompt], SHORT)


@pytest.mark.parametrize("part", ["run", "adapter"])
def test_the_base_beside_a_run_reads_the_prompts_without_markers(
    place: Path, tmp_path: Path, part: str
) -> None:
    """The base was asked with the markers in the text, so that more than training made the difference."""
    named = (
        shutil.copytree(place / "run/adapter", tmp_path / "adapter") if part == "adapter" else place / "run"
    )
    base = api.compare(["the [[old man]] said"], ["base", str(named)], SHORT).columns["base"]
    rendered = load_trained(named).template.user_prompt("the old man said")
    spans = [rendered.partition("old man")[0] + "[[old man]]" + rendered.partition("old man")[2]]
    untouched = api.Model(load_trained(named, untouched=True))
    assert untouched.trained.attached.markers == ("[[", "]]")
    assert base == tuple(untouched.complete(spans, SHORT))
    assert "[[" not in str(untouched.trained.tokenizer.decode(_ids_of(untouched, spans[0])))


def test_the_verbs_take_the_settings(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, prompt = str(place / "run"), "the [[old man 1]] said"
    short = ["--max-new-tokens", "6"]
    settings = ["--strength", "0.5", "--subspaces", "sql,0", "--edit-tokens", "prompt"]
    assert main(["generate", run, prompt, *short, *settings]) == 0
    expected = api.load(run).generate(prompt, SHORT, edits=EditSettings(0.5, ("sql", 0), "prompt"))
    assert capsys.readouterr().out == expected[0] + "\n"
    assert main(["eval", run, "--data", str(place / "a.jsonl"), "--strength", "0", "--json", *short]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert main(["eval", run, "--data", str(place / "a.jsonl"), "--json", *short]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] < measured["loss"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--subspaces", "formale"], "there is no subspace 'formale'; method.subspaces names formal, sql"),
        (["--strength", "nan"], "strength: nan is not a number"),
    ],
)
def test_what_the_run_cannot_obey_is_refused(
    place: Path, arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(place / "run"), "the", *arguments]) != 0
    assert expected in capsys.readouterr().err
