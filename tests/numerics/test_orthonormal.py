"""The orthonormal factor of an intervention: how it is kept so, through training, checkpoints and disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from leantune.checkpoint.adapter import load_adapter, save_trained
from leantune.checkpoint.store import CheckpointStore
from leantune.methods import attach
from leantune.methods.interventions import Intervention
from leantune.ops import intervention
from leantune.ops.intervention import KINDS, ORTHONORMAL, orthonormalise, retract, tangent
from leantune.strategies.placement import Placement
from leantune.train.optimizer import build_optimizer
from leantune.train.run import TrainState
from leantune.train.saving import RunCheckpoints
from leantune.train.steps import StepPlan
from tests.batches import gradients, shake, small_batch
from tests.fixtures import tiny_tokenizer
from tests.models import tiny_model

EVERY_ORTHONORMAL = pytest.mark.parametrize("kind", sorted(ORTHONORMAL))
# Two shapes of factors, one of them at two places.
GROUPS: list[dict[str, Any]] = [
    {"layers": "0;2", "rank": 4, "position": "f2+l2", "tied": True},
    {"layers": "1", "rank": 2, "position": "f1+l1", "tied": False},
]


def random_64(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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


def test_a_retraction_goes_twice_as_far_as_the_step() -> None:
    frame, gradient = orthonormalise(random_64(40, 5)), random_64(40, 5, seed=1)
    along = tangent(gradient, frame)
    for step in (1e-2, 1e-3):
        moved = retract(frame, frame - step * along)
        assert gram_error(moved) < 1e-12
        error = float((moved - (frame - 2 * step * along)).norm())
        assert error < 4 * step**2 * float(along.norm()) ** 2


def test_a_stack_of_frames_is_worked_on_as_each_alone() -> None:
    frames = torch.stack([random_64(20, 3, seed=seed) for seed in range(4)])
    steps = torch.stack([random_64(20, 3, seed=seed) for seed in range(4, 8)])
    together, along = orthonormalise(frames), tangent(steps, frames)
    for index in range(4):
        torch.testing.assert_close(together[index], orthonormalise(frames[index]))
        torch.testing.assert_close(along[index], tangent(steps[index], frames[index]))


class _Watch(TorchDispatchMode):
    """The largest tensor that anything computes, in bytes, and the names of the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.add(func.__name__)
        sizes = [t.untyped_storage().nbytes() for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return out


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_hidden_size_costs_no_square_of_it(kind: str) -> None:
    """The usual parametrisation keeps a d × d buffer: 1.6 GB and seconds of backward at this size."""
    dim, rank = 20_000, 8
    with _Watch() as watch:
        module = Intervention(kind, dim, rank, torch.Generator().manual_seed(0))
        module.delta(torch.randn(4, dim), "linear", 0.0).square().sum().backward()
        if kind in ORTHONORMAL:
            assert module.rotation.grad is not None
            step = tangent(module.rotation.grad, module.rotation)
            assert gram_error(orthonormalise(module.rotation - 1e-3 * step)) < 1e-6
    assert watch.largest == dim * rank * (8 if kind in ORTHONORMAL else 4)  # float64 is for the frames
    constant = kind in {"consreft", "lobireft"}
    assert sum(p.numel() for p in module.parameters()) == (1 if constant else 2) * dim * rank + rank


class _Training:
    """A run as the loop takes its steps: AdamW with decay, two micro-batches a step, checkpoints."""

    def __init__(self, attached: Any, folder: Path) -> None:
        self.attached = attached
        self.step = 0
        placement = Placement(torch.device("cpu"))
        placement.take(attached.trainable())
        self.optimizer = build_optimizer(
            placement.trained,
            attached.decay_free(),
            name="adamw",
            learning_rate=1e-2,
            betas=(0.9, 0.999),
            eps=1e-8,
            weight_decay=0.1,
            momentum=0.0,
            rho=0.9,
        )
        plan = StepPlan(6, 6, 3, 1, 50, 0)
        self.checkpoints = RunCheckpoints(
            CheckpointStore(folder, keep=1),
            placement,
            self.optimizer,
            plan,
            saves=True,
            writes=True,
            keeps_best=False,
            say=lambda _line: None,
        )

    def run(self, steps: int, after_each: Callable[[], None] = lambda: None) -> None:
        for _ in range(steps):
            first = gradients(self.attached, small_batch(seed=2 * self.step))
            gradients(self.attached, small_batch(seed=2 * self.step + 1))
            for name, parameter in self.attached.trainable().items():
                if parameter.grad is not None:
                    parameter.grad += first[name]
            self.attached.before_step()
            self.optimizer.step()
            self.attached.after_step()
            self.step += 1
            after_each()

    def save(self) -> None:
        self.checkpoints.save(TrainState(step=self.step), False)

    def restore(self) -> None:
        state = TrainState()
        assert self.checkpoints.restore(state) is not None
        self.step = state.step

    def assert_orthonormal(self) -> None:
        frames = rotations(self.attached)
        assert len(frames) == 4
        for frame in frames.values():
            assert gram_error(frame) < 1e-6


def rotations(attached: Any) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in attached.trainable().items() if n.endswith(".rotation")}


