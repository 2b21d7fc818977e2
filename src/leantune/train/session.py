"""A run from its configuration to its result: preparing it, starting the ranks, one rank's work."""

from __future__ import annotations

import signal
import tempfile
from contextlib import ExitStack
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from leantune.checkpoint.adapter import BaseOfModel, save_trained
from leantune.checkpoint.atomic import remove_folder
from leantune.checkpoint.run_folder import RunFolder
from leantune.config import RunConfig, load_config
from leantune.errors import CheckpointError
from leantune.models.packed import PackedLinear
from leantune.models.source import resolve_model
from leantune.models.vocabulary import load_vocabulary
from leantune.strategies.failure import in_worker, worker_errors
from leantune.strategies.launch import check_launch, launch
from leantune.strategies.process import World, barrier, gather_objects, join, leave, place_on_node
from leantune.strategies.stop import StopRequest
from leantune.train.agreement import check_agreement
from leantune.train.assemble import assemble, device_kind
from leantune.train.events import Events, Notify, memory_baseline
from leantune.train.loop import train_loop
from leantune.train.nodes import MakeFolder, node_folder, reopen, shared_with_node
from leantune.train.prefix_choice import open_prefix
from leantune.train.prepare import prepare_run
from leantune.train.relay import RELAY_FILE, row_receiver, row_sender
from leantune.train.result import RunResult, read_result, write_result
from leantune.train.run import Run, TrainState
from leantune.train.saving import RunCheckpoints


def start_run(
    config: RunConfig,
    name: str = "run",
    *,
    notify: Notify | None = None,
    quiet: bool = False,
    node_rank: int = 0,
    rdzv_endpoint: str | None = None,
) -> RunResult | None:
    """Train. Starts the workers itself, unless it is one of several processes that torchrun started.

    `notify` is called with each row of metrics, in one process only. `node_rank` and
    `rdzv_endpoint` are for runs on several machines. Returns None on machines other than the
    first. Raises SystemExit (130 or 143) if the run was interrupted.
    """

    def make(scratch: Path | None) -> RunFolder:
        return prepare_run(config, name, _silent if quiet or scratch else print, scratch)

    return _run(config, make, notify, quiet, node_rank, rdzv_endpoint, fresh=True)


def resume_run(
    folder: RunFolder,
    config: RunConfig,
    *,
    notify: Notify | None = None,
    quiet: bool = False,
    node_rank: int = 0,
    rdzv_endpoint: str | None = None,
) -> RunResult | None:
    """Continue an interrupted run from its newest complete checkpoint, on any number of devices.

    A run that has none yet starts at its beginning. The options are those of `start_run`; machines
    other than the first must see the folder too.
    """
    if not config.output.checkpoints:
        raise CheckpointError(
            f"{folder.path} was run with output.checkpoints=false, so there is nothing to continue from; "
            "train again with output.overwrite=true"
        )

    def make(scratch: Path | None) -> RunFolder:
        return reopen(folder, config, scratch)

    return _run(config, make, notify, quiet, node_rank, rdzv_endpoint, fresh=False)


def run_rank(folder: str, quiet: bool) -> None:
    """The work of one rank that `launch` started."""
    with worker_errors():
        run_folder = RunFolder.open(folder)
        config = load_config(run_folder.config)
        _work(config, run_folder, _join(config), row_sender(), quiet)


