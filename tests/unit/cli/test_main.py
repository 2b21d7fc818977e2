"""The command line takes words and options in any order, and refuses what it does not know."""

from __future__ import annotations

from typing import Any

import pytest

from leantune.cli import compare, generate, quickstart, resume, train
from leantune.cli.main import main


@pytest.mark.parametrize(
    ("verb", "module", "words", "name", "expected"),
    [
        ("train", train, ["run.yaml", "a.b=1", "--quiet", "c.d=2"], "overrides", ["a.b=1", "c.d=2"]),
        ("train", train, ["run.yaml", "--quiet", "c.d=2"], "overrides", ["c.d=2"]),
        ("resume", resume, ["RUN", "--quiet", "strategy.devices=2"], "overrides", ["strategy.devices=2"]),
        ("quickstart", quickstart, ["--questions", "8", "method=lora"], "overrides", ["method=lora"]),
        ("generate", generate, ["RUN", "--top-k", "3", "one", "two"], "prompts", ["one", "two"]),
        ("compare", compare, ["base", "--prompt", "x", "RUN"], "models", ["base", "RUN"]),
    ],
)
def test_words_behind_an_option_belong_to_the_list(
    monkeypatch: pytest.MonkeyPatch, verb: str, module: Any, words: list[str], name: str, expected: list[str]
) -> None:
    """`leantune train run.yaml --quiet a.b=1` was refused as an unrecognized argument."""
    seen: list[Any] = []
    monkeypatch.setattr(module, "run", lambda args: seen.append(args))
    assert main([verb, *words]) == 0
    assert getattr(seen[0], name) == expected


@pytest.mark.parametrize(
    "words", [["train", "run.yaml", "--quite"], ["schema", "extra"], ["merge", "A", "B", "C"]]
)
def test_unknown_options_and_words_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err
