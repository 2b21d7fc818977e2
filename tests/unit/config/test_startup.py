"""Configuration errors and help answer at once: before torch is imported."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from leantune.config.presets import PRESETS

_RUN_VERB = (
    "import sys; from leantune.cli.main import main\n"
    "try: code = main(sys.argv[1:])\n"
    "except SystemExit as exit: code = exit.code\n"
    "heavy = sorted({'torch', 'transformers', 'datasets'} & set(sys.modules))\n"
    "print(f'CODE {code} HEAVY {heavy}')"
)


def run_verb(*arguments: str) -> tuple[str, str, float]:
    """(stdout, stderr, seconds of processor time) of a command in a fresh interpreter."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environ = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-c", _RUN_VERB, *arguments], capture_output=True, text=True, env=environ, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.stdout, done.stderr, seconds


def test_a_wrong_run_file_is_refused_at_once_without_torch(tmp_path: Path) -> None:
    """Importing torch takes seconds; a misspelt key used to cost them."""
    path = tmp_path / "run.yaml"
    path.write_text("model: m\ndata: {train: x}\ntrain: {learning_rat: 1e-4}\n")
    stdout, stderr, seconds = run_verb("train", str(path), "method.rank=-1")
    assert "CODE 2 HEAVY []" in stdout
    assert "train.learning_rat (line 3): unknown key; did you mean train.learning_rate?" in stderr
    assert "method.rank: -1" in stderr or "method: name is missing" in stderr
    assert "Traceback" not in stderr
    assert seconds < 1.5


@pytest.mark.parametrize("arguments", [("--help",), ("train", "--help"), ("schema",)])
def test_help_and_schema_need_no_torch(arguments: tuple[str, ...]) -> None:
    stdout, _, _ = run_verb(*arguments)
    assert "CODE 0 HEAVY []" in stdout


def test_the_help_of_train_lists_the_keys() -> None:
    stdout, _, _ = run_verb("train", "--help")
    for key in (
        "method.position [loreft]",
        "train.learning_rate = 0.0002",
        "strategy.devices [ddp]",
        "strategy.sharding [fsdp]",
    ):
        assert key in stdout


def test_the_help_of_train_lists_the_presets() -> None:
    stdout, _, _ = run_verb("train", "--help")
    for name, preset in PRESETS.items():
        assert re.search(rf"^  {name} +{re.escape(preset.describe())}$", stdout, re.MULTILINE), name


@pytest.mark.parametrize(
    "arguments",
    [
        ("--preset", "qlorra", "model=m", "data.train=x"),
        ("model=m", "--preset", "qlorra", "data.train=x"),
        ("model=m", "data.train=x", "--preset=qlorra"),
    ],
)
def test_a_misspelt_preset_is_refused_without_torch(arguments: tuple[str, ...]) -> None:
    stdout, stderr, _ = run_verb("train", *arguments)
    assert "CODE 2 HEAVY []" in stdout
    assert "'qlorra' is not one of full, lora" in stderr
    assert "did you mean qlora?" in stderr


def test_the_command_line_hands_the_preset_on(tmp_path: Path) -> None:
    """The preset wins over the file and loses to the overrides, or the error would be another."""
    path = tmp_path / "run.yaml"
    path.write_text("model: m\ndata: {train: x}\nmethod: lora\n")
    stdout, stderr, _ = run_verb("train", "--preset", "full", str(path), "base=nf4")
    assert "CODE 2 HEAVY []" in stdout
    assert "method full × base nf4 × strategy single is refused" in stderr


def test_the_package_itself_imports_no_torch() -> None:
    code = "import sys, leantune; print('torch' in sys.modules, leantune.RunConfig.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "RunConfig"]
