"""`leantune train` from a file of records to a run folder, and every way in which it must say no."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from leantune.checkpoint.run_folder import RunFolder
from tests.distributed.ranks import assert_same_curve, assert_same_weights, command, evaluations, rows, steps

Records = list[dict[str, Any]]


def as_json(path: Path, records: Records) -> None:
    path.write_text(json.dumps(records, indent=1), encoding="utf-8")


def as_jsonl(path: Path, records: Records) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def as_csv(path: Path, records: Records) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]))
        writer.writeheader()
        writer.writerows(records)


def as_parquet(path: Path, records: Records) -> None:
    from datasets import Dataset

    Dataset.from_list(records).to_parquet(path)


def turns(i: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"How many people are {i}?"},
        {"role": "assistant", "content": "twelve " * (1 + i % 3)},
        {"role": "user", "content": "And the old man?"},
        {"role": "assistant", "content": f"said {i}"},
    ]


FORMATS: dict[str, tuple[str, Callable[[Path, Records], None], Callable[[int], dict[str, Any]]]] = {
    "alpaca": (
        "a.json",
        as_json,
        lambda i: {"instruction": f"Say {i}", "input": "", "output": f"the name {i}"},
    ),
    "chat": ("c.jsonl", as_jsonl, lambda i: {"messages": turns(i)}),
    "prompt_completion": (
        "p.csv",
        as_csv,
        lambda i: {"prompt": f"Question {i}:", "completion": f"Paris {i}"},
    ),
    "text": ("t.jsonl", as_jsonl, lambda i: {"text": f"the capital of France, number {i}"}),
    "sql": (
        "s.json",
        as_json,
        lambda i: {
            "question": f"Who is older than {i}?",
            "context": "CREATE TABLE employees (name TEXT, age INT)",
            "answer": f"SELECT name FROM employees WHERE age > {i}",
        },
    ),
    "qa": ("q.parquet", as_parquet, lambda i: {"question": f"What follows {i}?", "answer": str(i + 1)}),
    "guanaco": ("g.jsonl", as_jsonl, lambda i: {"text": f"### Human: name {i}### Assistant: the man {i}"}),
}


@pytest.fixture
def place(model: Path, tmp_path: Path) -> Path:
    """A folder with a file of ten records of each format, and a run file for the alpaca one."""
    for name, write, record in FORMATS.values():
        write(tmp_path / name, [record(i) for i in range(10)])
    tree = {
        "model": str(model),
        "data": {"train": "a.json"},
        "method": {"name": "lora", "rank": 4},
        "train": {"micro_batch_size": 2, "global_batch_size": 4, "learning_rate": 0.01, "device": "cpu"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return tmp_path


def test_every_format_trains_from_its_file(place: Path) -> None:
    """A format was read by its unit tests only, or was detected as another one."""
    started = {
        format: command(
            "train", "run.yaml", f"data.train={file}", f"output.dir={format}", cwd=place, name=format
        )
        for format, (file, _, _) in FORMATS.items()
    }
    for format, ranks in started.items():
        assert ranks.wait() == [0], ranks.output()
        shown = ranks.output()
        folder = RunFolder.open(place / format)
        assert f"format {format} (detected)" in shown
        assert "10 of 10 records kept" in shown
        assert "⟦" in shown
        assert folder.read_json("data.json")["format"] == format
        assert len(steps(folder)) == 3
        assert sum(row["supervised_tokens"] for row in steps(folder)) > 10
        assert {path.name for path in folder.path.iterdir()} == {
            *("run.yaml", "metrics.jsonl", "data.json", "result.json", "adapter", "checkpoints", "records")
        }


def test_overrides_win_and_the_resolved_file_gives_the_same_run(place: Path) -> None:
    """run.yaml of a run lacked what the command line had said, so it could not be repeated."""
    choices = [
        "method=loreft",
        "method.rank=2",
        "method.layers=0;2",
        "train.epochs=2",
        "data.validation_share=0.2",
    ]
    first = command("train", "run.yaml", *choices, "train.gradient_accumulation_steps=2", cwd=place)
    assert first.wait() == [0], first.output()
    folder = RunFolder.open(place / "runs" / "run")
    resolved = yaml.safe_load(folder.config.read_text())
    assert resolved["method"]["name"] == "loreft"
    assert (resolved["method"]["rank"], resolved["method"]["layers"]) == (2, "0;2")
    assert resolved["train"]["global_batch_size"] == 4
    assert len(evaluations(folder)) == 2
    again = command("train", str(folder.config), "output.dir=again", cwd=place)
    assert again.wait() == [0], again.output()
    assert_same_curve(folder, RunFolder.open(place / "again"), rel=1e-6)
    assert_same_weights(folder, RunFolder.open(place / "again"), atol=1e-7)
    answer = command("generate", "again", "Say 3", "--max-new-tokens", "4", cwd=place, name="answer")
    assert answer.wait() == [0], answer.output()
    assert answer.output().strip()


def test_wrong_settings_are_all_told_before_torch_is_imported(place: Path) -> None:
    """Every problem cost another start of many seconds, or a traceback came instead of a message."""
    program = "import sys; from leantune.cli.main import main; code = main(sys.argv[1:])"
    told = "print('torch' in sys.modules); sys.exit(code)"
    wrong = ["train.micro_batch_sise=2", "method.rank=-1", "train.learning_rate=fast", "eval.every_steps=3"]
    done = subprocess.run(
        [sys.executable, "-c", f"{program}; {told}", "train", "run.yaml", *wrong],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout.strip() == "False", "torch was imported to say that a key is wrong"
    for words in ("4 problems in run.yaml", "did you mean train.micro_batch_size?", "method.rank", "'fast'"):
        assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (place / "runs").exists()


@pytest.mark.parametrize(
    ("setting", "code", "words"),
    [
        ("data.train=b.json", 1, "b.json: no such file or folder"),
        ("data.train=broken.jsonl", 1, "broken.jsonl:2: not valid JSON"),
        ("data.max_length=2", 1, "none of the 10 records can be trained on"),
        ("model.name=./nowhere", 1, "./nowhere is not a model folder on this machine"),
        ("train.schedule.warmup_steps=50", 2, "50 is more than the 3 steps of the whole run"),
        ("method.layers=9", 1, "9"),
        ("output.dir=taken", 2, "output.dir: taken is not empty and holds no run"),
        ("output.dir=a.json", 2, "a.json is a file"),
    ],
)
def test_what_cannot_be_done_is_told_once_and_leaves_nothing_behind(
    setting: str, code: int, words: str, place: Path
) -> None:
    """A folder without a run stayed behind and was in the way of the next try."""
    (place / "broken.jsonl").write_text('{"text": "whole"}\n{"text": "half\n', encoding="utf-8")
    (place / "taken").mkdir()
    (place / "taken" / "letter.txt").write_text("mine")
    before = sorted(place.rglob("*"))
    dir = [] if setting.startswith("output.dir") else ["output.dir=out"]
    refused = command("train", "run.yaml", setting, *dir, cwd=place)
    assert refused.wait() == [code], refused.output()
    assert words in refused.output()
    assert refused.output().count("leantune train: ") == 1
    assert "Traceback" not in refused.output()
    assert sorted(place.rglob("*")) == sorted([*before, place / "command.log"])


def test_an_existing_run_is_replaced_only_if_asked_for(place: Path) -> None:
    """A second start wrote into the run of the first one; or a typing error removed a run."""
    assert command("train", "run.yaml", "output.dir=out", cwd=place, name="1").wait() == [0]
    folder = RunFolder.open(place / "out")
    before = rows(folder)
    refused = command("train", "run.yaml", "output.dir=out", cwd=place, name="2")
    assert refused.wait() == [2]
    assert "out already holds a run" in refused.output()
    assert rows(folder) == before
    choices = ["output.dir=out", "output.overwrite=true", "train.max_steps=1"]
    assert command("train", "run.yaml", *choices, cwd=place, name="3").wait() == [0]
    assert len(rows(folder)) == 1


def test_nothing_can_be_resumed_where_nothing_was_saved(place: Path) -> None:
    """`resume` of a run without checkpoints, or of no run, trained something else or showed a traceback."""
    choices = ["output.dir=out", "output.checkpoints=false", "train.max_steps=1"]
    assert command("train", "run.yaml", *choices, cwd=place, name="1").wait() == [0]
    own = (place / "run.yaml").read_text()
    (place / "claimed").mkdir()
    (place / "claimed" / "run.yaml").write_text(
        "# a run of leantune that is about to start; its configuration follows\n"
    )
    for name, words in (
        ("out", "output.checkpoints=false, so there is nothing to continue from"),
        ("outt", "outt is not a run: it does not exist; did you mean out?"),
        (".", ". is not a run: it has a run.yaml, but nothing that a run writes"),
        ("claimed", "claimed is not a run: it ended before its data was prepared"),
    ):
        refused = command("resume", name, cwd=place, name=f"resume-{name}")
        assert refused.wait() == [1]
        assert words in refused.output()
        assert "Traceback" not in refused.output()
    assert (place / "run.yaml").read_text() == own, "the user's own file was written over"


def test_tensorboard_gets_the_numbers_of_the_metrics_file(place: Path) -> None:
    """A tracker was accepted and got nothing."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    choices = ["output.dir=out", "output.trackers=[tensorboard]", "data.validation_share=0.2"]
    ranks = command("train", "run.yaml", *choices, cwd=place)
    assert ranks.wait() == [0], ranks.output()
    folder = RunFolder.open(place / "out")
    events = EventAccumulator(str(folder.tensorboard)).Reload()
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [(row["step"], pytest.approx(row["loss"], rel=1e-6)) for row in steps(folder)]
    validation = [event.value for event in events.Scalars("eval/loss")]
    assert validation == pytest.approx([row["eval_loss"] for row in evaluations(folder)], rel=1e-6)
