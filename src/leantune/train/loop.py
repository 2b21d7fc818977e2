"""The training loop, from the first step to the last.

One step: the window's micro-batches go forward and backward on the ranks they were dealt to;
every loss is divided by the units of the whole window on all ranks (supervised tokens, or what
the objective counts), so the sum of all gradients is the gradient of the mean loss however the
window was split; one summation over the ranks; one optimizer step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from leantune.data.batches import MicroBatch, Window, deal
from leantune.errors import NumericsError
from leantune.strategies.process import gather_objects
from leantune.train.agreement import check_drift, drift_terms
from leantune.train.optimizer import set_learning_rate
from leantune.train.run import Run, TrainState
from leantune.train.validation import mean_loss

Ending = Literal["finished", "early_stop", "interrupted"]
_SCALE_PATIENCE = 2000  # steps
_SMALLEST_SCALE = 2.0**-14


def train_loop(run: Run, state: TrainState) -> Ending:
    """Train from `state.step` to the end of the run, or to where it is told to stop."""
    run.model.train()
    if _out_of_patience(run, state):  # a run that had stopped early and was resumed
        return "early_stop"
    while state.step < run.plan.total_steps:
        stop_requested = train_step(run, state)
        done = state.step
        improved = evaluate(run, state) if _evaluation_due(run, done) else False
        early = _out_of_patience(run, state)
        ending = stop_requested or early or done == run.plan.total_steps
        if ending or improved or _checkpoint_due(run, done):
            run.save_checkpoint(state, improved)
        if early:
            return "early_stop"
        if stop_requested and done < run.plan.total_steps:
            return "interrupted"
    return "finished"


def train_step(run: Run, state: TrainState) -> bool:
    """One optimizer step on one window. Returns whether any rank was asked to stop."""
    started = time.perf_counter()
    window = run.window(state.step)
    rate = run.schedule(state.step)
    set_learning_rate(run.optimizer, rate)

    losses = _accumulate(run, state, window)
    sums = torch.tensor([0.0, float(run.stop.requested)], device=run.world.device)
    sums[0] = sum((loss for _, loss in losses), start=sums[0])
    replicated = run.placement.replicated() if run.world.size > 1 else []
    if replicated:  # in the same sum: are they still equal on all ranks?
        sums = torch.cat([sums, drift_terms(replicated).to(sums.device)])
    gradients = run.placement.sum_gradients(sums)
    if replicated:
        check_drift(sums[2:], run.world.size, state.step + 1)
    if run.settings.precision.scaled:
        for gradient in gradients:
            gradient.mul_(1.0 / state.loss_scale)
    loss = float(sums[0]) / run.objective.units(window)
    run.attached.before_step()
    norm = run.placement.total_norm()
    # A loss that is not finite itself is no matter of the scale, which it is multiplied by afterwards.
    overflow = run.settings.precision.scaled and math.isfinite(loss) and not math.isfinite(norm)
    if not overflow:
        _check_finite(run, loss, float(norm), losses, window, state.step)
        if run.settings.max_grad_norm is not None:
            nn.utils.clip_grads_with_norm_(run.placement.trained.values(), run.settings.max_grad_norm, norm)
        run.optimizer.step()
        run.attached.after_step()
    run.optimizer.zero_grad(set_to_none=True)
    _report_step(run, state, window, loss, rate, float(norm), time.perf_counter() - started)
    if run.settings.precision.scaled:
        adapt_loss_scale(state, overflow)
    return bool(sums[1] > 0)


def _accumulate(run: Run, state: TrainState, window: Window) -> list[tuple[MicroBatch, Tensor]]:
    """Forward and backward of this rank's micro-batches; returns them with the sums of their losses."""
    mine: list[int | None] = [*deal(len(window.chunks), run.world.rank, run.world.size)]
    if run.placement.equal_passes:
        mine += [None] * (math.ceil(len(window.chunks) / run.world.size) - len(mine))
    losses: list[tuple[MicroBatch, Tensor]] = []
    scale = state.loss_scale if run.settings.precision.scaled else 1.0
    weight = scale / run.objective.units(window)
    for number, index in enumerate(mine, 1):
        run.placement.begin_pass(last=number == len(mine))
        if index is None:  # the others still gather and sum weights, and this rank has its part in that
            _forward_backward(run, run.idle_batch(window), 0.0)
        else:
            batch = run.micro_batch(window, index, state.step)
            losses.append((batch, _forward_backward(run, batch, weight)))
    return losses


def _forward_backward(run: Run, batch: MicroBatch, weight: float) -> Tensor:
    """Gradients of `weight` times the loss of a micro-batch; returns the sum of its losses."""
    torch.manual_seed(batch.seed)  # dropout: the same wherever this micro-batch runs
    passes = run.prefix.training(batch)
    with passes, run.objective.sums(run.attached, batch, run.settings.precision) as sums:
        (sums.loss * weight).backward()
    return sums.loss.detach()


