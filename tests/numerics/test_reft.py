"""The six interventions against their formulas, in dense matrices for one hidden state at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leantune.errors import ModelError
from leantune.methods import attach
from leantune.methods.interventions import Intervention
from leantune.methods.reft import AttachedReft
from leantune.models.anatomy import decoder_blocks
from leantune.ops.intervention import ACTIVATIONS, CONSTANT, KINDS, ORTHONORMAL, edit_delta, orthonormalise
from tests.models import tiny_model

EXPLICIT: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: x,
    "relu": lambda x: x.clamp(min=0),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "tanh": lambda x: (torch.exp(x) - torch.exp(-x)) / (torch.exp(x) + torch.exp(-x)),
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
# Constants have nothing that an activation could act on.
WITH_ACTIVATION = pytest.mark.parametrize(
    ("kind", "activation"),
    [(kind, name) for kind in KINDS for name in (["linear"] if kind in CONSTANT else EXPLICIT)],
)


def random_64(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def intervention(kind: str, dim: int = 12, rank: int = 3, projection_bias: bool = False) -> Intervention:
    """In float64, and exactly orthonormal there."""
    module = Intervention(kind, dim, rank, torch.Generator().manual_seed(3), projection_bias).double()
    if kind in ORTHONORMAL:
        with torch.no_grad():
            module.rotation.copy_(orthonormalise(random_64(dim, rank)))
    return module


def explicit(h: Tensor, module: Intervention, activation: str, active: Tensor | None = None) -> Tensor:
    """One edited hidden state: the formulas of the paper and of its authors' code, with d × d matrices."""
    p: dict[str, Any] = dict(module.named_parameters())
    act, eye = EXPLICIT[activation], torch.eye(len(h), dtype=h.dtype)
    S = torch.eye(module.rank, dtype=h.dtype) if active is None else torch.diag(active.to(h.dtype))
    F = p["rotation"] @ S if module.kind in ORTHONORMAL else p["projection"].T @ S  # columns that act
    match module.kind:
        case "loreft":
            return (eye - F @ F.T) @ h + F @ act(p["weight"] @ h + p["bias"])
        case "consreft":
            return (eye - F @ F.T) @ h + F @ p["constant"]
        case "lobireft":
            return h + F @ p["constant"]
        case "noreft":
            projected = p["projection"] @ h + p.get("projection_bias", 0.0)
            return h + F @ (act(p["weight"] @ h + p["bias"]) - projected)
        case _:
            return h + F @ act(p["weight"] @ h + p["bias"])


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def outputs_of_block_1(model: nn.Module) -> list[Tensor]:
    """Grows by the edited output of this block at every forward pass from now on."""
    seen: list[Tensor] = []
    list(decoder_blocks(model).values())[1].register_forward_hook(lambda _m, _a, out: seen.append(out))
    return seen


def test_all_activations_are_checked() -> None:
    assert set(EXPLICIT) == set(ACTIVATIONS)


@WITH_ACTIVATION
def test_the_edit_is_the_formula(kind: str, activation: str) -> None:
    module, hidden = intervention(kind), random_64(5, 12, seed=1)
    delta = module.delta(hidden, activation, 0.0)
    assert_close(hidden + delta, torch.stack([explicit(h, module, activation) for h in hidden]))


@pytest.mark.parametrize("activation", list(EXPLICIT))
def test_the_bias_of_a_projection_counts_before_the_factor(activation: str) -> None:
    """pyreft's `add_bias`: P h becomes P h + b, outside the activation."""
    module, hidden = intervention("noreft", projection_bias=True), random_64(5, 12, seed=1)
    edited = hidden + module.delta(hidden, activation, 0.0)
    assert_close(edited, torch.stack([explicit(h, module, activation) for h in hidden]))
    without = intervention("noreft")
    assert float((edited - hidden - without.delta(hidden, activation, 0.0)).detach().abs().max()) > 1e-3


