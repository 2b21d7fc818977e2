"""The low-rank product: its gradients, its dropout, and what it keeps for backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from leantune.ops.lowrank import add_lowrank

SCALE = 0.7


def operands(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out [2, 3, 5], hidden [2, 3, 4], a [2, 4], b [5, 2]; all of them need a gradient."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 5), (2, 3, 4), (2, 4), (5, 2))
    made = [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]
    return made[0], made[1], made[2], made[3]


def reference(out: Tensor, hidden: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return out + SCALE * (hidden @ a.t()) @ b.t()


def test_value_and_gradients_are_those_of_the_formula() -> None:
    """The backward pass is written by hand: a factor or a transpose is easily lost."""
    torch.testing.assert_close(
        add_lowrank(*operands(), SCALE), reference(*operands()), rtol=1e-14, atol=1e-14
    )
    assert torch.autograd.gradcheck(lambda *o: add_lowrank(*o, SCALE), operands())


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_dropout_is_that_of_the_input_and_the_same_in_backward(dropout: float) -> None:
    """Backward drew another mask, or forgot the factor 1 / (1 - dropout)."""
    out, hidden, a, b = operands()
    torch.manual_seed(3)
    value = add_lowrank(out, hidden, a, b, SCALE, dropout)
    torch.manual_seed(3)
    mask = torch.empty(6, 4, dtype=torch.bool).bernoulli_(1.0 - dropout).view(2, 3, 4)
    assert 0 < int(mask.sum()) < mask.numel()
    expected = reference(out, hidden * mask / (1.0 - dropout), a, b)
    torch.testing.assert_close(value, expected, rtol=1e-14, atol=1e-14)
    weights = torch.linspace(-1.0, 1.0, value.numel(), dtype=value.dtype).view(value.shape)
    ours = torch.autograd.grad((value * weights).sum(), (out, hidden, a, b))
    theirs = torch.autograd.grad((expected * weights).sum(), (out, hidden, a, b))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_backward_keeps_the_shared_input_and_one_byte_a_value(dropout: float) -> None:
    """Each layer kept a dropped copy of the input that its neighbours share, and the input of B."""
    out, hidden, a, b = operands(torch.float32)
    kept: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        add_lowrank(out, hidden, a, b, SCALE, dropout)
    known = {tensor.data_ptr() for tensor in (hidden, a, b)}
    others = [tensor for tensor in kept if tensor.data_ptr() not in known]
    assert [tensor.dtype for tensor in others] == ([torch.bool] if dropout else [])


def test_under_autocast_gradients_come_back_in_the_types_of_the_operands() -> None:
    out, hidden, a, b = (tensor.detach().float().requires_grad_() for tensor in operands())
    low = out.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        value = add_lowrank(low, hidden, a, b, SCALE, 0.0)
    assert value.dtype == torch.bfloat16
    value.float().sum().backward()
    assert [t.grad is not None and t.grad.dtype == t.dtype for t in (low, hidden, a, b)] == [True] * 4
    torch.testing.assert_close(value.float(), reference(out, hidden, a, b), rtol=0.05, atol=0.1)
