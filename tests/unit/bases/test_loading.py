"""Loading a base: the bits of transformers' own loading, for less memory; and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from leantune.bases import build_base, fill, load_base
from leantune.errors import ModelError
from leantune.models.anatomy import input_embeddings, linears, output_head
from leantune.models.empty import materialise
from leantune.models.precision import PRECISIONS
from leantune.models.source import resolve_model
from tests.models import ARCHITECTURES, tiny_model

SINGLE = "model.safetensors"
EVERYWHERE = pytest.mark.parametrize("architecture", list(ARCHITECTURES))
TABLES = ("inv_freq", "original_inv_freq")


def loaded(folder: Path, precision: str = "fp32", base: str = "dense", **options: Any) -> PreTrainedModel:
    return load_base(base, resolve_model(str(folder)), precision=PRECISIONS[precision], **options)


def theirs(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    loader: Any = AutoModelForCausalLM
    return loader.from_pretrained(folder, dtype=dtype)


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, and buffers also if they are not saved; tied ones under both names."""
    return {**dict(model.named_buffers()), **model.state_dict()}


def assert_equal(ours: PreTrainedModel, reference: PreTrainedModel) -> None:
    """To the bit, in the same dtypes, tied where the other is, with the same settings for generation."""
    mine, expected = tensors(ours), tensors(reference)
    assert mine.keys() == expected.keys()
    for name, tensor in expected.items():
        assert mine[name].dtype == tensor.dtype, name
        assert torch.equal(mine[name], tensor), name
    assert is_tied(ours) == is_tied(reference)
    assert not ours.training
    assert not any(parameter.requires_grad for parameter in ours.parameters())


def is_tied(model: PreTrainedModel) -> bool:
    return output_head(model).weight is input_embeddings(model).weight


def change(path: Path, changes: dict[str, Tensor | None]) -> None:
    """Rewrite tensors of a file; None takes one away."""
    kept = {name: value for name, value in {**load_file(path), **changes}.items() if value is not None}
    save_file(kept, path, {"format": "pt"})


@EVERYWHERE
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16_mixed"])
def test_a_model_is_loaded_as_transformers_loads_it(
    architecture: str, precision: str, tmp_path: Path
) -> None:
    """Weights, rotary tables, scales of embeddings; experts that lie one by one in Mixtral's files."""
    tiny_model(architecture, tie_word_embeddings=False).save_pretrained(tmp_path)
    if architecture == "mixtral":
        assert sum(".experts.1." in key for key in load_file(tmp_path / SINGLE)) == 9
    assert_equal(loaded(tmp_path, precision), theirs(tmp_path, PRECISIONS[precision].weights))


@EVERYWHERE
def test_tied_heads_stay_tied_and_need_not_be_in_the_file(architecture: str, tmp_path: Path) -> None:
    """They come apart where each parameter is given memory of its own."""
    tiny_model(architecture, tie_word_embeddings=True).save_pretrained(tmp_path)
    ours = loaded(tmp_path)
    assert len(load_file(tmp_path / SINGLE)) < len(ours.state_dict()) or architecture == "mixtral"
    assert is_tied(ours)
    assert_equal(ours, theirs(tmp_path))