@EVERY_KIND
def test_each_state_is_edited_in_its_own_active_dimensions(kind: str) -> None:
    module, hidden = intervention(kind), random_64(4, 12, seed=1)
    active = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 1, 1], [0, 0, 0]], dtype=torch.bool)
    activation = "linear" if kind in CONSTANT else "tanh"
    edited = hidden + module.delta(hidden, activation, 0.0, active)
    assert_close(
        edited,
        torch.stack([explicit(h, module, activation, a) for h, a in zip(hidden, active, strict=True)]),
    )
    assert torch.equal(edited[3], hidden[3])


@EVERY_KIND
def test_disjoint_subspaces_add_up_to_the_whole(kind: str) -> None:
    """Trained apart and switched on together they must be the one intervention that they share."""
    module, hidden = intervention(kind), random_64(4, 12, seed=1)
    one = torch.tensor([True, False, True]).expand(4, -1)
    parts = module.delta(hidden, "linear", 0.0, one) + module.delta(hidden, "linear", 0.0, ~one)
    assert_close(parts, module.delta(hidden, "linear", 0.0))


@EVERY_KIND
def test_an_inactive_dimension_has_no_gradient(kind: str) -> None:
    """What one subspace learns must leave the others as they are."""
    module, hidden = intervention(kind), random_64(4, 12, seed=1)
    active = torch.tensor([True, False, True]).expand(4, -1)
    module.delta(hidden, "linear", 0.0, active).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        rows = parameter.grad.T if name == "rotation" else parameter.grad
        assert not rows[1].any()
        assert rows[0].any()


@WITH_ACTIVATION
def test_the_gradient_is_that_of_the_formula(kind: str, activation: str) -> None:
    module = intervention(kind, dim=6, rank=2, projection_bias=kind == "noreft")
    hidden = random_64(3, 6, seed=1).requires_grad_()
    active = torch.tensor([[True, True], [False, True], [True, False]])
    names = [name for name, _ in module.named_parameters()]

    def delta(hidden: Tensor, *values: Tensor) -> Tensor:
        return edit_delta(kind, hidden, dict(zip(names, values, strict=True)), activation, active)

    assert torch.autograd.gradcheck(delta, (hidden, *module.parameters()))


@pytest.mark.parametrize("kind", ["loreft", "consreft"])
def test_the_part_of_the_state_outside_the_subspace_is_untouched(kind: str) -> None:
    module, hidden = intervention(kind), random_64(5, 12, seed=1)
    edited = hidden + module.delta(hidden, "linear", 0.0)
    outside = torch.eye(12, dtype=torch.float64) - module.rotation @ module.rotation.T
    assert_close(edited @ outside, hidden @ outside)
    inside = hidden @ module.weight.T + module.bias if kind == "loreft" else module.constant.expand(5, -1)
    assert_close(edited @ module.rotation, inside)


@EVERY_KIND
def test_dropout_acts_on_the_whole_edited_state(kind: str) -> None:
    """As in pyreft: every value of an edited state is either dropped or scaled, the edit or not."""
    module, hidden = intervention(kind).train(), random_64(400, 12, seed=1)
    full = hidden + module.delta(hidden, "linear", 0.0)
    torch.manual_seed(0)
    dropped = hidden + module.delta(hidden, "linear", 0.25)
    zero = dropped.abs() < 1e-12
    torch.testing.assert_close(dropped[~zero], full[~zero] / 0.75, rtol=1e-9, atol=1e-12)
    assert abs(float(zero.double().mean()) - 0.25) < 0.03
    torch.testing.assert_close(hidden + module.eval().delta(hidden, "linear", 0.25), full)


@EVERY_KIND
def test_states_of_half_precision_are_edited_in_fp32(kind: str) -> None:
    """A rank-r product rounded to 8 bits of mantissa would be another formula."""
    module = Intervention(kind, 12, 3, torch.Generator().manual_seed(3))
    hidden = random_64(5, 12, seed=1).to(torch.bfloat16)
    found = module.delta(hidden, "linear", 0.0)
    assert found.dtype == torch.float32
    assert torch.equal(found, module.delta(hidden.float(), "linear", 0.0))


