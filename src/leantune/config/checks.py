"""Rules across keys: combinations that each field alone cannot see. All problems are collected."""

from __future__ import annotations

from leantune.config.axes import (
    DdpStrategy,
    DoraMethod,
    FsdpStrategy,
    FullMethod,
    LoraMethod,
    ReftMethod,
    parts_of,
)
from leantune.config.edit_checks import check_edits
from leantune.config.grid import refusal
from leantune.config.method_checks import check_method
from leantune.config.objective_checks import check_objective
from leantune.config.schema import RunConfig
from leantune.config.section import Section


def cross_check(config: RunConfig) -> list[str]:
    """Every problem of a configuration whose fields are valid one by one."""
    problems: list[str] = []
    reason = refusal(config.method.name, config.base.name, config.strategy.name)
    if reason:
        problems.append(
            f"method {config.method.name} × base {config.base.name} × strategy "
            f"{config.strategy.name} is refused: {reason}"
        )
    problems += check_method(config)
    problems += check_objective(config)
    problems += check_edits(config)
    problems += _check_tokens(config)
    problems += _check_batches(config)
    problems += _check_strategy(config)
    problems += _check_schedule(config)
    problems += _check_optimizer(config)
    problems += _check_8bit(config)
    problems += _check_paged(config)
    problems += _check_data(config)
    problems += _check_eval(config)
    return problems


def _check_tokens(config: RunConfig) -> list[str]:
    tokens, method, problems = config.model.add_tokens, config.method, list[str]()
    blank = [token for token in tokens if not token.strip()]
    twice = sorted({token for token in tokens if tokens.count(token) > 1})
    if blank:
        problems.append(f"model.add_tokens: {blank[0]!r} is blank; expected text that is to be one token")
    if twice:
        problems.append(f"model.add_tokens: {', '.join(map(repr, twice))} named twice; name each token once")
    if tokens and not (isinstance(method, FullMethod) or _trains_embeddings(config)):
        fix = "use lora, dora or a ReFT method with train_embeddings"
        if isinstance(method, LoraMethod | DoraMethod | ReftMethod):
            fix = "set method.train_embeddings: true"
        problems.append(
            f"model.add_tokens: method {method.name} as it is leaves the embeddings frozen, so the new "
            f"tokens would stay at the mean of the others; {fix}, or use method full"
        )
    return problems


def _trains_embeddings(config: RunConfig) -> bool:
    return any(getattr(method, "train_embeddings", False) for method in parts_of(config.method))


def _check_batches(config: RunConfig) -> list[str]:
    train, devices = config.train, config.strategy.devices
    per_pass = train.micro_batch_size * devices
    if train.global_batch_size is None:
        return []
    if train.gradient_accumulation_steps is not None:
        product = per_pass * train.gradient_accumulation_steps
        if product != train.global_batch_size:
            return [
                f"train.global_batch_size: {train.global_batch_size} is not micro_batch_size "
                f"{train.micro_batch_size} × devices {devices} × gradient_accumulation_steps "
                f"{train.gradient_accumulation_steps} = {product}; set one of the two"
            ]
    elif train.global_batch_size < devices:
        return [
            f"train.global_batch_size: {train.global_batch_size} is less than strategy.devices {devices}; "
            "every device needs a record a step"
        ]
    elif train.global_batch_size > per_pass and train.global_batch_size % per_pass:
        return [
            f"train.global_batch_size: {train.global_batch_size} is not a multiple of micro_batch_size "
            f"{train.micro_batch_size} × devices {devices} = {per_pass}; change one of the three"
        ]
    return []


def _check_strategy(config: RunConfig) -> list[str]:
    strategy, problems = config.strategy, list[str]()
    if isinstance(strategy, DdpStrategy | FsdpStrategy) and strategy.devices % strategy.nodes:
        problems.append(
            f"strategy.devices: {strategy.devices} is not a multiple of strategy.nodes {strategy.nodes}"
        )
    if isinstance(strategy, FsdpStrategy):
        problems += _check_shard_groups(strategy)
        if strategy.adapter != "auto" and not _has_factors(config):
            problems.append(
                f"strategy.adapter: has no effect here, because method {config.method.name} has no LoRA or "
                "DoRA parameters; remove the key"
            )
    return problems


def _has_factors(config: RunConfig) -> bool:
    """Whether there are LoRA or DoRA parameters, which may be sharded."""
    return any(isinstance(method, LoraMethod | DoraMethod) for method in parts_of(config.method))


def _check_shard_groups(strategy: FsdpStrategy) -> list[str]:
    size, devices = strategy.shard_devices, strategy.devices
    if not strategy.sharding.startswith("hybrid"):
        if size is None:
            return []
        return [
            f"strategy.shard_devices: has no effect here, because strategy.sharding is {strategy.sharding}; "
            "use hybrid or hybrid_grad_op, or remove the key"
        ]
    if size is None and strategy.nodes == 1:
        return [
            f"strategy.sharding: {strategy.sharding} on one node is a single shard group; set "
            "strategy.shard_devices, set strategy.nodes, or use full or grad_op"
        ]
    if size is not None and (devices % size or devices == size):
        return [
            f"strategy.shard_devices: {size} does not divide strategy.devices {devices} into two or more "
            f"groups of equal size, which {strategy.sharding} needs; change one of the two"
        ]
    return []


