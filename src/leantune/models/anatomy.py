"""The parts of any Hugging Face decoder: blocks, linear layers, head. No list of model classes."""

from __future__ import annotations

import difflib
import inspect
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from transformers.activations import ACT2CLS
from transformers.pytorch_utils import Conv1D

from leantune.errors import ModelError
from leantune.models.packed import PackedLinear

LINEAR_TYPES = (nn.Linear, Conv1D, PackedLinear)


def text_config(model: nn.Module) -> Any:
    """The configuration of the language part of the model."""
    config: Any = model.config
    return config.get_text_config(decoder=True)


def decoder_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The decoder blocks in order, by full module name.

    They are the module list with as many members as the configuration has hidden layers;
    of several such lists the one with most parameters. Raises `ModelError` if there is none.
    """
    num_layers = int(text_config(model).num_hidden_layers)
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    if not lists:
        raise ModelError(
            f"{type(model).__name__}: found no list of {num_layers} decoder blocks "
            "(config.num_hidden_layers); this model cannot be adapted by layer"
        )
    name, blocks = max(lists, key=lambda item: sum(p.numel() for p in item[1].parameters()))
    return {f"{name}.{index}": block for index, block in enumerate(blocks)}


def select_blocks(model: nn.Module, layers: Sequence[int] | None) -> dict[str, nn.Module]:
    """The blocks of these layers (None: all); raises `ModelError` for a layer that does not exist."""
    blocks = decoder_blocks(model)
    if layers is None:
        return blocks
    names = list(blocks)
    for layer in layers:
        if layer >= len(names):
            raise ModelError(
                f"method.layers: layer {layer} does not exist; the model has {len(names)} layers, "
                f"0 to {len(names) - 1}"
            )
    return {names[layer]: blocks[names[layer]] for layer in layers}


def input_embeddings(model: nn.Module) -> nn.Module:
    """The table of token embeddings; raises `ModelError` if the model has none."""
    table = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None  # pyright: ignore[reportCallIssue]
    if not isinstance(table, nn.Module):
        raise ModelError(f"{type(model).__name__} has no input embeddings; a causal language model is needed")
    return table


def output_head(model: nn.Module) -> nn.Module:
    """The projection to the vocabulary; raises `ModelError` if the model has none."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # pyright: ignore[reportCallIssue]
    if not isinstance(head, nn.Module):
        raise ModelError(f"{type(model).__name__} has no output head; a causal language model is needed")
    return head


def linear_sizes(module: nn.Module) -> tuple[int, int]:
    """(in features, out features) of a linear layer, GPT-2's transposed one included."""
    if isinstance(module, nn.Linear | PackedLinear):
        return module.in_features, module.out_features
    rows, columns = module.weight.shape  # pyright: ignore[reportGeneralTypeIssues]
    return int(rows), int(columns)


def linears(model: nn.Module) -> dict[str, nn.Module]:
    """All linear layers but the output head, by full module name."""
    head = output_head(model)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, LINEAR_TYPES) and module is not head
    }


def match_linears(
    model: nn.Module,
    targets: str | Sequence[str],
    layers: Sequence[int] | None,
    key: str = "method.target_modules",
) -> dict[str, nn.Module]:
    """The linear layers that `targets` names, within `layers` (None: all of them).

    `targets` is `all-linear`, a regular expression over full names, or a list of names and
    suffixes. Names are compared whole, component by component. Raises `ModelError` for a
    target that matches nothing, or that matches in some of the chosen layers only.
    """
    candidates = linears(model)
    prefixes = [f"{name}." for name in select_blocks(model, layers)]
    if layers is not None:
        candidates = {n: m for n, m in candidates.items() if any(n.startswith(p) for p in prefixes)}
    if isinstance(targets, str):
        pattern = re.compile(".*" if targets == "all-linear" else targets)
        matched = {name for name in candidates if pattern.fullmatch(name)}
        if not matched:
            raise ModelError(_no_match(targets, candidates, key))
    else:
        matched = {name for target in targets for name in _match_one(target, candidates, prefixes, key)}
    return {name: module for name, module in candidates.items() if name in matched}