def adapt_loss_scale(state: TrainState, overflow: bool) -> None:
    """Halve the scale of fp16 losses after an overflow, double it after 2000 steps without one.

    As in mixed precision training (arXiv 1710.03740, section 3.2). The norm that tells of an overflow is
    that of all gradients on all ranks, so every rank comes to the same scale. Raises `NumericsError` if the
    scale has shrunk to nothing.
    """
    state.steps_at_scale = 0 if overflow else state.steps_at_scale + 1
    if overflow:
        state.loss_scale /= 2.0
    elif state.steps_at_scale == _SCALE_PATIENCE:
        state.loss_scale *= 2.0
        state.steps_at_scale = 0
    if state.loss_scale < _SMALLEST_SCALE:
        raise NumericsError(
            f"step {state.step}: gradients overflow fp16 at every loss scale down to {state.loss_scale}; "
            "lower train.learning_rate, or use train.precision bf16_mixed or fp32"
        )


def _check_finite(
    run: Run, loss: float, norm: float, losses: list[tuple[MicroBatch, Tensor]], window: Window, step: int
) -> None:
    """Raise the same `NumericsError` on every rank if the loss or the gradient is not finite."""
    if math.isfinite(loss) and math.isfinite(norm):
        return
    mine = [i for batch, value in losses if not bool(torch.isfinite(value)) for i in batch.sample_ids]
    culprits: dict[int | None, list[int]] = {
        rank: ids for rank, ids in enumerate(gather_objects(mine)) if ids
    }
    what = "loss" if not math.isfinite(loss) else "gradient norm"
    if not culprits:  # every loss is finite: the fault lies in backward, somewhere in the window
        culprits = {None: [int(run.train_records.sample_ids[i]) for chunk in window.chunks for i in chunk]}
    raise NumericsError(
        f"step {step + 1}: the {what} is {loss if what == 'loss' else norm}; records of the micro-batches "
        f"concerned (counted from 0): {_listed(culprits, run.world.size)}. Nothing was updated in this step. "
        "Lower train.learning_rate, set train.max_grad_norm, or look at these records"
    )


def _listed(culprits: Mapping[int | None, list[int]], world_size: int) -> str:
    """Sample ids, with the rank that computed them where there are several."""
    parts: list[str] = []
    for rank, ids in culprits.items():
        where = "" if rank is None or world_size == 1 else f" (on rank {rank})"
        parts.append(", ".join(map(str, sorted(ids))) + where)
    return "; ".join(parts)


def _report_step(
    run: Run, state: TrainState, window: Window, loss: float, rate: float, norm: float, seconds: float
) -> None:
    state.step += 1
    state.tokens += window.total_tokens
    state.seconds += seconds
    state.last_loss = loss
    state.first_loss = loss if state.first_loss is None else state.first_loss
    run.events.step(
        {
            "step": state.step,
            "epoch": state.step / run.plan.steps_per_epoch,
            "loss": loss,
            "learning_rate": rate,
            "grad_norm": norm,
            run.objective.unit: run.objective.units(window),
            "total_tokens": window.total_tokens,
            "tokens_per_second": window.total_tokens / seconds,
            "padding_share": window.padding_share,
            "peak_memory_gib": run.peak_memory_gib(),
            "seconds": state.seconds,
            **({"loss_scale": state.loss_scale} if run.settings.precision.scaled else {}),
        }
    )


def evaluate(run: Run, state: TrainState) -> bool:
    """Measure the validation loss; returns whether it is the best so far and to be kept as that.

    Raises the same `NumericsError` on every rank if the loss is not finite.
    """
    assert run.validation_records is not None
    means = mean_loss(
        run.attached,
        run.objective,
        run.validation_records,
        device=run.world.device,
        micro_batch_size=run.settings.eval_micro_batch_size,
        pad_id=run.pad_id,
        precision=run.settings.precision,
        rank=run.world.rank,
        world_size=run.world.size,
        placement=run.placement,
        passes=run.prefix.validation,
    )
    loss = means.loss
    if not math.isfinite(loss):
        raise NumericsError(
            f"step {state.step}: the validation loss is {loss}; lower train.learning_rate, set "
            "train.max_grad_norm, or look at the validation records"
        )
    run.events.evaluation(
        {
            "step": state.step,
            "epoch": state.step / run.plan.steps_per_epoch,
            "eval_loss": loss,
            **{f"eval_{name}": value for name, value in means.measures.items()},
            f"eval_{run.objective.unit.removeprefix('supervised_')}": means.units,
        }
    )
    state.last_eval_loss = loss
    improved = state.best_loss is None or loss < state.best_loss - run.settings.min_delta
    if improved:
        state.best_loss, state.best_step, state.stale_evaluations = loss, state.step, 0
    else:
        state.stale_evaluations += 1
    return improved and run.settings.keep_best


def _evaluation_due(run: Run, done: int) -> bool:
    if run.validation_records is None:
        return False
    if done == run.plan.total_steps or run.settings.eval_every_steps is None:
        return run.plan.ends_epoch(done)
    return done % run.settings.eval_every_steps == 0


def _checkpoint_due(run: Run, done: int) -> bool:
    if run.settings.checkpoint_every_steps is None:
        return run.plan.ends_epoch(done)
    return done % run.settings.checkpoint_every_steps == 0


def _out_of_patience(run: Run, state: TrainState) -> bool:
    return run.settings.patience is not None and state.stale_evaluations >= run.settings.patience
