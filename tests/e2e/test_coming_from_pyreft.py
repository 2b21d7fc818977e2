"""What the page for users of pyreft shows must be accepted: its run file, its commands, its keys."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from leantune.cli import export, generate, import_pyreft, train
from leantune.cli.main import main
from leantune.config import load_config, validate
from leantune.config.objectives import OBJECTIVES
from leantune.config.yaml import parse_yaml_value
from leantune.methods import method_names

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "coming-from-pyreft.md").read_text(encoding="utf-8")
VERBS: dict[str, Any] = {
    "train": train,
    "generate": generate,
    "import-pyreft": import_pyreft,
    "export": export,
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def test_its_run_file_is_that_of_the_recipe_but_for_model_and_data() -> None:
    (block,) = blocks("yaml")
    shown = validate(parse_yaml_value(block))
    recipe = load_config(ROOT / "recipes" / "reft" / "alpaca.yaml", [])
    assert shown.method == recipe.method
    assert shown.train == recipe.train
    assert shown.data.template == recipe.data.template


@pytest.mark.parametrize("line", [x for block in blocks("bash") for x in block.splitlines() if x])
def test_its_commands_are_accepted(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag that was renamed would be shown for ever."""
    program, verb, *words = shlex.split(line, comments=True)
    assert program == "leantune"
    seen: list[Any] = []
    monkeypatch.setattr(VERBS[verb], "run", lambda args: seen.append(args))
    assert main([verb, *words]) == 0
    assert len(seen) == 1


def keys_of(section: str, **tree: Any) -> set[str]:
    """The keys of a section of a run."""
    config = validate({"model": "demo", "data": {"train": "x.jsonl"}, **tree})
    return set(getattr(config, section).model_dump())


def test_the_keys_that_it_names_are_keys_of_a_run() -> None:
    named = re.findall(r"`(method|train|data)\.([a-z_]+)", PAGE)
    known = {
        "method": keys_of("method", method="loreft") | keys_of("method", method="noreft"),
        **{section: keys_of(section) for section in ("train", "data")},
    }
    assert len(set(named)) > 20
    for section, key in named:
        assert key in known[section], f"{section}.{key}"


def test_the_methods_and_objectives_that_it_names_exist() -> None:
    for name in ("loreft", "noreft", "consreft", "lobireft", "direft", "nodireft"):
        assert f"`{name}`" in PAGE
        assert name in method_names()
    assert set(re.findall(r"`objective: (\w+)`", PAGE)) <= set(OBJECTIVES)