def _match_one(target: str, candidates: Iterable[str], prefixes: Sequence[str], key: str) -> list[str]:
    names = [name for name in candidates if name == target or name.endswith(f".{target}")]
    if not names:
        raise ModelError(_no_match(target, candidates, key))
    names_a_layer = any(part.isdigit() for part in target.split("."))
    hit = [any(name.startswith(prefix) for name in names) for prefix in prefixes]
    if any(hit) and not all(hit) and not names_a_layer:
        layers = [int(prefix.split(".")[-2]) for prefix, found in zip(prefixes, hit, strict=True) if found]
        raise ModelError(
            f"{key}: {target!r} exists in {len(layers)} of {len(prefixes)} layers only; "
            f"to train just those, set method.layers to {';'.join(map(str, layers))}"
        )
    return names


def _no_match(target: str, candidates: Iterable[str], key: str) -> str:
    suffixes = sorted({name.rpartition(".")[2] for name in candidates})
    close = difflib.get_close_matches(target.rpartition(".")[2], suffixes, 1, 0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{key}: {target!r} matches no linear layer{hint} (linear layers here: {', '.join(suffixes)})"


COMPONENTS = ("block_output", "block_input", "attention_output", "mlp_output", "mlp_activation")
_ATTENTION = re.compile(r"attn|attention")
_MLP = re.compile(r"mlp|feed_forward|ffn|moe")
_ACTIVATIONS = tuple(
    {kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values() if kind is not None}
)


def component_of(block: nn.Module, component: str, hidden_size: int) -> tuple[nn.Module, int]:
    """The module of a decoder block at which hidden states are read, and their dimension.

    block_input and block_output are those of the block itself; attention_output and mlp_output are what
    attention and MLP put out, before a norm that may follow; mlp_activation is the output of the
    activation function inside the MLP. Raises `ModelError` if the block has no such module, or several.
    """
    if component not in COMPONENTS:
        raise ModelError(
            f"method.component: {component!r} is unknown; expected one of {', '.join(COMPONENTS)}"
        )
    if component in ("block_output", "block_input"):
        return block, hidden_size
    if component == "attention_output":
        return _branch(_child(block, _ATTENTION, component)), hidden_size
    linear_children = [m for _, m in block.named_children() if isinstance(m, LINEAR_TYPES)]
    # Blocks such as OPT's have the layers of their MLP as their own.
    mlp = block if linear_children else _child(block, _MLP, component)
    if component == "mlp_output":
        return (linear_children[-1] if linear_children else _branch(mlp)), hidden_size
    inner = list(mlp.children()) if linear_children else list(mlp.modules())
    found = [module for module in inner if isinstance(module, _ACTIVATIONS)]
    down = [linear_sizes(m) for m in inner if isinstance(m, LINEAR_TYPES)]
    widths = {size for size, out in down if out == hidden_size}
    if len(found) != 1 or len(widths) != 1:
        raise ModelError(
            f"mlp_activation: the MLP of {type(block).__name__} has {len(found)} activation modules and "
            f"{len(widths)} widths where one was expected (experts have many); edit mlp_output instead"
        )
    return found[0], widths.pop()


def _child(block: nn.Module, pattern: re.Pattern[str], component: str) -> nn.Module:
    """The one direct child of a block that has this name and weights of its own."""
    found = {
        name: child
        for name, child in block.named_children()
        if pattern.search(name.lower()) and any(p.ndim > 1 for p in child.parameters())
    }
    if len(found) != 1:
        names = ", ".join(name for name, _ in block.named_children())
        raise ModelError(
            f"{component}: {type(block).__name__} has {len(found)} such modules where one was expected (its "
            f"modules: {names}); edit block_output instead"
        )
    return next(iter(found.values()))


def _branch(module: nn.Module) -> nn.Module:
    """What computes the output of a branch: the module, or its last layer if it adds the residual itself."""
    if "residual" not in inspect.signature(module.forward).parameters:
        return module
    return [inner for inner in module.modules() if isinstance(inner, LINEAR_TYPES)][-1]


def summarise_names(names: Iterable[str]) -> str:
    """`q_proj ×30, v_proj ×30`: how many modules of each last name there are."""
    counts = Counter(name.rpartition(".")[2] for name in names)
    return ", ".join(f"{name} ×{count}" for name, count in counts.items())