def _check_schedule(config: RunConfig) -> list[str]:
    problems: list[str] = []
    schedule = config.train.schedule
    if schedule.warmup_steps is not None and schedule.warmup_share is not None:
        problems.append("train.schedule: warmup_steps and warmup_share are both set; set one of the two")
    if schedule.name == "constant" and schedule.floor != 0.0:
        problems.append("train.schedule.floor: a constant schedule has no floor; use linear or cosine")
    if config.train.max_steps and schedule.warmup_steps and schedule.warmup_steps > config.train.max_steps:
        problems.append(
            f"train.schedule.warmup_steps: {schedule.warmup_steps} is more than train.max_steps "
            f"{config.train.max_steps}"
        )
    return problems


def _check_optimizer(config: RunConfig) -> list[str]:
    optimizer, problems = config.train.optimizer, list[str]()
    unused = {"sgd": ("betas", "eps", "rho"), "adadelta": ("betas", "momentum")}
    for key in sorted(optimizer.model_fields_set & {*unused.get(optimizer.name, ("momentum", "rho"))}):
        default = type(optimizer).model_fields[key].default
        if getattr(optimizer, key) != default:
            problems.append(f"train.optimizer.{key}: {optimizer.name} has no {key}; remove the key")
    if any(not 0.0 <= beta < 1.0 for beta in optimizer.betas):
        problems.append(f"train.optimizer.betas: {list(optimizer.betas)} must lie in [0, 1)")
    return problems


def _check_8bit(config: RunConfig) -> list[str]:
    name, strategy = config.train.optimizer.name, config.strategy
    if not name.endswith("_8bit") or not isinstance(strategy, FsdpStrategy):
        return []
    has_adapter, embeddings = _has_factors(config), _trains_embeddings(config)
    edits_alone = isinstance(config.method, ReftMethod)
    whole = edits_alone or (has_adapter and strategy.adapter == "replicated")
    if whole and not embeddings:
        return []
    fix = "use adamw, or strategy.adapter: replicated" if has_adapter and not embeddings else "use adamw"
    return [
        f"train.optimizer.name: {name} does not go with sharded parameters: its states are blocks over "
        f"flat memory, which do not follow the rows of a shard; {fix}"
    ]


def _check_paged(config: RunConfig) -> list[str]:
    name, strategy = config.train.optimizer.name, config.strategy
    if not name.startswith("paged_"):
        return []
    reason = None
    if config.train.device == "cpu":
        reason = "train.device is cpu"
    elif isinstance(strategy, FsdpStrategy) and strategy.cpu_offload:
        reason = "strategy.cpu_offload is true"
    if reason is None:
        return []
    return [
        f"train.optimizer.name: {name} has nothing to page out, because {reason} and the states are in host "
        "memory already; use adamw"
    ]


def _check_data(config: RunConfig) -> list[str]:
    data, problems = config.data, _without_effect(config)
    if data.validation is not None and data.validation_share:
        problems.append("data.validation and data.validation_share are both set; set one of the two")
    if (data.train == "dummy") != (data.format == "dummy") and data.format != "auto":
        problems.append("data.format: dummy goes with data.train: dummy, and with no other source")
    if data.train in ("dummy", "text-to-sql") and data.columns:
        problems.append(f"data.columns: {data.train} has no columns to map")
    return problems


def _check_eval(config: RunConfig) -> list[str]:
    problems: list[str] = []
    has_validation = config.data.validation is not None or config.data.validation_share > 0
    if config.eval.early_stop_patience and not has_validation:
        problems.append(
            "eval.early_stop_patience: there are no validation records; "
            "set data.validation or data.validation_share"
        )
    if config.eval.every_steps and not has_validation:
        problems.append(
            "eval.every_steps: there are no validation records; set data.validation or data.validation_share"
        )
    if not config.output.checkpoints and config.output.checkpoint_every_steps:
        problems.append("output.checkpoint_every_steps: output.checkpoints is false; nothing would be saved")
    return problems


_NO_RECOMPUTE = "train.activation_checkpointing is false"
_NO_PREFIX = "train.cache_frozen_prefix is off"


def _without_effect(config: RunConfig) -> list[str]:
    """Keys that were changed from their default although nothing in this run would obey them."""
    data, train, output = config.data, config.train, config.output
    generated = data.train in ("dummy", "text-to-sql")
    validates = data.validation is not None or data.validation_share > 0
    rules: list[tuple[str, Section, bool, str]] = [
        ("data.generated_records", data, generated, "data.train is no generator"),
        ("data.train_on", data, data.train != "dummy", "data.train is dummy"),
        ("data.too_long", data, data.train != "dummy", "data.train is dummy"),
        ("data.validation_split", data, data.validation is not None, "data.validation is not set"),
        ("train.checkpoint_every_blocks", train, train.activation_checkpointing, _NO_RECOMPUTE),
        ("train.activation_offload", train, train.activation_checkpointing, _NO_RECOMPUTE),
        ("train.prefix_cache_gib", train, train.cache_frozen_prefix != "off", _NO_PREFIX),
        (
            "eval.early_stop_min_delta",
            config.eval,
            validates and config.eval.early_stop_patience is not None,
            "eval.early_stop_patience is not set",
        ),
        ("output.keep_checkpoints", output, output.checkpoints, "output.checkpoints is false"),
        ("output.project", output, bool(output.trackers), "output.trackers is empty"),
    ]
    problems: list[str] = []
    for key, section, obeyed, reason in rules:
        name = key.rpartition(".")[2]
        if not obeyed and getattr(section, name) != type(section).model_fields[name].default:
            problems.append(f"{key}: has no effect here, because {reason}; remove the key")
    return problems