@pytest.mark.parametrize("tied", [True, False])
@EVERY_KIND
def test_a_block_edits_its_output_by_the_formula(kind: str, tied: bool) -> None:
    """End to end in float64: f2+l3 on prompts of 10 and 5 tokens, one intervention or two."""
    model: Any = tiny_model("llama").double()
    settings = {"rank": 4, "layers": [1], "position": "f2+l3", "tied": tied}
    attached = attach(kind, model, settings, seed=0)
    assert isinstance(attached, AttachedReft)
    model.double()
    seen = outputs_of_block_1(model)
    tokens = torch.randint(3, 300, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), attached.edits(torch.tensor([10, 5])):
        model(input_ids=tokens, use_cache=False)
        with attached.disabled():
            model(input_ids=tokens, use_cache=False)
    expected = seen[1].clone()
    parts = attached.interventions()
    for row, first, last in ((0, [0, 1], [7, 8, 9]), (1, [0, 1], [3, 4])):
        for column in first + last:
            name = "both" if tied else "first" if column in first else "last"
            module = parts[f"1.block_output.{name}"]
            expected[row, column] = explicit(seen[1][row, column], module, "linear").detach()
    assert_close(seen[0], expected)
    assert not torch.equal(seen[0], seen[1])


@EVERY_KIND
def test_the_strength_scales_what_is_added(kind: str) -> None:
    """One factor for all prompts or one for each; 0 is the base model."""
    model: Any = tiny_model("llama").double()
    attached = attach(kind, model, {"rank": 4, "layers": [1], "position": "f2+l2"}, seed=0)
    model.double()
    seen = outputs_of_block_1(model)
    tokens = torch.randint(3, 300, (2, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for strength in (0.0, 1.0, 0.5, torch.tensor([2.0, 0.0])):
            with attached.edits(torch.tensor([6, 8]), strength=strength):
                model(input_ids=tokens, use_cache=False)
    base, full, half, each = seen
    assert float((full - base).abs().max()) > 1e-3
    assert_close(half - base, 0.5 * (full - base))
    assert_close(each - base, torch.stack([2.0 * (full - base)[0], torch.zeros_like(base[1])]))


@EVERY_KIND
def test_a_fresh_intervention_starts_as_pyrefts(kind: str) -> None:
    """An orthonormal frame, default linear layers, constants uniform in [0, 1)."""
    module = Intervention(kind, 256, 8, torch.Generator().manual_seed(0), kind == "noreft")
    reference = nn.Linear(256, 8)
    parameters = dict(module.named_parameters())
    expected = {"rotation"} if kind in ORTHONORMAL else {"projection"}
    expected |= {"constant"} if kind in CONSTANT else {"weight", "bias"}
    expected |= {"projection_bias"} if kind == "noreft" else set()
    assert parameters.keys() == expected
    assert module.rank == 8
    for name in expected & {"projection", "weight"}:
        assert parameters[name].shape == reference.weight.shape
        assert abs(float((parameters[name].std() / reference.weight.std()).detach()) - 1) < 0.1
    for name in expected & {"projection", "weight", "bias", "projection_bias"}:
        assert float(parameters[name].detach().abs().max()) <= 256**-0.5
    if kind in CONSTANT:
        many = Intervention(kind, 600, 500, torch.Generator().manual_seed(0)).constant.detach()
        assert float(many.min()) >= 0.0
        assert float(many.max()) < 1.0
        assert abs(float(many.mean()) - 0.5) < 0.05


def test_prompts_that_do_not_fit_the_input_are_refused() -> None:
    """Wrong lengths silently left the prompts unedited."""
    model = tiny_model()
    attached = attach("loreft", model, {"rank": 2, "position": "f2+l2"}, seed=0)
    with attached.edits(torch.tensor([9])), pytest.raises(ModelError, match="6 tokens wide"):
        model(torch.randint(3, 300, (1, 6)))
