"""The folder of a run: nothing is lost, nothing is shared, and every refusal names the way out."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from leantune.checkpoint.atomic import write_folder
from leantune.checkpoint.run_folder import RunFolder
from leantune.errors import CheckpointError, ConfigError

CONFIG = "model:\n  name: demo\ndata:\n  train: dummy\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def finished_run(path: Path) -> RunFolder:
    run = RunFolder.create(str(path), "unused", False)
    run.write_config(CONFIG)
    run.metrics.write_text('{"step": 1}\n')
    run.samples.write_text("# samples\n")
    run.write_json("result.json", {"loss": 1.0})
    run.write_json("data.json", {"num_records": 3})
    write_folder(run.adapter, lambda folder: (folder / "adapter.safetensors").write_text("x") and None)
    step = run.checkpoints / "step-00000010"
    write_folder(step, lambda folder: (folder / "state.json").write_text("{}") and None)
    (run.checkpoints / "best.json").write_text("{}")
    run.records.mkdir()
    (run.records / "train.safetensors").write_text("x")
    run.tensorboard.mkdir()
    (run.tensorboard / "events.out.tfevents.1.host").write_text("x")
    return run


def test_default_folders_are_numbered(here: Path) -> None:
    made = [RunFolder.create(None, "sql", False).path for _ in range(3)]
    assert made == [Path("runs/sql"), Path("runs/sql-2"), Path("runs/sql-3")]
    assert all((path / "run.yaml").is_file() for path in made)


def _create(name: str) -> str:
    return str(RunFolder.create(None, name, False).path)


def test_runs_started_at_once_get_different_folders(here: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        paths = pool.map(_create, ["sql"] * 24, chunksize=1)
    assert len(set(paths)) == 24


def _create_explicit(directory: str) -> str:
    try:
        RunFolder.create(directory, "x", False)
        return "made"
    except ConfigError as error:
        return str(error)


def test_of_two_runs_started_at_once_in_one_folder_one_is_refused(here: Path) -> None:
    (here / "empty").mkdir()
    with multiprocessing.get_context("fork").Pool(4) as pool:
        outcomes = pool.map(_create_explicit, ["empty"] * 8 + ["new"] * 8, chunksize=1)
    assert sorted(outcome == "made" for outcome in outcomes) == [False] * 14 + [True] * 2
    assert all("output.dir" in outcome for outcome in outcomes if outcome != "made")


def test_a_run_that_takes_the_folder_between_our_look_and_our_claim_keeps_it(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "empty").mkdir()
    real = Path.iterdir

    def iterdir(self: Path) -> Iterator[Path]:
        items = list(real(self))
        if self.name == "empty" and not items:
            (self / "run.yaml").write_text("theirs")
        return iter(items)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    with pytest.raises(ConfigError, match="was taken by another run just now"):
        RunFolder.create("empty", "x", False)
    assert (here / "empty" / "run.yaml").read_text() == "theirs"


def test_a_folder_with_a_run_is_refused_with_three_fixes(here: Path) -> None:
    finished_run(here / "done")
    with pytest.raises(ConfigError) as refused:
        RunFolder.create("done", "x", False)
    message = str(refused.value)
    for part in (
        "done already holds a run",
        "another output.dir",
        "leantune resume done",
        "output.overwrite=true",
    ):
        assert part in message
    assert (here / "done" / "result.json").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_or_file_of_somebody_else_is_refused(here: Path, overwrite: bool) -> None:
    (here / "photos").mkdir()
    (here / "photos" / "cat.jpg").write_text("cat")
    with pytest.raises(ConfigError, match=r"photos is not empty and holds no run \(it holds cat\.jpg\)"):
        RunFolder.create("photos", "x", overwrite)
    (here / "photos" / "run.yaml").write_text("services: [web]\n")
    with pytest.raises(ConfigError, match="holds no run"):
        RunFolder.create("photos", "x", overwrite)
    with pytest.raises(ConfigError, match=r"output\.dir: photos/cat\.jpg: .* is a file"):
        RunFolder.create("photos/cat.jpg", "x", overwrite)
    with pytest.raises(ConfigError, match=r"cannot use photos/cat\.jpg/run: Not a directory"):
        RunFolder.create("photos/cat.jpg/run", "x", overwrite)
    assert (here / "photos" / "cat.jpg").read_text() == "cat"
    assert (here / "photos" / "run.yaml").read_text() == "services: [web]\n"


def test_overwriting_removes_what_a_run_wrote_and_nothing_else(here: Path) -> None:
    run = finished_run(here / "done")
    (run.path / "notes.md").write_text("mine")
    (run.path / f".tmp-adapter-{os.getpid()}-0123abcd").mkdir()
    again = RunFolder.create("done", "x", True)
    assert sorted(path.name for path in again.path.iterdir()) == ["notes.md", "run.yaml"]
    assert "model" not in again.config.read_text()


def test_overwriting_without_a_folder_replaces_the_default_one(here: Path) -> None:
    finished_run(here / "runs" / "sql")
    assert RunFolder.create(None, "sql", True).path == Path("runs/sql")
    assert [path.name for path in (here / "runs").iterdir()] == ["sql"]
    assert not (here / "runs" / "sql" / "result.json").exists()


def test_a_run_that_died_before_its_configuration_can_be_overwritten(here: Path) -> None:
    RunFolder.create("died", "x", False)
    RunFolder.create("died", "x", True)
    (here / "died" / "run.yaml").write_text("")
    assert RunFolder.create("died", "x", True).path == Path("died")


@pytest.mark.parametrize(
    "stranger",
    [
        "adapter/README.md",
        "checkpoints/keep/me.txt",
        "checkpoints/step-00000010/notes.md",
        "tensorboard/a.png",
        "records/mine.jsonl",
        "model/weights.safetensors",
    ],
)
def test_overwriting_is_refused_if_it_would_delete_a_file_of_the_user(here: Path, stranger: str) -> None:
    run = finished_run(here / "done")
    path = run.path / stranger
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    with pytest.raises(ConfigError, match=r"would be lost: .*; move them away"):
        RunFolder.create("done", "x", True)
    assert path.read_text() == "mine"
    assert run.result.exists()


def test_overwriting_does_not_follow_a_link_out_of_the_folder(here: Path) -> None:
    run = finished_run(here / "done")
    (here / "elsewhere").mkdir()
    (here / "elsewhere" / "model.safetensors").write_text("mine")
    run.model.symlink_to(here / "elsewhere")
    with pytest.raises(ConfigError, match="would be lost: model"):
        RunFolder.create("done", "x", True)
    assert (here / "elsewhere" / "model.safetensors").exists()


def test_a_run_is_opened_and_a_near_miss_gets_a_hint(here: Path) -> None:
    run = finished_run(here / "runs" / "sql")
    assert RunFolder.open("runs/sql").metrics == Path("runs/sql/metrics.jsonl")
    with pytest.raises(CheckpointError, match=r"it has no run\.yaml; did you mean .*/runs/sql\?"):
        RunFolder.open(run.checkpoints / "step-00000010")
    with pytest.raises(CheckpointError, match=r"it has no run\.yaml; did you mean one of these: runs/sql\?"):
        RunFolder.open("runs")
    with pytest.raises(CheckpointError, match=r"does not exist; did you mean runs/sql\?"):
        RunFolder.open("runs/sqll")
    with pytest.raises(CheckpointError, match="does not exist; runs beside it: runs/sql"):
        RunFolder.open("runs/something-else")
    with pytest.raises(CheckpointError, match=r"runs/sql/metrics\.jsonl is not a run: it is not a folder"):
        RunFolder.open("runs/sql/metrics.jsonl")
    with pytest.raises(CheckpointError, match=r"nowhere is not a run: it does not exist$"):
        RunFolder.open("nowhere")


def test_json_files_keep_numbers_that_are_not_finite(here: Path) -> None:
    run = RunFolder.create("run", "x", False)
    run.write_json("result.json", {"loss": math.inf, "steps": 3})
    assert run.read_json("result.json") == {"loss": math.inf, "steps": 3}
    json.loads(run.result.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    (run.path / "result.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"result\.json cannot be read"):
        run.read_json("result.json")
    (run.path / "result.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="must hold a JSON object"):
        run.read_json("result.json")


ROWS = '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n{"step": 2, "eval_loss": 1.6}\n{"step": 3}\n'


@pytest.mark.parametrize("tail", ["", '{"step": 4, "lo', '{"step": 4}', "\x00\x00\x00", '{"step": 4, "lo\n'])
def test_rows_after_the_checkpoint_and_a_half_row_are_dropped(here: Path, tail: str) -> None:
    run = RunFolder.create("run", "x", False)
    run.metrics.write_text(ROWS + tail)
    assert run.truncate_metrics(2) >= 1
    assert run.metrics.read_text() == "".join(ROWS.splitlines(keepends=True)[:3])
    assert run.truncate_metrics(2) == 0


def test_truncating_keeps_rows_to_the_letter_and_takes_no_file_for_no_rows(here: Path) -> None:
    run = RunFolder.create("run", "x", False)
    assert run.truncate_metrics(0) == 0
    odd = '{"step":1,"text":"a\u2028b\\r"}\n'
    run.metrics.write_bytes(odd.encode())
    run.truncate_metrics(5)
    assert run.metrics.read_bytes() == odd.encode()
    run.metrics.write_text('{"step": 1')
    run.truncate_metrics(5)
    assert run.metrics.read_bytes() == b""


def test_a_broken_row_in_the_middle_is_named(here: Path) -> None:
    run = RunFolder.create("run", "x", False)
    run.metrics.write_text('{"step": 1}\nbroken\n{"step": 2}\n')
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl, line 2 is not a JSON object"):
        run.truncate_metrics(1)
