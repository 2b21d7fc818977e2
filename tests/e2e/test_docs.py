"""What the documents show must be true: run files validate, commands parse, messages are real."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from leantune.cli.main import VERBS
from leantune.config import load_config, validate
from leantune.config.yaml import parse_yaml_value
from leantune.errors import ConfigError

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "architecture.md",
    ROOT / "docs" / "coming-from-fsdp_qlora.md",
    ROOT / "docs" / "coming-from-pyreft.md",
    ROOT / "docs" / "memory.md",
    ROOT / "docs" / "objectives.md",
    ROOT / "docs" / "serving.md",
    ROOT / "docs" / "reft.md",
    ROOT / "docs" / "reft-results.md",
    ROOT / "recipes" / "reft" / "README.md",
    ROOT / "examples" / "alpaca" / "README.md",
]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_run_files_of_the_readme_validate() -> None:
    trees = [parse_yaml_value(block) for block in blocks("yaml")]
    assert trees
    for tree in trees:
        assert validate(tree).model.name


def test_every_command_of_the_readme_names_a_verb() -> None:
    lines = [line for block in blocks("bash") for line in block.splitlines() if "leantune " in line]
    assert len(lines) > 8
    for line in lines:
        words = shlex.split(line, comments=True)
        assert words[words.index("leantune") + 1] in VERBS, line


def test_the_overrides_of_the_readme_are_accepted(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(blocks("yaml")[0], encoding="utf-8")
    overrides = re.search(r"leantune train run\.yaml ([^#\n]*=[^#\n]*)", README)
    assert overrides
    config = load_config(run, overrides[1].split())
    assert (config.method.name, config.strategy.devices) == ("loreft", 2)


def test_the_error_message_of_the_readme_is_what_leantune_says() -> None:
    """A message in the README that no release prints any more would mislead."""
    tree = {
        "model": "demo",
        "data": {"train": "x.jsonl"},
        "method": {"name": "lora", "rnak": 8},
        "strategy": {"devices": 2},
        "train": {"learning_rate": -0.001, "micro_batch_size": 4, "global_batch_size": 10},
    }
    with pytest.raises(ConfigError) as caught:
        validate(tree)
    shown = README.split("problems in run.yaml:\n")[1].split("```")[0]
    for problem in caught.value.problems:
        key, _, text = problem.partition(": ")
        assert key in shown
        assert text in shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    paths = re.findall(r"`((?:src|docs|examples|benchmarks)/[\w/.-]+)`", text)
    for target in links:
        assert (page.parent / target).exists(), target
    for target in paths:
        assert (ROOT / target).exists(), target
