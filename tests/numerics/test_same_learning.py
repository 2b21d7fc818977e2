"""LoReFT learns what a plain loop over torch's orthogonal parametrisation learns, from the same start."""

from __future__ import annotations

import json
import random
import statistics
from typing import Any

import pytest
import torch

from leantune.config.schema import DataSection
from leantune.data.batches import MicroBatch, collate, epoch_windows
from leantune.data.prepare import prepare_data
from leantune.methods import attach
from leantune.models.precision import PRECISIONS
from leantune.ops.intervention import tangent
from leantune.train.forward import summed_loss
from leantune.train.optimizer import build_optimizer, build_schedule, set_learning_rate
from tests.batches import lively
from tests.fixtures import tiny_llama, tiny_tokenizer
from tests.reference_reft import ReferenceModel, learn_reference, reference_loss, reference_of

UNTIED_AND_TIED = pytest.mark.parametrize("tied", [False, True])
SEEDS = range(5)
PLACES = ["Paris", "Rome", "Oslo", "Lima"]


@pytest.fixture(scope="module")
def epochs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[MicroBatch]]:
    """Records of Alpaca's shape in batches of 4, in another order for each seed."""
    draw = random.Random(0)
    records = [
        {
            "instruction": f"Name the capital of land {draw.randrange(9)}",
            "input": "in words" if draw.random() < 0.35 else "",
            "output": " ".join(draw.choices(PLACES, k=draw.randint(1, 5))),
        }
        for _ in range(48)
    ]
    path = tmp_path_factory.mktemp("records") / "records.json"
    path.write_text(json.dumps(records))
    section = DataSection(train=str(path), template="alpaca", max_length=256, cache=False)
    encoded = prepare_data(section, tiny_tokenizer(), 0).train
    return {
        seed: [collate(encoded, window, 4) for window in epoch_windows(encoded.lengths, 4, seed, 0, True)]
        for seed in SEEDS
    }


def both(tied: bool, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Any, ReferenceModel]:
    """LoReFT with f1+l1 on layers 0 and 1, and the reference with the same values."""
    settings = {"rank": 4, "layers": "0;1", "position": "f1+l1", "tied": tied}
    attached: Any = attach("loreft", frozen(seed), settings, seed)
    attached.model.to(dtype)
    attached.after_step()  # orthonormal in this dtype
    return attached, reference_of(attached, frozen(seed).to(dtype), first=1, last=1)


def frozen(seed: int) -> Any:
    return lively(tiny_llama(seed=seed).requires_grad_(False))


def loss_of(attached: Any, batch: MicroBatch) -> torch.Tensor:
    with attached.edits(batch.prompt_lengths, **batch.edit_options):
        return summed_loss(attached.model, batch, PRECISIONS["fp32"]) / len(batch.labels)


def learn(attached: Any, batches: list[MicroBatch], rates: list[float]) -> list[float]:
    """The steps of the training loop: tangent, AdamW, orthonormal again."""
    attached.model.train()
    options: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "momentum": 0.0, "rho": 0.9}
    optimizer = build_optimizer(
        attached.trainable(),
        attached.decay_free(),
        name="adamw",
        learning_rate=0.0,
        weight_decay=0.0,
        **options,
    )
    losses: list[float] = []
    for batch, rate in zip(batches, rates, strict=True):
        set_learning_rate(optimizer, rate)
        loss = loss_of(attached, batch)
        loss.backward()
        attached.before_step()
        optimizer.step()
        attached.after_step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@UNTIED_AND_TIED
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_loss_of_the_first_step_is_that_of_the_reference(
    tied: bool, dtype: torch.dtype, epochs: dict[int, list[MicroBatch]]
) -> None:
    for seed in SEEDS:
        attached, reference = both(tied, seed, dtype)
        batch = epochs[seed][0]
        mine, theirs = loss_of(attached, batch).item(), reference_loss(reference, batch).item()
        assert mine == pytest.approx(theirs, abs=1e-6)
        with attached.disabled():
            assert abs(loss_of(attached, batch).item() - theirs) > 1e-4, "the edits changed nothing"


@UNTIED_AND_TIED
def test_the_gradients_are_those_of_the_reference(tied: bool, epochs: dict[int, list[MicroBatch]]) -> None:
    """With respect to R itself, and on the manifold: the reference's optimizer sees other coordinates."""
    attached, reference = both(tied, dtype=torch.float64)
    batch = epochs[0][0]
    loss_of(attached, batch).backward()
    reference_loss(reference, batch).backward()
    ambient = {name: m.rotation.grad.clone() for name, m in attached.interventions().items()}
    attached.before_step()
    for (layer, part), theirs in reference.parts.items():
        name = f"{layer}.block_output.{part}"
        mine, gradient = attached.interventions()[name], theirs.frame_gradient()
        scale = float(gradient.abs().max())
        assert scale > 1e-5
        for found, expected in (
            (ambient[name], gradient),
            (mine.rotation.grad, tangent(gradient, mine.rotation.detach())),
            (mine.weight.grad, theirs.source.weight.grad),
            (mine.bias.grad, theirs.source.bias.grad),
        ):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * scale)


def test_a_step_moves_the_frame_as_far_as_the_references(epochs: dict[int, list[MicroBatch]]) -> None:
    """It moved half as far with the same learning rate, so that a recipe of pyreft learned less."""
    attached, reference = both(tied=False, dtype=torch.float64)
    before = {name: m.rotation.detach().clone() for name, m in attached.interventions().items()}
    learn(attached, epochs[0][:1], [1e-4])
    learn_reference(reference, epochs[0][:1], [1e-4])
    for (layer, part), theirs in reference.parts.items():
        name = f"{layer}.block_output.{part}"
        mine = attached.interventions()[name].rotation.detach() - before[name]
        expected = theirs.frame.weight.detach() - before[name]
        assert float(mine.norm()) == pytest.approx(float(expected.norm()), rel=0.1)
        assert float((mine * expected).sum()) > 0.5 * float(expected.norm()) ** 2


@UNTIED_AND_TIED
def test_an_epoch_ends_at_the_loss_of_the_reference(tied: bool, epochs: dict[int, list[MicroBatch]]) -> None:
    """Curves are not equal, because AdamW sees R in other coordinates there. Over 5 seeds the mean difference
    must be small against the spread of the seeds, and against what an epoch learns."""
    steps = len(epochs[0])
    rate = build_schedule("cosine", 3e-3, steps, warmup_steps=1, floor=0.0)
    rates = [rate(step) for step in range(steps)]
    untrained: list[float] = []
    mine: list[float] = []
    theirs: list[float] = []
    for seed in SEEDS:
        attached, reference = both(tied, seed)
        with torch.no_grad():
            untrained.append(statistics.mean(loss_of(attached, batch).item() for batch in epochs[seed]))
        learn(attached, epochs[seed], rates)
        learn_reference(reference, epochs[seed], rates)
        with torch.no_grad():
            mine.append(statistics.mean(loss_of(attached, batch).item() for batch in epochs[seed]))
            theirs.append(statistics.mean(reference_loss(reference, batch).item() for batch in epochs[seed]))
    difference = statistics.mean(mine) - statistics.mean(theirs)
    learned = statistics.mean(untrained) - statistics.mean(theirs)
    assert learned > 0.03
    assert abs(difference) < 0.1 * statistics.stdev(theirs)
    assert abs(difference) < 0.1 * learned
