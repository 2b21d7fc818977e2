"""LoReFT against its formula in float64, and its orthonormal factor through training and disk."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leantune.checkpoint.adapter import load_adapter, save_trained
from leantune.errors import ModelError
from leantune.methods import attach
from leantune.methods.loreft import AttachedLoreft, LoreftIntervention
from leantune.models.anatomy import decoder_blocks
from leantune.ops.intervention import ACTIVATIONS, loreft_delta, orthonormalise, tangent
from leantune.train.optimizer import build_optimizer
from tests.batches import gradients, shake, small_batch
from tests.fixtures import tiny_tokenizer
from tests.models import tiny_model

EXPLICIT = {
    "linear": lambda x: x,
    "relu": lambda x: x.clamp(min=0),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "tanh": lambda x: (torch.exp(x) - torch.exp(-x)) / (torch.exp(x) + torch.exp(-x)),
}


def random_64(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def intervention(dim: int = 12, rank: int = 3) -> LoreftIntervention:
    module = LoreftIntervention(dim, rank, torch.Generator().manual_seed(3)).double()
    with torch.no_grad():
        module.rotation.copy_(orthonormalise(random_64(dim, rank)))
    return module


def explicit(h: Tensor, module: LoreftIntervention, activation: str) -> Tensor:
    """h + R (act(W h + b) - Rᵀ h) of one hidden state, written out with dense matrices."""
    R, W, b = module.rotation, module.weight, module.bias
    return h + R @ (EXPLICIT[activation](W @ h + b) - R.T @ h)


def test_all_activations_are_checked() -> None:
    assert set(EXPLICIT) == set(ACTIVATIONS)


@pytest.mark.parametrize("activation", list(EXPLICIT))
def test_the_edit_is_the_papers_formula(activation: str) -> None:
    module, hidden = intervention(), random_64(5, 12, seed=1)
    delta = loreft_delta(hidden, module.rotation, module.weight, module.bias, activation)
    expected = torch.stack([explicit(h, module, activation) for h in hidden])
    torch.testing.assert_close(hidden + delta, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(module.delta(hidden, activation, 0.0), delta, rtol=0, atol=0)


@pytest.mark.parametrize("activation", list(EXPLICIT))
def test_the_gradient_is_that_of_the_formula(activation: str) -> None:
    module, hidden = intervention(dim=6, rank=2), random_64(3, 6, seed=1).requires_grad_()
    parts = (module.rotation, module.weight, module.bias)
    assert torch.autograd.gradcheck(lambda h, r, w, b: loreft_delta(h, r, w, b, activation), (hidden, *parts))


def test_the_part_of_the_state_outside_the_subspace_is_untouched() -> None:
    module, hidden = intervention(), random_64(5, 12, seed=1)
    edited = hidden + module.delta(hidden, "linear", 0.0)
    outside = torch.eye(12, dtype=torch.float64) - module.rotation @ module.rotation.T
    torch.testing.assert_close(edited @ outside, hidden @ outside, rtol=1e-12, atol=1e-12)
    inside = hidden @ module.weight.T + module.bias
    torch.testing.assert_close(edited @ module.rotation, inside, rtol=1e-12, atol=1e-12)


def test_dropout_acts_on_the_whole_edited_state() -> None:
    """As in pyreft: every value of an edited state is either dropped or scaled, the edit or not."""
    module, hidden = intervention().train(), random_64(400, 12, seed=1)
    full = hidden + module.delta(hidden, "linear", 0.0)
    torch.manual_seed(0)
    dropped = hidden + module.delta(hidden, "linear", 0.25)
    zero = dropped.abs() < 1e-12
    torch.testing.assert_close(dropped[~zero], full[~zero] / 0.75, rtol=1e-9, atol=1e-12)
    assert abs(float(zero.double().mean()) - 0.25) < 0.03
    torch.testing.assert_close(hidden + module.eval().delta(hidden, "linear", 0.25), full)


@pytest.mark.parametrize("tied", [True, False])
def test_a_block_edits_its_output_by_the_formula(tied: bool) -> None:
    """End to end in float64: f2+l3 on prompts of 10 and 5 tokens, one intervention or two."""
    model: Any = tiny_model("llama").double()
    attached = attach("loreft", model, {"rank": 4, "layers": [1], "position": "f2+l3", "tied": tied}, seed=0)
    assert isinstance(attached, AttachedLoreft)
    model.double()
    seen: list[Tensor] = []
    block = list(decoder_blocks(model).values())[1]
    handle = block.register_forward_hook(
        lambda _m, _a, out: seen.append(out if torch.is_tensor(out) else out[0])
    )
    tokens = torch.randint(3, 300, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), attached.edits(torch.tensor([10, 5])):
        model(input_ids=tokens, use_cache=False)
        with attached.disabled():
            model(input_ids=tokens, use_cache=False)
    handle.remove()
    parts = attached.interventions()
    expected = seen[1].clone()
    for row, first, last in ((0, [0, 1], [7, 8, 9]), (1, [0, 1], [3, 4])):
        for column in first + last:
            name = "1.both" if tied else "1.first" if column in first else "1.last"
            expected[row, column] = explicit(seen[1][row, column], parts[name], "linear").detach()
    torch.testing.assert_close(seen[0], expected, rtol=1e-12, atol=1e-12)


def gram_error(rotation: Tensor) -> float:
    """How far the columns are from orthonormal, measured in float64."""
    columns = rotation.detach().double()
    return float((columns.mT @ columns - torch.eye(columns.shape[-1], dtype=torch.float64)).abs().max())


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_orthonormalise_gives_orthonormal_columns_of_the_same_span(dtype: torch.dtype, scale: float) -> None:
    matrix = (scale * random_64(64, 8)).to(dtype)
    frame = orthonormalise(matrix)
    assert gram_error(frame) < 1e-6
    assert torch.allclose(frame @ (frame.T @ matrix), matrix, rtol=1e-4, atol=1e-4 * scale)
    assert torch.allclose(orthonormalise(frame), frame, atol=1e-6)


def test_orthonormalise_bears_nearly_dependent_columns() -> None:
    """One round of Cholesky QR would leave an error of the condition number squared."""
    matrix = random_64(64, 8).float()
    matrix[:, 7] = matrix[:, 6] + 1e-2 * matrix[:, 7]
    assert gram_error(orthonormalise(matrix)) < 1e-6


def test_dependent_columns_are_an_error_and_not_a_wrong_frame() -> None:
    with pytest.raises(RuntimeError, match="cholesky"):
        orthonormalise(torch.zeros(16, 2))


def test_the_tangent_has_no_radial_part_and_is_a_projection() -> None:
    frame, gradient = orthonormalise(random_64(40, 5)), random_64(40, 5, seed=1)
    projected = tangent(gradient, frame)
    radial = frame.T @ projected
    torch.testing.assert_close(radial + radial.T, torch.zeros_like(radial), rtol=0, atol=1e-12)
    torch.testing.assert_close(tangent(projected, frame), projected, rtol=1e-12, atol=1e-12)
    outside = torch.eye(40, dtype=torch.float64) - frame @ frame.T
    torch.testing.assert_close(outside @ projected, outside @ gradient, rtol=1e-12, atol=1e-12)


def test_a_small_step_along_the_tangent_changes_the_frame_only_in_second_order() -> None:
    frame, gradient = orthonormalise(random_64(40, 5)), random_64(40, 5, seed=1)
    along = tangent(gradient, frame)
    errors = [gram_error(frame - step * along) for step in (1e-3, 1e-4)]
    assert errors[1] < errors[0] / 50


def test_a_large_hidden_size_costs_no_square_of_it() -> None:
    """The usual parametrisation keeps a d × d buffer: 1.6 GB and seconds of backward at this size."""
    dim, rank = 20_000, 8
    started = time.perf_counter()
    with torch.device("cpu"):
        module = LoreftIntervention(dim, rank, torch.Generator().manual_seed(0))
    hidden = torch.randn(4, dim)
    module.delta(hidden, "linear", 0.0).square().sum().backward()
    assert module.rotation.grad is not None
    step = tangent(module.rotation.grad, module.rotation)
    frame = orthonormalise(module.rotation - 1e-3 * step)
    assert time.perf_counter() - started < 1.5
    assert gram_error(frame) < 1e-6
    assert sum(p.numel() for p in module.parameters()) == 2 * dim * rank + rank


def _train(attached: Any, steps: int) -> None:
    options: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "momentum": 0.0, "rho": 0.9}
    optimizer = build_optimizer(
        attached.trainable(),
        attached.decay_free(),
        name="adamw",
        learning_rate=1e-2,
        weight_decay=0.1,
        **options,
    )
    for step in range(steps):
        gradients(attached, small_batch(seed=step))
        attached.before_step()
        optimizer.step()
        attached.after_step()


def test_the_rotation_stays_orthonormal_through_training_with_decay_and_through_disk(tmp_path: Path) -> None:
    """Weight decay on the usual parametrisation drives R to zero after one step."""
    attached: Any = attach("loreft", tiny_model("llama"), {"rank": 4, "position": "f2+l2"}, seed=0)
    rotations = {n: p for n, p in attached.trainable().items() if n.endswith(".rotation")}
    assert set(rotations) <= attached.decay_free()
    before = {name: parameter.detach().clone() for name, parameter in rotations.items()}
    _train(attached, 50)
    for name, rotation in rotations.items():
        assert gram_error(rotation) < 1e-6
        assert float((rotation.detach() - before[name]).abs().max()) > 1e-2
    save_trained(attached, tmp_path / "a", tiny_tokenizer(vocab_size=300), "base", None)
    loaded: Any = load_adapter(tiny_model("llama"), tmp_path / "a")
    for name, rotation in loaded.trainable().items():
        assert torch.equal(rotation, attached.trainable()[name])
        assert not name.endswith(".rotation") or gram_error(rotation) < 1e-6


def test_decay_reaches_the_weights_that_are_not_orthonormal() -> None:
    attached = attach("loreft", tiny_model("llama"), {"rank": 4}, seed=0)
    spared = attached.decay_free()
    assert {name.rpartition(".")[2] for name in attached.trainable() if name not in spared} == {"weight"}


def test_the_optimizer_sees_a_gradient_without_radial_part() -> None:
    attached: Any = attach("loreft", tiny_model("llama"), {"rank": 4}, seed=0)
    shake(attached)
    gradients(attached, small_batch())
    attached.before_step()
    for module in attached.interventions().values():
        radial = module.rotation.detach().T @ module.rotation.grad
        assert float((radial + radial.T).abs().max()) < 1e-4 * float(module.rotation.grad.abs().max())


def test_a_fresh_intervention_starts_as_a_default_linear_layer_and_an_orthonormal_frame() -> None:
    module = LoreftIntervention(256, 8, torch.Generator().manual_seed(0))
    reference = nn.Linear(256, 8)
    assert gram_error(module.rotation) < 1e-6
    for mine, theirs in ((module.weight, reference.weight), (module.bias, reference.bias)):
        assert mine.shape == theirs.shape
        assert float(mine.detach().abs().max()) <= 256**-0.5
    assert abs(float((module.weight.std() / reference.weight.std()).detach()) - 1) < 0.1


def test_prompts_that_do_not_fit_the_input_are_refused() -> None:
    """Wrong lengths silently left the prompts unedited."""
    model = tiny_model()
    attached = attach("loreft", model, {"rank": 2, "position": "f2+l2"}, seed=0)
    with attached.edits(torch.tensor([9])), pytest.raises(ModelError, match="6 tokens wide"):
        model(torch.randint(3, 300, (1, 6)))