@EVERYWHERE
def test_files_of_the_decoder_alone_are_a_whole_model_if_its_head_is_tied(
    architecture: str, tmp_path: Path
) -> None:
    """Files that `AutoModel` wrote have no prefix, and no head."""
    model: Any = tiny_model(architecture, tie_word_embeddings=True)
    model.base_model.save_pretrained(tmp_path)
    ours = loaded(tmp_path)
    assert_equal(ours, theirs(tmp_path))
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_either_name_of_a_tied_weight_will_do(name: str, tmp_path: Path) -> None:
    """Which one a file holds is up to the program that wrote it."""
    model = tiny_model(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    table = model.state_dict()["lm_head.weight"].clone()
    change(tmp_path / SINGLE, {"model.embed_tokens.weight": None, "lm_head.weight": None, name: table})
    assert_equal(loaded(tmp_path), model)
    change(tmp_path / SINGLE, {"lm_head.weight": table, "model.embed_tokens.weight": table.clone()})
    assert_equal(loaded(tmp_path), model)


def test_a_tied_weight_that_is_in_the_file_twice_and_differs_is_refused(tmp_path: Path) -> None:
    """One of the two was taken and the other lost: another model than the one that was saved."""
    tiny_model(tie_word_embeddings=False).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(ModelError, match=r"lm_head\.weight differ .* set tie_word_embeddings to false"):
        loaded(tmp_path)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
def test_sharded_files_make_the_same_model(architecture: str, tmp_path: Path) -> None:
    tiny_model(architecture).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert_equal(loaded(tmp_path), theirs(tmp_path))


@pytest.mark.parametrize("base", ["nf4", "hqq"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
def test_weights_that_are_read_in_slices_are_packed_as_a_whole(
    architecture: str, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that reach over the end of a slice, or columns of a transposed weight taken for rows."""
    tiny_model(architecture, wide=True).save_pretrained(tmp_path)
    whole = loaded(tmp_path, base=base)
    monkeypatch.setattr("leantune.bases.filling._SLICE_VALUES", 700)
    sliced = loaded(tmp_path, base=base)
    assert_equal(sliced, whole)
    source = tiny_model(architecture, wide=True)
    for name, layer in linears(whole).items():
        packed: Any = layer
        dense: Any = source.get_submodule(name)
        expected = packed.pack(
            dense.weight if isinstance(dense, nn.Linear) else dense.weight.t().contiguous()
        )
        assert all(torch.equal(getattr(packed, key), value) for key, value in expected.items())


def test_a_bf16_file_in_an_fp32_model_and_the_other_way_round(tmp_path: Path) -> None:
    """Each value is cast once, when it is read."""
    model: Any = tiny_model()
    model.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    assert_equal(loaded(tmp_path / "half", "fp32"), theirs(tmp_path / "half", torch.float32))
    tiny_model(seed=1).save_pretrained(tmp_path / "full")
    assert_equal(loaded(tmp_path / "full", "bf16"), theirs(tmp_path / "full", torch.bfloat16))


@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_buffers_have_the_dtype_of_their_precision_and_rotary_tables_are_fp32(
    precision: str, tmp_path: Path
) -> None:
    """Rotary angles of late positions are off by whole radians in half precision."""
    seen = set[torch.dtype]()
    for architecture in ARCHITECTURES:
        folder = tmp_path / architecture
        tiny_model(architecture).save_pretrained(folder)
        base = build_base("dense", resolve_model(str(folder)), PRECISIONS[precision])
        for name, buffer in base.model.named_buffers():
            if name.endswith(TABLES):
                assert buffer.dtype == torch.float32, name
                assert buffer.device.type == "cpu"
            else:
                seen.add(buffer.dtype)
    assert seen == {PRECISIONS[precision].buffers}


def test_settings_for_generation_come_with_the_weights(tmp_path: Path) -> None:
    """Answers that never end, because the second end token stands in generation_config.json alone."""
    model: Any = tiny_model()
    model.generation_config = GenerationConfig(eos_token_id=[2, 7], temperature=0.3, do_sample=True)
    model.save_pretrained(tmp_path)
    found: Any = loaded(tmp_path).generation_config
    assert (found.eos_token_id, found.temperature, found.do_sample) == ([2, 7], 0.3, True)
    (tmp_path / "generation_config.json").unlink()
    without: Any = loaded(tmp_path).generation_config
    assert without.eos_token_id == 2


def refused(folder: Path, precision: str = "fp32", base: str = "dense") -> str:
    with pytest.raises(ModelError) as caught:
        loaded(folder, precision, base)
    return str(caught.value)


def test_a_model_that_is_quantised_already_is_refused(tmp_path: Path) -> None:
    """Its packed tensors would be taken for missing weights."""
    tiny_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = refused(tmp_path)
    assert "is quantised already (config.json: quantization_config)" in message
    assert "name the unquantised model and let `base` quantise it" in message


@pytest.mark.parametrize("base", ["dense", "nf4"])
def test_missing_weights_are_named_all_at_once(base: str, tmp_path: Path) -> None:
    """transformers draws them at random, with a warning that scrolls by."""
    tiny_model(wide=True).save_pretrained(tmp_path)
    gone = ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"]
    change(tmp_path / SINGLE, dict.fromkeys(gone))
    message = refused(tmp_path, base=base)
    assert f"lacks 2 weights of LlamaForCausalLM: {gone[0]}, {gone[1]}" in message


@pytest.mark.parametrize(
    ("matrix", "words"),
    [("w1", "cannot be put together from the 3 tensors"), ("w2", r"is \(1, 32, 48\) in the checkpoint, but")],
)
def test_a_model_that_lacks_an_expert_is_refused(matrix: str, words: str, tmp_path: Path) -> None:
    """The others would have been stacked to fewer experts than there are."""
    tiny_model("mixtral").save_pretrained(tmp_path)
    (first, *_) = [key for key in load_file(tmp_path / SINGLE) if key.endswith(f".experts.1.{matrix}.weight")]
    change(tmp_path / SINGLE, {first: None})
    with pytest.raises(ModelError, match=words):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.1.mlp.down_proj.weight", (64, 64)),  # packed
        ("model.layers.1.mlp.down_proj.weight", (128, 64)),  # transposed
        ("model.norm.weight", (1,)),  # torch would spread it over all 64
        ("model.embed_tokens.weight", (321, 64)),
    ],
)
@pytest.mark.parametrize("base", ["dense", "nf4"])
def test_a_weight_of_another_shape_is_named_with_both(
    base: str, name: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    """Rows that are cut off or repeated train without complaint."""
    tiny_model(wide=True).save_pretrained(tmp_path)
    change(tmp_path / SINGLE, {name: torch.zeros(shape)})
    message = refused(tmp_path, base=base)
    assert f"{name} is {shape} in the checkpoint, but the configuration asks for (" in message
    assert "config.json and the weights do not belong together" in message


def test_values_beyond_fp16_are_refused_by_name(tmp_path: Path) -> None:
    """They became infinite, and every loss NaN."""
    model = tiny_model()
    model.save_pretrained(tmp_path)
    name = "model.layers.2.mlp.up_proj.weight"
    weight = model.state_dict()[name].clone()
    weight[3, 4] = 70_000.0
    change(tmp_path / SINGLE, {name: weight})
    message = refused(tmp_path, "fp16_mixed")
    assert f"fp16_mixed: {name} has values beyond the range of fp16" in message
    loaded(tmp_path, "bf16_mixed")


def test_an_unknown_kind_of_model_is_refused(tmp_path: Path) -> None:
    """What is no causal language model has no head to train against."""
    tiny_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "vit"}))
    assert "model.name: cannot build" in refused(tmp_path)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("base", ["dense", "nf4", "hqq"])
def test_row_norms_are_those_of_the_file_and_of_what_is_stored(
    architecture: str, base: str, tmp_path: Path
) -> None:
    """DoRA starts from them: norms of columns, or of the packed weight, start it somewhere else."""
    source = tiny_model(architecture, wide=True)
    source.save_pretrained(tmp_path)
    built = build_base(base, resolve_model(str(tmp_path)), PRECISIONS["fp32"])
    materialise(built.model, torch.device("cpu"))
    wanted = linears(built.model)
    norms = fill(built, torch.device("cpu"), norms_of=list(wanted.values()))
    assert set(norms) == set(wanted.values())
    for name, layer in wanted.items():
        dense: Any = source.get_submodule(name)
        rows = dense.weight if isinstance(dense, nn.Linear) else dense.weight.t()
        torch.testing.assert_close(norms[layer].unquantised, rows.norm(dim=1))
        packed: Any = layer
        kept = rows if base == "dense" else packed.dequantise()
        torch.testing.assert_close(norms[layer].stored, kept.norm(dim=1))
