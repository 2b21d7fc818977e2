"""Weights in files by the names of the model: prefixes, ties, experts, shards, and what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from leantune.errors import ModelError
from leantune.models.empty import empty_model
from leantune.models.source import load_config, resolve_model
from leantune.models.weights import WeightFiles, WeightMap
from tests.models import tiny_model

SINGLE = "model.safetensors"


def map_of(folder: Path) -> WeightMap:
    source = resolve_model(str(folder))
    model = empty_model(source, load_config(source), weights=torch.float32)
    return WeightMap(model, WeightFiles(source))


def saved(folder: Path, architecture: str = "llama", **options: Any) -> tuple[Path, dict[str, Tensor]]:
    """A folder with a tiny model, and its weights in memory."""
    shard = options.pop("max_shard_size", "1GB")
    model = tiny_model(architecture, **options)
    model.save_pretrained(folder, max_shard_size=shard)
    return folder, dict(model.state_dict())


def change(path: Path, **changes: Tensor | None) -> None:
    """Rewrite tensors of a file; None takes one away."""
    tensors = {**load_file(path), **changes}
    save_file({k: v for k, v in tensors.items() if v is not None}, path, {"format": "pt"})


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gpt_neox", "phi3", "mixtral"])
def test_slices_are_those_of_the_whole_weight(architecture: str, tmp_path: Path) -> None:
    """A rank that got other rows than its own, or the columns of a transposed weight as rows."""
    folder, weights = saved(tmp_path / "m", architecture, tie_word_embeddings=False)
    found = map_of(folder)
    assert found.unused == []
    for name, expected in weights.items():
        assert found.shape(name) == tuple(expected.shape)
        assert torch.equal(found.whole(name), expected)
        stop = max(1, len(expected) - 1)
        assert torch.equal(found.rows(name, 1, stop), expected[1:stop])
        assert found.rows(name, stop, stop).shape[0] == 0
        if expected.ndim == 2:
            assert torch.equal(found.rows(name, 1, 3, columns=True), expected[:, 1:3])


def test_experts_that_lie_one_by_one_are_stacked(tmp_path: Path) -> None:
    """The files of Mixtral hold each matrix of each expert; the model holds two stacks a layer."""
    folder, weights = saved(tmp_path / "m", "mixtral")
    found = map_of(folder)
    stacks = [name for name in weights if not found.is_plain(name)]
    assert len(stacks) == 6
    assert all("experts" in name for name in stacks)
    keys = set(load_file(folder / SINGLE))
    for name in stacks:
        parts = found.keys_of(name)
        assert len(parts) == (4 if "gate_up" in name else 2)
        assert set(parts) <= keys
        assert all(".experts.0." in part or ".experts.1." in part for part in parts)


def test_a_conversion_is_done_once_for_all_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a stack are asked for slice by slice; each asked all experts to be read again."""
    folder, weights = saved(tmp_path / "m", "mixtral")
    found = map_of(folder)
    stacks = [name for name in weights if not found.is_plain(name)]
    reads: list[str] = []
    whole = WeightFiles.whole

    def counted(self: WeightFiles, name: str) -> Tensor:
        reads.append(name)
        return whole(self, name)

    monkeypatch.setattr(WeightFiles, "whole", counted)
    for name in stacks:
        found.shape(name)
        for row in range(2):
            found.rows(name, row, row + 1)
    assert sorted(reads) == sorted(key for name in stacks for key in found.keys_of(name))
    found.forget()
    found.shape(stacks[0])
    assert len(reads) == sum(len(found.keys_of(name)) for name in stacks) + len(found.keys_of(stacks[0]))


