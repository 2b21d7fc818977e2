"""A run from its configuration to its result: preparing it, starting the ranks, one rank's work."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from leantune.checkpoint.adapter import save_trained
from leantune.checkpoint.run_folder import RunFolder
from leantune.config import RunConfig, load_config, to_yaml
from leantune.data.prepare import prepare_data
from leantune.data.show import show_example, show_example_styled
from leantune.errors import CheckpointError
from leantune.models.source import check_vocabulary, load_config as load_model_config, load_tokenizer, resolve_model
from leantune.strategies.failure import in_worker, worker_errors
from leantune.strategies.launch import launch
from leantune.strategies.process import World, broadcast_object, join, leave
from leantune.strategies.stop import StopRequest
from leantune.train.assemble import assemble, device_kind
from leantune.train.events import Events, memory_baseline
from leantune.train.loop import train_loop
from leantune.train.run import TrainState, Run
from leantune.train.steps import plan_steps
from leantune.train.trackers import check_trackers

Notify = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class RunResult:
    """What a run came to. Losses are means over supervised tokens; tokens_per_second counts all real tokens."""

    folder: Path
    ending: str
    steps: int
    first_loss: float | None
    last_loss: float | None
    eval_loss: float | None
    best_step: int | None
    trainable_parameters: int
    total_parameters: int
    tokens: int
    seconds: float
    tokens_per_second: float
    peak_memory_gib: float


def prepare_run(config: RunConfig, name: str, say: Callable[[str], None] = print) -> RunFolder:
    """Read and encode the data, check it against the model, create the run folder. No weights are loaded."""
    check_trackers(config.output.trackers)
    section = config.model
    source = resolve_model(section.name, section.revision, section.trust_remote_code)
    model_config = load_model_config(source)
    tokenizer = load_tokenizer(source, section.tokenizer)
    check_vocabulary(model_config, tokenizer)
    prepared = prepare_data(config.data, tokenizer, config.train.seed)
    for line in prepared.report:
        say(line)
    say("an encoded record (what carries loss is marked):")
    if say is print and sys.stdout.isatty():
        Console().print(show_example_styled(prepared.train, tokenizer))
    else:
        say(show_example(prepared.train, tokenizer))
    plan = plan_steps(config.train, len(prepared.train), config.strategy.devices)
    say(
        f"{plan.total_steps} steps of {plan.global_batch_size} records "
        f"({config.strategy.devices} device(s), micro-batches of {plan.micro_batch_size}), "
        f"{plan.steps_per_epoch} a pass over the data"
    )
    folder = RunFolder.create(config.output.dir, name, config.output.overwrite)
    batches = {"global_batch_size": plan.global_batch_size, "gradient_accumulation_steps": None}
    resolved = config.model_copy(update={"train": config.train.model_copy(update=batches)})
    folder.records.mkdir(exist_ok=True)
    prepared.train.save(folder.records / "train.safetensors")
    facts = {"train": asdict(prepared.train.facts)}
    if prepared.validation is not None:
        prepared.validation.save(folder.records / "validation.safetensors")
        facts["validation"] = asdict(prepared.validation.facts)
    folder.write_json("data.json", {**facts, "format": prepared.format, "template": prepared.template.name})
    folder.write_config(to_yaml(resolved))
    return folder


def start_run(
    config: RunConfig, name: str = "run", *, notify: Notify | None = None, quiet: bool = False, **node: Any
) -> RunResult | None:
    """Train. Starts the workers itself, unless it is one of several processes that torchrun started.

    `notify` is called with each row of metrics (in one process only). `node`: node_rank and
    rdzv_endpoint if the run has several nodes. Returns None if it was interrupted.
    """
    if in_worker():
        return _run_rank(config, None, name, notify, quiet)
    folder = prepare_run(config, name, (lambda _line: None) if quiet else print)
    return _start(folder, notify, quiet, **node)


def resume_run(
    folder: RunFolder, config: RunConfig, *, notify: Notify | None = None, quiet: bool = False, **node: Any
) -> RunResult | None:
    """Continue an interrupted run from its newest complete checkpoint, on any number of devices."""
    if not folder.checkpoints.is_dir():
        raise CheckpointError(f"{folder.path} has no checkpoints; start the run again with output.overwrite=true")
    folder.write_config(to_yaml(config))
    if in_worker():
        return _run_rank(config, folder, "", notify, quiet)
    return _start(folder, notify, quiet, **node)


def _start(folder: RunFolder, notify: Notify | None, quiet: bool, **node: Any) -> RunResult | None:
    config = load_config(folder.config)
    if config.strategy.devices == 1:
        return _run_rank(config, folder, "", notify, quiet)
    args = ["rank", str(folder.path), *(["--quiet"] if quiet else [])]
    nodes = config.strategy.nodes if config.strategy.name == "ddp" else 1
    launch(args, devices_per_node=config.strategy.devices // nodes, nodes=nodes, **node)
    return read_result(folder)


def run_rank(folder: str, quiet: bool) -> None:
    """The work of one rank that `launch` started."""
    with worker_errors():
        run_folder = RunFolder.open(folder)
        _run_rank(load_config(run_folder.config), run_folder, "", None, quiet)


def _run_rank(
    config: RunConfig, folder: RunFolder | None, name: str, notify: Notify | None, quiet: bool
) -> RunResult | None:
    with worker_errors():
        memory_baseline()
        with StopRequest() as stop:
            world = join(device_kind(config), getattr(config.strategy, "timeout_seconds", 1800.0))
            if folder is None:  # torchrun started us: rank 0 prepares the run for all
                path = broadcast_object(prepare_run(config, name).path if world.is_main else None)
                folder = RunFolder.open(str(path))
            result = _train(load_config(folder.config), folder, world, stop, notify, quiet)
            leave(world)
        if result is None and stop.signal is not None:
            raise SystemExit(128 + stop.signal)
        return result


def _train(
    config: RunConfig, folder: RunFolder, world: World, stop: StopRequest, notify: Notify | None, quiet: bool
) -> RunResult | None:
    source = resolve_model(config.model.name, config.model.revision, config.model.trust_remote_code)
    tokenizer = load_tokenizer(source, config.model.tokenizer)
    events = Events(
        folder,
        main=world.is_main,
        quiet=quiet,
        trackers=config.output.trackers,
        project=config.output.project,
        notify=notify,
    )
    try:
        run, restore = assemble(config, folder, world, tokenizer, events, stop)
        state = TrainState()
        checkpoint = restore(state)
        for line in _opening(run, state, checkpoint.path if checkpoint else None):
            events.message(line)
        if world.is_main:
            folder.truncate_metrics(state.step)
        events.begin(run.plan.total_steps, state.step)
        ending = train_loop(run, state)
        if ending == "interrupted":
            events.message(f"stopped after step {state.step}; continue with: leantune resume {folder.path}")
            return None
        return _finish(config, run, state, ending, folder, tokenizer)
    finally:
        events.close()


def _opening(run: Run, state: TrainState, checkpoint: Path | None) -> list[str]:
    trained = sum(p.numel() for p in run.trainable.values())
    total = sum(p.numel() for p in run.model.parameters())
    lines = [*run.attached.describe(), f"trained parameters: {trained:,} of {total:,} ({100 * trained / total:.4f} %)"]
    if checkpoint is not None:
        lines.append(f"continuing after step {state.step} from {checkpoint}")
    return lines


def _finish(
    config: RunConfig,
    run: Run,
    state: TrainState,
    ending: str,
    folder: RunFolder,
    tokenizer: PreTrainedTokenizerBase,
) -> RunResult:
    trained = sum(p.numel() for p in run.trainable.values())
    result = RunResult(
        folder=folder.path,
        ending=ending,
        steps=state.step,
        first_loss=state.first_loss,
        last_loss=state.last_loss,
        eval_loss=state.last_eval_loss,
        best_step=state.best_step,
        trainable_parameters=trained,
        total_parameters=sum(p.numel() for p in run.model.parameters()),
        tokens=state.tokens,
        seconds=state.seconds,
        tokens_per_second=state.tokens / state.seconds if state.seconds else 0.0,
        peak_memory_gib=run.peak_memory_gib(),
    )
    if run.world.is_main:
        target = folder.model if run.attached.export() is None else folder.adapter
        run.events.message(save_trained(run.attached, target, tokenizer, config.model.name, config.model.revision))
        folder.write_json("result.json", {**asdict(result), "folder": str(folder.path)})
    return result


def read_result(folder: RunFolder) -> RunResult:
    """The result of a finished run."""
    values = folder.read_json("result.json")
    known = {key: values[key] for key in RunResult.__dataclass_fields__}
    return RunResult(**{**known, "folder": folder.path})