def _run(
    config: RunConfig,
    make: MakeFolder,
    notify: Notify | None,
    quiet: bool,
    node_rank: int,
    endpoint: str | None,
    *,
    fresh: bool,
) -> RunResult | None:
    if in_worker():
        return _run_under_torchrun(config, make, notify, quiet, fresh)
    devices = config.strategy.devices
    nodes = getattr(config.strategy, "nodes", 1)
    check_launch(devices // nodes, nodes, node_rank, endpoint)
    with node_folder(make, main=node_rank == 0, fresh=fresh) as folder:
        if devices == 1:
            return _work(load_config(folder.config), folder, _join(config), notify, quiet)
        with tempfile.TemporaryDirectory(prefix="leantune-rows-") as rows:
            relay = Path(rows) / "rows.jsonl"
            launch(
                ["rank", str(folder.path), *(["--quiet"] if quiet else [])],
                devices_per_node=devices // nodes,
                nodes=nodes,
                node_rank=node_rank,
                rdzv_endpoint=endpoint,
                env={RELAY_FILE: str(relay)} if notify else None,
                on_poll=row_receiver(relay, notify) if notify else None,
            )
        return read_result(folder) if node_rank == 0 else None


def _run_under_torchrun(
    config: RunConfig, make: MakeFolder, notify: Notify | None, quiet: bool, fresh: bool
) -> RunResult | None:
    """The work of one rank that somebody else started; the first one of each machine makes the folder."""
    with worker_errors(), ExitStack() as stack:
        node, local_rank = place_on_node()
        mine = None
        if local_rank == 0:
            mine = stack.enter_context(node_folder(make, main=node == 0, fresh=fresh))
        world = _join(config)
        folder = shared_with_node(node, mine)
        return _work(load_config(folder.config), folder, world, notify, quiet)


def _join(config: RunConfig) -> World:
    return join(device_kind(config), getattr(config.strategy, "timeout_seconds", 1800.0))


def _work(
    config: RunConfig, folder: RunFolder, world: World, notify: Notify | None, quiet: bool
) -> RunResult:
    memory_baseline()
    # Only now: until all ranks have met there is nothing to save, and a signal may end the process.
    with StopRequest() as stop:
        result = _train(config, folder, world, stop, notify, quiet)
        leave()
    if result is None:
        # Another rank may have been told to stop, on another machine.
        raise SystemExit(128 + (stop.signal or signal.SIGTERM))
    return result


def _train(
    config: RunConfig, folder: RunFolder, world: World, stop: StopRequest, notify: Notify | None, quiet: bool
) -> RunResult | None:
    source = resolve_model(config.model.name, config.model.revision, config.model.trust_remote_code)
    tokenizer, _ = load_vocabulary(source, config.model.tokenizer, config.model.add_tokens)
    events = Events(
        folder,
        main=world.is_main,
        quiet=quiet,
        trackers=config.output.trackers,
        project=config.output.project,
        notify=notify,
    )
    try:
        run, checkpoints = assemble(config, folder, world, tokenizer, events, stop)
        state = TrainState()
        checkpoint = checkpoints.restore(state)
        check_agreement(config, run, state.step)
        run.prefix, choice = open_prefix(run, config, folder)
        for line in [*_opening(run, state, checkpoint.path if checkpoint else None), choice]:
            events.message(line)
        if world.is_main:
            folder.truncate_metrics(state.step)
        events.begin(run.plan.total_steps, state.step)
        ending = train_loop(run, state)
        if ending == "interrupted":
            events.message(_interrupted(config, folder, state.step))
            return None
        return _finish(config, run, checkpoints, state, ending, folder, tokenizer)
    finally:
        events.close()


def _opening(run: Run, state: TrainState, checkpoint: Path | None) -> list[str]:
    trained, total = _counts(run)
    lines = [
        *run.description,
        f"trained parameters: {trained:,} of {total:,} ({100 * trained / total:.4f} %)",
    ]
    if run.settings.reshuffle == "windows":
        lines.append("epochs shuffle the order of the steps, whose records stay together (train.reshuffle)")
    if checkpoint is not None:
        lines.append(f"continuing after step {state.step} from {checkpoint}")
    return lines


def _counts(run: Run) -> tuple[int, int]:
    """(trained parameters, all parameters), in values of the unpacked model."""
    trained = sum(p.numel() for p in run.placement.whole_parameters.values())
    total = sum(p.numel() for p in run.model.parameters() if p.is_floating_point())
    packed = [m for m in run.model.modules() if isinstance(m, PackedLinear)]
    return trained, total + sum(m.in_features * m.out_features for m in packed)


def _interrupted(config: RunConfig, folder: RunFolder, step: int) -> str:
    if config.output.checkpoints:
        return f"stopped after step {step}; continue with: leantune resume {folder.path}"
    return f"stopped after step {step}; nothing was saved, because output.checkpoints is false"


def _finish(
    config: RunConfig,
    run: Run,
    checkpoints: RunCheckpoints,
    state: TrainState,
    ending: str,
    folder: RunFolder,
    tokenizer: PreTrainedTokenizerBase,
) -> RunResult:
    exported_step = gather_objects(checkpoints.restore_best(state))[0]  # rank 0 exports
    trained, total = _counts(run)
    result = RunResult(
        folder=folder.path,
        ending=ending,
        steps=state.step,
        first_loss=state.first_loss,
        last_loss=state.last_loss,
        eval_loss=state.last_eval_loss,
        best_step=state.best_step,
        exported_step=exported_step,
        trainable_parameters=trained,
        total_parameters=total,
        tokens=state.tokens,
        seconds=state.seconds,
        tokens_per_second=state.tokens / state.seconds if state.seconds else 0.0,
        peak_memory_gib=max(gather_objects(run.peak_memory_gib())),
    )
    line = save_trained(
        run.attached,
        folder.adapter if run.attached.adapter_files() else folder.model,
        tokenizer,
        config.model.name,
        config.model.revision,
        base=BaseOfModel(run.base.skeleton, run.base.original),
        storage=config.base.model_dump(mode="json"),
        growth=run.base.growth,
        writes=run.world.is_main,
    )
    barrier()  # no rank of any machine reads kept files any more
    if run.world.is_main:
        if folder.prefix.exists():
            remove_folder(folder.prefix)
        run.events.message(line)
        write_result(folder, result)
    return result


def _silent(_line: str) -> None:
    pass
