"""Expanding a model on disk (Llama-Pro): a new folder with blocks that add nothing, proved by its logits.

The weights go from file to file as bytes. The proof runs the old and the new model on a few tokens
with the weights of one block in memory at a time.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from leantune.checkpoint.atomic import write_folder
from leantune.checkpoint.stream import Copied, StoredTensor, stored_tensors, write_sharded
from leantune.errors import CheckpointError, ModelError
from leantune.models.anatomy import decoder_blocks
from leantune.models.empty import empty_model
from leantune.models.expand import (
    Expansion,
    check_identity,
    check_same_blocks,
    evaluating,
    expanded_config,
    plan_expansion,
    probe_tokens,
)
from leantune.models.source import ModelSource, load_config, load_tokenizer
from leantune.models.weights import WeightFiles, WeightMap

MAX_SHARD_BYTES = 4 * 2**30


@dataclass(frozen=True)
class _Plan:
    """The model and the expanded one, both without weights, and what ties them together."""

    source: ModelSource
    expansion: Expansion
    config: Any
    narrow: PreTrainedModel
    wide: PreTrainedModel
    weights: WeightMap


def expand_model(
    source: ModelSource, blocks: int, target: Path, max_shard_bytes: int = MAX_SHARD_BYTES
) -> list[str]:
    """Write a model with `blocks` more decoder blocks, and the same logits, as a Hugging Face folder.

    Returns lines of what was done and checked. Raises `ModelError` for a model that cannot be
    expanded (quantised, without safetensors, with blocks that differ by index) and
    `CheckpointError` if `target` is not empty or the disk refuses; `target` then is what it was.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists already; choose a new folder for the expanded model")
    plan = _plan(source, blocks)
    tensors = _tensors(plan)
    lines: list[str] = []

    def fill(folder: Path) -> None:
        write_sharded(folder, tensors, max_shard_bytes)
        lines.extend(_write_rest(plan, folder))
        _check(plan, folder)

    write_folder(target, fill)
    layers = ", ".join(map(str, plan.expansion.new))
    old, new = len(plan.expansion.origins) - blocks, len(plan.expansion.origins)
    return [
        f"{source.name}: {old} blocks, expanded to {new}; the new ones are {layers}",
        *lines,
        f"saved {target}: {len(tensors)} tensors read back, equal bit for bit; "
        "its logits equal those of the source bit for bit",
    ]


def _plan(source: ModelSource, blocks: int) -> _Plan:
    config = load_config(source)
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"model.name: {source.name} is quantised (config.json: quantization_config); expand the "
            "unquantised model, and quantise with `base` when training"
        )
    expansion = plan_expansion(config, blocks)
    expanded = expanded_config(config, expansion)
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    narrow = empty_model(source, config, weights=dtype)
    wide = empty_model(source, expanded, weights=dtype)
    check_same_blocks(narrow, wide, expansion)
    expanded.architectures = [type(wide).__name__]
    weights = WeightMap(narrow, WeightFiles(source))
    missing = [names[0] for names in _tied_groups(narrow) if not any(name in weights for name in names)]
    if missing:
        raise ModelError(
            f"model.name: {source.name} lacks {len(missing)} weights of {type(narrow).__name__}: "
            f"{', '.join(missing[:5])}; it is not a complete causal language model"
        )
    return _Plan(source, expansion, expanded, narrow, wide, weights)


def _tensors(plan: _Plan) -> dict[str, Copied]:
    """What the new files hold: each tensor of the old ones, under a new index if it is in a block.

    Tensors that the model has no use for are left out: their names may be those of new blocks.
    """
    weights, names = plan.weights, plan.expansion.names(plan.wide)
    stored: dict[str, StoredTensor] = {}
    for path in sorted(set(weights.files.path_of.values())):
        stored |= stored_tensors(path)
    found: dict[str, Copied] = {}
    for name in plan.wide.state_dict():
        origin, zero = names(name)
        if origin not in weights:
            continue  # tied to one that is there
        place, old = names.layer_of(name), names.layer_of(origin)
        for key in weights.keys_of(origin):
            if place is not None and old is not None:
                new_key = _renamed(key, names.prefix, old[0], place[0], plan.source)
            else:
                new_key = key
            if new_key in found and found[new_key].zero != zero:
                raise ModelError(
                    f"model.name: {plan.source.name} keeps in one tensor ({key}) what writes into the "
                    "residual stream and what does not; expand it while training instead (method: llama_pro)"
                )
            found[new_key] = Copied(stored[key], zero)
    return found