@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_sharded_files_are_found_by_their_index(architecture: str, tmp_path: Path) -> None:
    """Parts of one stack may lie in different files."""
    folder, weights = saved(tmp_path / "m", architecture, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    found = map_of(folder)
    with found.files.reading():
        assert all(torch.equal(found.whole(name), expected) for name, expected in weights.items())


def test_the_index_wins_over_a_single_file_left_behind(tmp_path: Path) -> None:
    """A folder that was saved into twice, first whole and then in shards."""
    folder, weights = saved(tmp_path / "m", max_shard_size="20KB")
    save_file({"model.norm.weight": torch.full((32,), 7.0)}, folder / SINGLE, {"format": "pt"})
    assert torch.equal(map_of(folder).whole("model.norm.weight"), weights["model.norm.weight"])


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gpt_neox", "gemma2", "mixtral"])
def test_files_without_the_prefix_of_the_base_model(architecture: str, tmp_path: Path) -> None:
    """The files of `AutoModel` name the decoder's weights without `model.`, `transformer.` or `gpt_neox.`"""
    model: Any = tiny_model(architecture, tie_word_embeddings=True)
    model.base_model.save_pretrained(tmp_path / "m")
    keys = set(load_file(tmp_path / "m" / SINGLE))
    assert not any(key.startswith(f"{model.base_model_prefix}.") for key in keys)
    found = map_of(tmp_path / "m")
    assert found.unused == []
    for name, expected in model.base_model.state_dict().items():
        assert torch.equal(found.whole(f"{model.base_model_prefix}.{name}"), expected)


def test_tensors_that_belong_to_nothing_are_listed_and_ignored(tmp_path: Path) -> None:
    """Old files hold rotary tables, masks, and layers of tasks that the model does not have."""
    folder, weights = saved(tmp_path / "m")
    change(folder / SINGLE, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    change(folder / SINGLE, score=torch.ones(2, 32))
    found = map_of(folder)
    assert sorted(found.unused) == ["model.layers.0.self_attn.rotary_emb.inv_freq", "score"]
    assert all(name in found for name in weights)
    assert "score" not in found


def refused(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        map_of(folder)
    return str(caught.value)


def test_missing_shards_are_named_all_at_once(tmp_path: Path) -> None:
    """A download that broke off, found after minutes of loading and one file at a time."""
    folder, _ = saved(tmp_path / "m", max_shard_size="20KB")
    gone = sorted(folder.glob("model-*.safetensors"))[1:3]
    for path in gone:
        path.unlink()
    message = refused(folder)
    assert f"lacks {gone[0].name}, {gone[1].name}, which {folder / 'model.safetensors.index.json'}" in message


@pytest.mark.parametrize("text", ["{", "[]", "{}", json.dumps({"weight_map": None})])
def test_a_broken_index_is_named(text: str, tmp_path: Path) -> None:
    folder, _ = saved(tmp_path / "m", max_shard_size="20KB")
    (folder / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json is not an index of safetensors files" in refused(folder)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    """Case 7, for the model that is trained."""
    folder, _ = saved(tmp_path / "m")
    path = folder / SINGLE
    path.write_bytes(path.read_bytes()[:-9])
    assert f"{path} cannot be read as safetensors" in refused(folder)


def test_a_truncated_shard_is_named_when_it_is_read(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path / "m", max_shard_size="20KB")
    path = sorted(folder.glob("model-*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-9])
    found = map_of(folder)
    inside = next(name for name, place in found.files.path_of.items() if place == path)
    with pytest.raises(ModelError, match=f"{path.name} cannot be read as safetensors"):
        found.files.whole(inside)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_pickled_weights_alone_are_refused_with_the_way_out(file: str, tmp_path: Path) -> None:
    """Unpickling runs code of whoever wrote the file."""
    folder, _ = saved(tmp_path / "m")
    (folder / SINGLE).rename(folder / file)
    message = refused(folder)
    assert "pickled weights (.bin) only" in message
    assert "transformers' from_pretrained, then save_pretrained" in message


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path / "m")
    (folder / SINGLE).unlink()
    assert "has no model.safetensors; expected a Hugging Face model with weights" in refused(folder)


def test_an_index_that_is_not_of_these_files_is_refused(tmp_path: Path) -> None:
    """Files of two savings in one folder, of which only one index is left."""
    folder, _ = saved(tmp_path / "m", max_shard_size="20KB")
    place = map_of(folder).files.path_of["model.norm.weight"]
    change(place, **{"model.norm.weight": None})
    with pytest.raises(ModelError, match=f"{place.name} does not hold model.norm.weight, although the index"):
        map_of(folder).whole("model.norm.weight")