def fresh(kind: str, seed: int = 0) -> Any:
    return attach(kind, tiny_model("llama"), {"interventions": GROUPS, "dropout": 0.05}, seed=seed)


@EVERY_ORTHONORMAL
def test_the_columns_stay_orthonormal_through_training_resume_and_reload(kind: str, tmp_path: Path) -> None:
    """Weight decay on the usual parametrisation drives R to zero after one step. Here: ranks 4 and 2 in one
    run, a resumed run that goes on as the one that was not stopped, and training after a reload."""
    whole = _Training(fresh(kind), tmp_path / "whole")
    before = {name: frame.clone() for name, frame in rotations(whole.attached).items()}
    assert {tuple(frame.shape) for frame in before.values()} == {(32, 4), (32, 2)}
    whole.assert_orthonormal()
    whole.run(20, whole.assert_orthonormal)
    whole.save()
    whole.run(10)
    for name, frame in rotations(whole.attached).items():
        assert float((frame - before[name]).abs().max()) > 1e-2

    resumed = _Training(fresh(kind, seed=1), tmp_path / "whole")
    resumed.restore()
    resumed.assert_orthonormal()
    resumed.run(10, resumed.assert_orthonormal)
    for name, frame in rotations(whole.attached).items():
        assert torch.equal(frame, rotations(resumed.attached)[name])

    save_trained(resumed.attached, tmp_path / "adapter", tiny_tokenizer(vocab_size=300), "base", None)
    reloaded = _Training(load_adapter(tiny_model("llama"), tmp_path / "adapter"), tmp_path / "reloaded")
    for name, parameter in reloaded.attached.trainable().items():
        assert torch.equal(parameter, resumed.attached.trainable()[name])
    reloaded.assert_orthonormal()
    reloaded.run(10, reloaded.assert_orthonormal)
    for name, frame in rotations(resumed.attached).items():
        assert not torch.equal(frame, rotations(reloaded.attached)[name])


@pytest.mark.parametrize("kind", KINDS)
def test_decay_spares_exactly_the_orthonormal_factors_and_the_vectors(kind: str) -> None:
    attached = fresh(kind)
    spared = attached.decay_free()
    decayed = {name.rpartition(".")[2] for name in attached.trainable() if name not in spared}
    free_factor = set() if kind in ORTHONORMAL else {"projection"}
    source = set() if kind in {"consreft", "lobireft"} else {"weight"}
    assert decayed == free_factor | source
    assert {name.rpartition(".")[2] for name in spared} <= {"rotation", "bias", "constant"}


@EVERY_ORTHONORMAL
def test_decay_leaves_the_factor_alone_and_shrinks_the_weight(kind: str) -> None:
    """Without gradients decay is all that moves a parameter."""
    attached: Any = fresh(kind)
    before = {name: p.detach().clone() for name, p in attached.trainable().items()}
    training = _Training(attached, Path("unused"))
    for parameter in attached.trainable().values():
        parameter.grad = torch.zeros_like(parameter)
    attached.before_step()
    training.optimizer.step()
    attached.after_step()
    for name, parameter in attached.trainable().items():
        kept = 1.0 if name in attached.decay_free() else 1.0 - 1e-2 * 0.1
        torch.testing.assert_close(parameter.detach(), kept * before[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_frames_are_made_orthonormal_once_a_step_and_never_in_a_forward_pass(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The usual parametrisation does it at every use: twice a forward pass and again in backward."""
    calls: list[tuple[int, ...]] = []

    def counted(matrix: Tensor) -> Tensor:
        calls.append(tuple(matrix.shape))
        return orthonormalise(matrix)  # the one that was imported above

    training = _Training(fresh(kind), tmp_path)
    monkeypatch.setattr(intervention, "orthonormalise", counted)
    training.run(3)
    each_step = [(2, 32, 2), (2, 32, 4)] if kind in ORTHONORMAL else []  # frames of one shape together
    assert sorted(calls) == sorted(3 * each_step)
    with _Watch() as watch:
        gradients(training.attached, small_batch())
    assert len(calls) == 3 * len(each_step)
    assert not [name for name in watch.names if name.startswith(("linalg", "qr", "geqrf", "cholesky"))]


@EVERY_ORTHONORMAL
def test_the_optimizer_sees_a_gradient_without_radial_part(kind: str) -> None:
    attached: Any = fresh(kind)
    shake(attached)
    gradients(attached, small_batch())
    attached.before_step()
    for module in attached.interventions().values():
        radial = module.rotation.detach().T @ module.rotation.grad
        assert float((radial + radial.T).abs().max()) < 1e-4 * float(module.rotation.grad.abs().max())


def test_a_step_without_any_edit_leaves_the_frames_as_they_are(tmp_path: Path) -> None:
    """A micro-batch of prompts too short for any position gives no gradient, which is no error."""
    attached: Any = fresh("loreft")
    before = {name: frame.clone() for name, frame in rotations(attached).items()}
    attached.before_step()
    attached.after_step()
    for name, frame in rotations(attached).items():
        torch.testing.assert_close(frame, before[name], rtol=0, atol=1e-6)
