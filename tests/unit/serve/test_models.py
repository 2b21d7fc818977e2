"""Runs side by side: their names, and what they must agree in."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from leantune.bases import load_base
from leantune.checkpoint.adapter import save_trained
from leantune.checkpoint.trained import load_trained
from leantune.errors import CheckpointError, ConfigError, DataError, ModelError
from leantune.generate.sampling import Sampling
from leantune.methods import attach, join
from leantune.methods.head import attach as attach_head
from leantune.models.source import load_tokenizer, resolve_model
from leantune.serve.errors import RequestError
from leantune.serve.models import Served, load_served, named_runs
from leantune.serve.rows import row_of
from leantune.serve.schema import ChatRequest
from tests.fixtures import tiny_model_folder, tiny_tokenizer
from tests.runs import tiny_run

REFT = {"name": "loreft", "rank": 4, "layers": "1-2", "subspaces": {"formal": "0-1", "sql": "2-3"}}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def runs(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("runs")
    tiny_run(folder / "lora", base, data={"system": "Be brief."})
    tiny_run(folder / "reft", base, template="chat", method=REFT)
    return {"lora": str(folder / "lora"), "reft": str(folder / "reft")}


@pytest.fixture(scope="module")
def served(runs: dict[str, str]) -> Served:
    return load_served(runs, device="cpu")


def request(model: str, content: str = "the old man", **keys: Any) -> ChatRequest:
    messages = [{"role": "user", "content": content}]
    return ChatRequest.model_validate({"model": model, "messages": messages, **keys})


def test_a_run_is_named_after_its_folder_or_as_it_is_told(runs: dict[str, str]) -> None:
    lora = runs["lora"]
    assert named_runs([lora, f"bot={lora}", "demo", "org/name"]) == {
        "lora": lora,
        "bot": lora,
        "demo": "demo",
        "name": "org/name",
    }
    assert named_runs([f"{lora}/adapter"]) == {"lora": f"{lora}/adapter"}


def test_a_name_stands_for_one_model(runs: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="the name 'lora' is that of"):
        named_runs([runs["lora"], f"lora={runs['reft']}"])
    with pytest.raises(ConfigError, match="the name 'base' is that of the base model"):
        named_runs([f"base={runs['lora']}"])
    with pytest.raises(ConfigError, match="expected RUN or NAME=RUN"):
        named_runs(["bot="])


def test_each_model_reads_a_conversation_as_it_was_trained(served: Served, runs: dict[str, str]) -> None:
    """The system message and the template are those of the run, not of the server."""
    assert list(served.models) == ["lora", "reft", "base"]
    for name in runs:
        template = load_trained(runs[name], device="cpu").template
        expected = served.tokenizer(template.user_prompt("the old man"), add_special_tokens=False)
        assert list(row_of(served, request(name), 8).tokens) == expected["input_ids"]
    told = {"role": "system", "content": "Be long."}
    assert served.models["lora"].prompt([told, {"role": "user", "content": "a"}]).startswith("Be long.\n")


def test_an_answer_that_does_not_say_how_long_gets_the_room_that_is_left(served: Served) -> None:
    assert row_of(served, request("base", max_tokens=5), 64).sampling == Sampling(max_new_tokens=5)
    assert row_of(served, request("base"), 64).sampling.max_new_tokens == 64
    row = row_of(served, request("base"), 4096)
    assert len(row.tokens) + row.sampling.max_new_tokens == 512


def test_a_prompt_that_does_not_fit_is_refused(served: Served) -> None:
    with pytest.raises(DataError, match="512 positions"):
        row_of(served, request("base", max_tokens=510), 64)


def test_an_unknown_model_is_told_which_there_are(served: Served) -> None:
    with pytest.raises(RequestError, match="'gpt' is not served here; there are: lora, reft, base") as caught:
        row_of(served, request("gpt"), 8)
    assert caught.value.status == 404


def test_interventions_can_be_told_more_and_others_cannot(served: Served) -> None:
    row = row_of(served, request("reft", strength=0.5, subspaces=["sql"], generation="all"), 8)
    assert (row.adapter, row.strength, row.generation) == ("reft", 0.5, "all")
    assert row.subspaces is not None
    assert row.subspaces.tolist() == [False, False, True, True]
    for name in ("lora", "base"):
        with pytest.raises(ModelError, match="strength"):
            row_of(served, request(name, strength=0.5), 8)
    with pytest.raises(ModelError, match="french"):
        row_of(served, request("reft", subspaces=["french"]), 8)


def test_what_runs_must_agree_in_is_named(base: Path, runs: dict[str, str], tmp_path: Path) -> None:
    """Two base models in memory, or one in a form that a run was not trained on, would be wrong quietly."""
    other = tiny_model_folder(tmp_path / "other", seed=1)
    packed = tiny_run(tmp_path / "b", base)
    text = packed.config.read_text()
    assert "base:\n  name: dense\n" in text
    packed.config.write_text(text.replace("base:\n  name: dense\n", "base:\n  name: nf4\n"))
    tokenizer = tmp_path / "tokenizer"
    tiny_tokenizer(vocab_size=350).save_pretrained(tokenizer)
    different: dict[str, Any] = {
        "base model": tiny_run(tmp_path / "a", other),
        "base storage": packed,
        "tokenizer": tiny_run(tmp_path / "c", base, model={"name": str(base), "tokenizer": str(tokenizer)}),
        "precision": tiny_run(tmp_path / "d", base, train={"precision": "bf16"}),
        "attention": tiny_run(tmp_path / "e", base, model={"name": str(base), "attention": "eager"}),
    }
    for what, run in different.items():
        with pytest.raises(ConfigError, match=f"cannot be served beside .*: the {what} is"):
            load_served({"lora": runs["lora"], "other": str(run.path)}, device="cpu")


def test_whole_models_are_served_alone(base: Path, runs: dict[str, str], tmp_path: Path) -> None:
    whole = str(tiny_run(tmp_path / "full", base, method={"name": "full"}).path)
    with pytest.raises(ConfigError, match=r"full is a whole model, .* serve it alone"):
        load_served({"lora": runs["lora"], "full": whole}, device="cpu")
    assert list(load_served({"full": whole}, device="cpu").models) == ["full"]


def test_trained_embeddings_are_served_alone(base: Path, runs: dict[str, str], tmp_path: Path) -> None:
    """They change the base model itself, for whoever shares it."""
    method = {"name": "lora", "rank": 4, "train_embeddings": True}
    changed = str(tiny_run(tmp_path / "run", base, method=method).path)
    with pytest.raises(CheckpointError, match=r"has trained embeddings, .* use it alone"):
        load_served({"lora": runs["lora"], "changed": changed}, device="cpu")
    assert list(load_served({"changed": changed}, device="cpu").models) == ["changed"]


def test_a_classifier_answers_no_conversation(base: Path, tmp_path: Path) -> None:
    """Its adapter was trained for the head, and would answer nonsense."""
    source = resolve_model(str(base))
    network = load_base("dense", source)
    parts = [attach("lora", network, {}, seed=0), attach_head(network, seed=0, labels=["a", "b"])]
    save_trained(join(parts), tmp_path / "classes", load_tokenizer(source), str(base), None)
    with pytest.raises(ConfigError, match="classes has a trained head"):
        load_served({"classes": str(tmp_path / "classes")}, device="cpu")


def test_adapter_folders_are_served_like_runs(runs: dict[str, str], tmp_path: Path) -> None:
    shutil.copytree(Path(runs["reft"]) / "adapter", tmp_path / "mine")
    served = load_served({"lora": runs["lora"], "mine": str(tmp_path / "mine")}, device="cpu")
    assert list(served.models) == ["lora", "mine", "base"]