def _renamed(key: str, prefix: str, old: int, new: int, source: ModelSource) -> str:
    """A name in the files with another index behind the name of the block list."""
    parts, blocks = key.split("."), prefix.rpartition(".")[2]
    for index in range(len(parts) - 1):
        if parts[index] == blocks and parts[index + 1] == str(old):
            return ".".join([*parts[: index + 1], str(new), *parts[index + 2 :]])
    raise ModelError(
        f"model.name: {source.name} has the tensor {key} for block {old}, and its name does not say so "
        f"({blocks}.{old} was expected in it); expand it while training instead (method: llama_pro)"
    )


def _write_rest(plan: _Plan, folder: Path) -> list[str]:
    """The configuration, the tokenizer, and what generation needs."""
    plan.config.save_pretrained(folder)
    if plan.wide.can_generate():
        # As JSON, unchecked: many models come with sampling settings that save_pretrained refuses.
        generation: Any = plan.wide.generation_config
        generation.to_json_file(folder / "generation_config.json")
    try:
        load_tokenizer(plan.source).save_pretrained(folder)
    except ModelError:
        return ["no tokenizer: the source has none that transformers can read, so none was written"]
    return []


def _check(plan: _Plan, folder: Path) -> None:
    """Read the new folder as a model and compare its logits with the old model's, bit for bit."""
    again = WeightMap(plan.wide, WeightFiles(ModelSource(plan.source.name, str(folder))))
    names = plan.expansion.names(plan.wide)
    lost = [n for n in plan.wide.state_dict() if (n in again) != (names(n)[0] in plan.weights)]
    if lost or again.unused:
        raise CheckpointError(
            f"the expanded model does not read back: {', '.join([*lost, *again.unused][:5])}; "
            "expand it while training instead (method: llama_pro)"
        )
    expected = _logits(plan.narrow, plan.weights)
    with again.files.reading(), _block_by_block(plan.wide, again):
        if torch.equal(_run(plan.wide), expected):
            return
        check_identity(plan.wide, plan.expansion)
    raise ModelError(
        f"model.name: the logits of {plan.source.name} change when blocks are added, although these are "
        "identities: the model itself depends on its number of layers; use another method"
    )


def _logits(model: PreTrainedModel, weights: WeightMap) -> Tensor:
    with weights.files.reading(), _block_by_block(model, weights):
        return _run(model)


@torch.no_grad()
def _run(model: PreTrainedModel) -> Tensor:
    with evaluating(model):
        return model(input_ids=probe_tokens(model), use_cache=False).logits


@contextmanager
def _block_by_block(model: PreTrainedModel, weights: WeightMap) -> Generator[None]:
    """The model works, with the weights of a block in memory only while that block runs."""
    prefixes = {f"{name}.": block for name, block in decoder_blocks(model).items()}
    loads = {prefix: _Weights(model, weights) for prefix in prefixes}
    outside = _Weights(model, weights)
    for names in _tied_groups(model):
        home = next((prefix for prefix in prefixes if names[0].startswith(prefix)), "")
        inside = home and all(name.startswith(home) for name in names)
        (loads[home] if inside else outside).groups.append(names)
    handles: list[Any] = []
    for prefix, block in prefixes.items():
        handles.append(block.register_forward_pre_hook(loads[prefix].load))
        handles.append(block.register_forward_hook(loads[prefix].drop))
    outside.load()
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        outside.drop()
        weights.forget()


class _Weights:
    """Some weights of a model that is without memory, which come and go; those in a group are tied."""

    def __init__(self, model: PreTrainedModel, weights: WeightMap) -> None:
        self.model = model
        self.weights = weights
        self.groups: list[list[str]] = []
        self._without: dict[str, Tensor] = {}

    def load(self, *_: Any) -> None:
        """Read them, in the dtype that the model has them in."""
        for names in self.groups:
            known = next(name for name in names if name in self.weights)
            old = _get(self.model, known)
            value: Tensor = self.weights.whole(known).to(old.dtype)
            new = nn.Parameter(value, requires_grad=False) if isinstance(old, nn.Parameter) else value
            for name in names:
                self._without[name] = _get(self.model, name)
                _set(self.model, name, new)

    def drop(self, *_: Any) -> None:
        """Put back what was there before."""
        for name, tensor in self._without.items():
            _set(self.model, name, tensor)
        self._without.clear()


def _tied_groups(model: nn.Module) -> list[list[str]]:
    """The names of all weights; those of one tensor together."""
    groups: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), []).append(name)
    return list(groups.values())


def _get(model: nn.Module, name: str) -> Tensor:
    path, _, attribute = name.rpartition(".")
    return getattr(model.get_submodule(path), attribute)


def _set(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(path), attribute, tensor)
