"""Block expansion (Llama-Pro, arXiv 2401.02415): copies of decoder blocks that add nothing at the start.

A copy follows the block that it was made from. Whatever writes into the residual stream is zero in
it, so that its output is its input. What writes is found by structure and proved by a forward
pass: no list of model classes, no names of layers.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from leantune.errors import ModelError
from leantune.models.anatomy import LINEAR_TYPES, decoder_blocks, linear_sizes, text_config

# In the configuration of an expanded model: the indices of its new blocks.
NEW_BLOCKS_KEY = "leantune_new_blocks"
_NOT_LINEAR = (nn.Embedding, nn.Conv1d, nn.Conv2d)  # layers whose weights look like matrices and stacks
_NUM_PROBES = 8


@dataclass(frozen=True)
class Expansion:
    """Where the blocks of the expanded model come from.

    origins: for each of its blocks, the block of the source model; new: the indices of those that
    are zeroed copies.
    """

    origins: tuple[int, ...]
    new: tuple[int, ...]

    def names(self, model: nn.Module) -> ExpandedNames:
        """The names of an expanded model, which may be on the meta device."""
        blocks = decoder_blocks(model)
        hidden_size = int(text_config(model).hidden_size)
        new = {index: list(blocks.values())[index] for index in self.new}
        writers = {index: frozenset(residual_writers(block, hidden_size)) for index, block in new.items()}
        return ExpandedNames(next(iter(blocks)).rpartition(".")[0], self, writers)

    def new_names(self, model: nn.Module) -> list[str]:
        """The full module names of the new blocks of an expanded model."""
        blocks = list(decoder_blocks(model))
        return [blocks[index] for index in self.new]


def plan_expansion(config: Any, blocks: int) -> Expansion:
    """Spread `blocks` new blocks evenly, each behind the block that it copies, the last one at the end.

    Raises `ModelError` unless `blocks` is between 1 and the number of blocks of the model.
    """
    num_layers = int(config.get_text_config(decoder=True).num_hidden_layers)
    if not 1 <= blocks <= num_layers:
        raise ModelError(
            f"method.blocks: {blocks} new blocks; the model has {num_layers}, and each is copied at most "
            f"once: expected 1 to {num_layers}"
        )
    copied = {(i + 1) * num_layers // blocks - 1 for i in range(blocks)}
    origins: list[int] = []
    new: list[int] = []
    for layer in range(num_layers):
        origins.append(layer)
        if layer in copied:
            new.append(len(origins))
            origins.append(layer)
    return Expansion(tuple(origins), tuple(new))


def expanded_config(config: Any, expansion: Expansion) -> Any:
    """A copy of a model's configuration with the blocks of `expansion`; lists with a value per layer follow.

    The copy names the new blocks under `leantune_new_blocks`. Raises `ModelError` for a
    configuration that describes single layers in a way that does not follow.
    """
    expanded = copy.deepcopy(config)
    text = expanded.get_text_config(decoder=True)
    if getattr(text, "is_heterogeneous", False):
        raise ModelError(
            "method.blocks: the configuration of this model has a section for each layer "
            "(per_layer_config), which cannot be expanded; use another method"
        )
    num_layers = int(text.num_hidden_layers)
    changed = {key: _follow(key, value, num_layers, expansion) for key, value in vars(text).items()}
    text.num_hidden_layers = len(expansion.origins)
    for key, value in changed.items():
        if value is not None:
            setattr(text, key, value)
    setattr(text, NEW_BLOCKS_KEY, list(expansion.new))
    return expanded


def new_blocks(config: Any) -> tuple[int, ...] | None:
    """The indices of the new blocks that the configuration of an expanded model names; None if it is none."""
    indices = getattr(config.get_text_config(decoder=True), NEW_BLOCKS_KEY, None)
    return None if not indices else tuple(int(index) for index in indices)


def _follow(key: str, value: Any, num_layers: int, expansion: Expansion) -> Any:
    """The list of one key for the expanded model; None if it says nothing about layers."""
    if not isinstance(value, list | tuple) or not value:
        return None
    if key == "architectures" or key.endswith(("token_id", "token_ids")):
        return None
    values = cast("list[Any]", list(value))  # pyright: ignore[reportUnknownArgumentType]
    if "layer" in key and _are_layers(values, num_layers):
        moved = [new for new, old in enumerate(expansion.origins) if old in values]
    elif len(values) == num_layers:
        moved = [values[old] for old in expansion.origins]
    else:
        return None
    return tuple(moved) if isinstance(value, tuple) else moved


def _are_layers(values: list[Any], num_layers: int) -> bool:
    """Whether a list names layers by their index, rather than giving a value for each."""
    if any(type(value) is not int or not 0 <= value < num_layers for value in values):
        return False
    rising = all(a < b for a, b in pairwise(values))
    # [0] and [0, 1] are switches of models with one and two layers as well; those are lists of values.
    return rising and (len(values) < num_layers or num_layers > 2)


def residual_writers(block: nn.Module, hidden_size: int) -> list[str]:
    """Names, within a decoder block, of the parameters that write into the residual stream.

    In each module that holds linear layers: the one registered last among those whose output has the
    hidden size, with its bias; in one that holds stacked experts [experts, ...]: the stack
    registered last. Works on the meta device. What it finds is a claim: see `check_identity`.
    """
    found: list[str] = []
    for name, module in block.named_modules():
        if _output_size(module) is not None or isinstance(module, _NOT_LINEAR):
            continue  # a layer, not a holder of layers
        prefix = f"{name}." if name else ""
        own = dict(module.named_parameters(recurse=False))
        stacks = [key for key, parameter in own.items() if parameter.ndim == 3]
        if stacks:
            found += [prefix + key for key in (stacks[-1], f"{stacks[-1]}_bias") if key in own]
        writers = [key for key, child in module.named_children() if _output_size(child) == hidden_size]
        if writers:
            layer = module.get_submodule(writers[-1])
            found += [f"{prefix}{writers[-1]}.{key}" for key, _ in layer.named_parameters(recurse=False)]
    return found


def _output_size(module: nn.Module) -> int | None:
    """The output size of a linear layer, or of a module that is nothing but one matrix per expert."""
    if isinstance(module, LINEAR_TYPES):
        return linear_sizes(module)[1]
    if isinstance(module, _NOT_LINEAR) or any(True for _ in module.children()):
        return None
    matrices = [p for p in module.parameters(recurse=False) if p.ndim in (2, 3)]
    return int(matrices[0].shape[-2]) if len(matrices) == 1 else None


@dataclass(frozen=True)
class ExpandedNames:
    """Names of the expanded model by those of its source: `source, zero = names(name)`.

    prefix: the list of decoder blocks; writers: the residual writers of each new block, by its index.
    """

    prefix: str
    expansion: Expansion
    writers: Mapping[int, frozenset[str]]

    def layer_of(self, name: str) -> tuple[int, str] | None:
        """The block that a parameter or buffer belongs to, and its name within; None outside of blocks."""
        head, dot, rest = name.partition(f"{self.prefix}.")
        index, _, inner = rest.partition(".")
        return (int(index), inner) if dot and not head and index.isdigit() else None

    def at(self, layer: int, inner: str) -> str:
        """The name of a parameter of a block."""
        return f"{self.prefix}.{layer}.{inner}"

    def __call__(self, name: str) -> tuple[str, bool]:
        """The name in the source model, and whether the parameter is all zeros instead of a copy."""
        place = self.layer_of(name)
        if place is None:
            return name, False
        layer, inner = place
        return self.at(self.expansion.origins[layer], inner), inner in self.writers.get(layer, ())


def check_same_blocks(source: nn.Module, expanded: nn.Module, expansion: Expansion) -> None:
    """Each block must be built as the one it comes from; raises `ModelError` naming what differs.

    Some models decide by the index of a layer what it is made of (every second one has experts)
    or what it scales by. Compares shapes and plain settings; both models may be on the meta device.
    """
    old = list(decoder_blocks(source).values())
    for index, (name, block) in enumerate(decoder_blocks(expanded).items()):
        origin = expansion.origins[index]
        mine, theirs = _facts(block), _facts(old[origin])
        for key in sorted(mine.keys() | theirs.keys()):
            is_index = type(mine.get(key)) is int and (mine[key], theirs.get(key)) == (index, origin)
            if mine.get(key) != theirs.get(key) and not is_index:
                raise ModelError(
                    f"method.blocks: {name} of the expanded model is built differently from block {origin} "
                    f"that it comes from ({key}: {mine.get(key)} instead of {theirs.get(key)}): this kind of "
                    "model decides by a layer's index what it is; choose another number of blocks, or "
                    "another method"
                )


def _facts(block: nn.Module) -> dict[str, Any]:
    """Shapes and plain settings of a block."""
    facts: dict[str, Any] = {name: tuple(p.shape) for name, p in block.named_parameters()}
    for name, module in block.named_modules():
        for key, value in vars(module).items():
            if (isinstance(value, int | float | str) or value is None) and not key.startswith("_"):
                facts[f"{name}.{key}".lstrip(".")] = value
    return facts


@contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Evaluation mode; afterwards each module is in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def probe_tokens(model: nn.Module) -> Tensor:
    """A few fixed token ids from all over the vocabulary, int64 [1, 8]."""
    vocabulary = int(text_config(model).vocab_size)
    return torch.tensor([[vocabulary * (2 * i + 1) // (2 * _NUM_PROBES) for i in range(_NUM_PROBES)]])


@torch.no_grad()
def check_identity(model: nn.Module, expansion: Expansion) -> None:
    """Run a few tokens through a loaded model: each new block must give back its input, bit for bit.

    Raises `ModelError` naming the first block that does not. With a sharded model this is a
    collective: every rank calls it.
    """
    blocks = list(decoder_blocks(model).items())
    changed: list[str] = []

    def compare_of(name: str) -> Any:
        def compare(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            before, after = block_input(args, kwargs), block_output(output)
            if before.shape != after.shape or not torch.equal(before, after.to(before.dtype)):
                changed.append(name)

        return compare

    new = [blocks[index] for index in expansion.new]
    handles = [block.register_forward_hook(compare_of(name), with_kwargs=True) for name, block in new]
    try:
        with evaluating(model):
            model(input_ids=probe_tokens(model).to(next(model.parameters()).device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    if changed:
        index = int(changed[0].rpartition(".")[2])
        written = residual_writers(dict(blocks)[changed[0]], int(text_config(model).hidden_size))
        raise ModelError(
            f"method llama_pro: the new block {changed[0]} (a copy of block {expansion.origins[index]}) is "
            f"not an identity: its output differs from its input, although {', '.join(written) or 'nothing'} "
            "should be zero. This kind of block cannot be expanded (it scales or norms the residual stream "
            "itself); use another method"
        )


def block_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The hidden states that a decoder block was called with."""
    return args[0] if args else kwargs["hidden_states"]


def block_output(output: Any) -> Tensor:
    """The hidden states among what a decoder block returned: a tensor, or a sequence that starts with it."""
    return output if isinstance(output, Tensor) else output[0]
