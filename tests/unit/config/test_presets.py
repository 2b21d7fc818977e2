"""Presets: a name stands for a method and a base, sets nothing else, and is no path of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from leantune.config import apply_preset, grid, load_config
from leantune.config.presets import PRESETS, preset_table_markdown
from leantune.errors import ConfigError

REQUIRED = ["model=m", "data.train=x"]
DOCUMENT = Path(__file__).parents[3] / "docs" / "presets.md"
# The train types of fsdp_qlora.
TRAIN_TYPES = {
    "full": ("full", "dense"),
    "lora": ("lora", "dense"),
    "custom_lora": ("lora", "dense"),
    "qlora": ("lora", "nf4"),
    "custom_qlora": ("lora", "nf4"),
    "hqq_lora": ("lora", "hqq"),
    "bnb_dora": ("dora", "nf4"),
    "hqq_dora": ("dora", "hqq"),
    "bnb_llama_pro": ("llama_pro", "nf4"),
    "hqq_llama_pro": ("llama_pro", "hqq"),
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_valid_run_of_its_cell_and_changes_nothing_else(name: str) -> None:
    """A preset of a refused cell, or with a key that its method has not, would fail for everybody."""
    config, plain = load_config(None, REQUIRED, preset=name), load_config(None, REQUIRED)
    assert (config.method.name, config.base.name) == (PRESETS[name].method, PRESETS[name].base)
    assert grid.refusal(config.method.name, config.base.name, "fsdp") is None
    assert (config.strategy, config.train, config.data) == (plain.strategy, plain.train, plain.data)
    expected = type(config.method)(**{"implementation": "peft"} if name.startswith("peft_") else {})
    assert (config.method, config.base) == (expected, type(config.base)())


@pytest.mark.parametrize("name", TRAIN_TYPES)
def test_every_train_type_of_fsdp_qlora_is_a_preset(name: str) -> None:
    assert (PRESETS[name].method, PRESETS[name].base) == TRAIN_TYPES[name]
    assert PRESETS[name].known_as == name


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("qdora", ("dora", "nf4")),
        ("llama_pro_nf4", ("llama_pro", "nf4")),
        ("llama_pro_hqq", ("llama_pro", "hqq")),
        ("loreft", ("loreft", "dense")),
        ("qreft", ("loreft", "nf4")),
        ("hqq_reft", ("loreft", "hqq")),
        ("peft_lora", ("lora", "dense")),
        ("peft_qlora", ("lora", "nf4")),
    ],
)
def test_the_other_names_stand_for_their_cells(name: str, cell: tuple[str, str]) -> None:
    assert (PRESETS[name].method, PRESETS[name].base) == cell


def test_names_of_one_cell_agree_with_the_train_type_they_are_listed_under() -> None:
    for name, preset in PRESETS.items():
        if preset.known_as is not None:
            assert (preset.method, preset.base) == TRAIN_TYPES[preset.known_as], name


def test_a_preset_wins_over_the_file_and_loses_to_overrides(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: m\ndata: {train: x}\nmethod: {name: lora, rank: 8, implementation: peft}\nbase: hqq\n"
    )
    config = load_config(path, preset="qlora")
    assert (config.method.name, config.base.name) == ("lora", "nf4")
    assert config.method.model_dump(include={"rank", "implementation"}) == {
        "rank": 8,
        "implementation": "leantune",
    }
    overridden = load_config(path, ["base=dense", "method.implementation=peft"], preset="qlora")
    assert overridden.base.name == "dense"
    assert overridden.method.model_dump()["implementation"] == "peft"


def test_a_shorthand_in_the_file_gives_way(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: m\ndata: {train: x}\nmethod: loreft\nbase: dense\n")
    config = load_config(path, ["method.rank=4"], preset="hqq_dora")
    assert (config.method.name, config.base.name) == ("dora", "hqq")
    assert config.method.model_dump()["rank"] == 4


def test_a_key_of_the_file_that_the_preset_does_not_know_is_named_with_its_line(tmp_path: Path) -> None:
    """Dropping the old section would silently train with another rank than the file says."""
    path = tmp_path / "run.yaml"
    path.write_text("model: m\ndata: {train: x}\nmethod:\n  name: loreft\n  position: f1\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, preset="qlora")
    (problem,) = caught.value.problems
    assert problem.startswith("method.position (line 5): unknown key; known here: alpha")
    assert problem.endswith("position belongs to loreft, noreft, consreft, lobireft, direft, nodireft")


def test_an_unknown_preset_comes_with_the_other_problems() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*REQUIRED, "train.epoch=1"], preset="qdra")
    preset, key = caught.value.problems
    assert preset.startswith("preset: 'qdra' is not one of full, lora, custom_lora")
    assert preset.endswith("; did you mean qdora?")
    assert key == "train.epoch: unknown key; did you mean train.epochs?"


def test_a_section_that_is_none_is_not_silently_replaced() -> None:
    tree = {"method": 5}
    problems = apply_preset(tree, "loreft")
    assert any("method is 5 in the run file" in problem for problem in problems)
    assert tree["method"] == 5
    assert apply_preset({}, None) == []


def test_the_document_shows_the_presets_as_they_are() -> None:
    """A table written by hand goes stale with the first new name."""
    assert preset_table_markdown() in DOCUMENT.read_text(encoding="utf-8")
