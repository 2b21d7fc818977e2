"""Comparing: what is trained makes the difference, nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from leantune import api
from leantune.errors import ConfigError
from leantune.generate.decode import generate
from leantune.generate.sampling import Sampling
from tests.fixtures import tiny_model_folder
from tests.runs import tiny_run

SHORT = Sampling(max_new_tokens=6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("models") / "tiny")


def test_the_base_of_a_run_gets_the_prompts_of_the_run(model: Path, tmp_path: Path) -> None:
    """The base was asked with the chat template and no system message, the run with its own."""
    run = str(tiny_run(tmp_path / "run", model, data={"system": "Be brief."}).path)
    comparison = api.compare(["the old man"], ["base", run], SHORT)
    loaded = api.load(model).trained
    expected = generate(loaded.model, loaded.tokenizer, ["Be brief.\nthe old man\n"], SHORT)
    assert comparison.columns["base"] == tuple(expected)
    assert comparison.columns[run] != comparison.columns["base"]
    assert comparison.metadata["base"] == {"template": "plain"}
    assert comparison.metadata[run]["method"] == "lora"
    assert int(comparison.metadata[run]["trained parameters"].replace(",", "")) > 0


def test_an_adapter_folder_names_its_base(model: Path, tmp_path: Path) -> None:
    """Only runs did; the word base beside an adapter folder was refused."""
    adapter = tmp_path / "mine"
    shutil.copytree(tiny_run(tmp_path / "run", model).adapter, adapter)
    comparison = api.compare(["the"], ["base", str(adapter)], SHORT)
    assert comparison.columns["base"] == tuple(api.load(model).generate(["the"], SHORT))
    named = api.compare(["the"], ["base"], SHORT, base=str(model))
    assert named.columns == {"base": comparison.columns["base"]}


def test_a_base_that_nobody_can_tell_or_nobody_asked_for_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="no telling which model it is"):
        api.compare(["the"], ["base", str(model)], SHORT)
    with pytest.raises(ConfigError, match="none of the models is the word base"):
        api.compare(["the"], [str(model)], SHORT, base=str(model))
