"""`leantune chat` talks with a run in the words that the run was trained with."""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import pytest

from leantune import api
from leantune.cli import chat
from leantune.generate.sampling import Sampling
from tests.fixtures import tiny_model_folder
from tests.runs import tiny_run


def talk(monkeypatch: pytest.MonkeyPatch, *arguments: str, typed: str) -> int:
    parser = argparse.ArgumentParser()
    chat.add_arguments(parser)
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    return chat.run(parser.parse_args([*arguments, "--max-new-tokens", "5"]))


def test_the_run_answers_as_it_does_to_generate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every run was asked with the tokenizer's chat template, and --template changed stop tokens only."""
    model = tiny_model_folder(tmp_path / "tiny")
    run = str(tiny_run(tmp_path / "run", model, data={"system": "Be brief."}).path)
    short = Sampling(max_new_tokens=5)
    wanted = {
        (): api.load(run).generate(["the man"], short),
        ("--template", "alpaca"): api.load(run, template="alpaca").generate(["the man"], short),
        ("--system", "the woman"): api.load(run, system="the woman").generate(["the man"], short),
    }
    assert len({answers[0] for answers in wanted.values()}) == 3
    for arguments, answers in wanted.items():
        assert talk(monkeypatch, run, *arguments, typed="the man\nand more\n/exit\n") == 0
        shown = capsys.readouterr().out
        assert answers[0] in shown
        assert "holds one question and one answer" in shown  # the second turn
