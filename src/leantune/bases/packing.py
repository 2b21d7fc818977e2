"""Putting packed layers in the place of a model's linear layers, and saying which were left as they are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch import nn

from leantune.errors import ModelError
from leantune.models.anatomy import linear_sizes, linears, match_linears, summarise_names
from leantune.models.packed import PackedLinear

# (in features, out features, bias, transposed) -> the packed layer
MakeLayer = Callable[[int, int, nn.Parameter | None, bool], PackedLinear]


def replace_linears(
    model: nn.Module,
    make: MakeLayer,
    why_not: Callable[[int], str | None],
    *,
    label: str,
    keep_dense: Sequence[str] = (),
    leave: Collection[str] = (),
) -> list[str]:
    """Replace the linear layers of a model (its output head excepted) by packed ones, in place.

    `why_not(in features)` is the reason why such a layer cannot be packed, None if it can.
    `keep_dense` are names or suffixes of layers that the user wants left alone, `leave` prefixes of
    modules that the method trains. Returns lines that say what was packed and what was left, and why.
    Raises `ModelError` if nothing can be packed, or `keep_dense` matches nothing.
    """
    kept = set(match_linears(model, keep_dense, None, key="base.keep_dense")) if keep_dense else set[str]()
    packed: list[str] = []
    left: dict[str, list[str]] = {}
    for name, module in linears(model).items():
        in_features, out_features = linear_sizes(module)
        reason = why_not(in_features)
        if name in kept:
            reason = "base.keep_dense"
        elif any(name.startswith(f"{prefix}.") for prefix in leave):
            reason = "trained by the method"
        if reason is not None:
            left.setdefault(reason, []).append(name)
            continue
        bias = getattr(module, "bias", None)
        layer = make(in_features, out_features, bias, not isinstance(module, nn.Linear))
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
        packed.append(name)
    stacked = [name for name, p in model.named_parameters() if p.ndim == 3]
    if stacked:
        left["stacked experts are no linear layers"] = stacked
    lines = [f"left dense, {reason}: {summarise_names(names)}" for reason, names in left.items()]
    if not packed:
        raise ModelError(
            f"base {label}: no linear layer of this model can be packed ({'; '.join(lines)}); use base: dense"
        )
    return [f"base {label}: {len(packed)} linear layers packed: {summarise_names(packed)}", *lines]
