"""The schema of a run: one frozen, typed tree whose sections are the keys of `run.yaml`.

Every field carries a one-line description with its unit; `leantune train --help` and
`leantune schema` are made from them. Nothing here imports torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """One section of the run: no unknown keys, no silent conversions, no changes after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)


def _named(value: Any) -> Any:
    """Let `method: lora` stand for `method: {name: lora}`."""
    return {"name": value} if isinstance(value, str) else value


def _as_tuple(value: Any) -> Any:
    """YAML has lists only; fields of a frozen section are tuples."""
    return tuple(value) if isinstance(value, list) else value  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]


Strings = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
Ints = Annotated[tuple[int, ...], BeforeValidator(_as_tuple)]
Betas = Annotated[tuple[float, float], BeforeValidator(_as_tuple)]
PositiveInt = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]


class ModelSection(Section):
    """The base model."""

    name: str = Field(
        description="local folder, hub id, or `demo` (SmolLM2-135M-Instruct, installed with leantune's demo group)"
    )
    revision: str | None = Field(None, description="branch, tag or commit of a hub model")
    tokenizer: str | None = Field(
        None, description="folder or hub id of the tokenizer; default: the model's own"
    )
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model")
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = Field(
        "auto", description="attention kernel; auto leaves the choice to transformers"
    )


DataFormat = Literal[
    "auto", "alpaca", "chat", "prompt_completion", "text", "sql", "qa", "guanaco", "dummy"
]


class DataSection(Section):
    """Where the records come from and how they become tokens."""

    train: str = Field(
        description="JSON, JSONL, CSV or Parquet file, `datasets` folder, hub id, "
        "`text-to-sql` (generated) or `dummy` (random tokens, for measuring)"
    )
    validation: str | None = Field(None, description="file, folder or hub id of the validation records")
    validation_share: Share = Field(
        0.0, description="share of the training records held out for validation (0 to 1)"
    )
    subset: str | None = Field(None, description="configuration name of a hub data set")
    split: str = Field("train", description="split of a hub data set or `datasets` folder")
    validation_split: str = Field(
        "validation", description="split of `validation` if that is a hub data set or folder of splits"
    )
    format: DataFormat = Field("auto", description="shape of a record; auto detects and prints it")
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="field of the format: name of your column, e.g. {instruction: query}",
    )
    template: str = Field(
        "auto",
        description="auto, chat (the tokenizer's), alpaca, plain, or the path of a Jinja file; "
        "auto: alpaca for alpaca records if the tokenizer has no chat template",
    )
    system: str | None = Field(None, description="system message put before records that have none")
    train_on: Literal["answer", "all"] = Field(
        "answer", description="tokens that carry loss: the answers (each assistant turn) or all"
    )
    max_length: Annotated[int, Field(ge=2)] = Field(1024, description="longest record, in tokens")
    too_long: Literal["truncate", "drop"] = Field(
        "truncate", description="what happens to records longer than max_length"
    )
    max_records: PositiveInt | None = Field(
        None, description="use the first so many training records; default: all"
    )
    generated_records: PositiveInt = Field(
        1000, description="number of records of `dummy` and `text-to-sql`"
    )
    cache: bool = Field(True, description="keep the encoded records for the next run on the same input")


class FullMethod(Section):
    """Train all weights."""

    name: Literal["full"] = Field("full", description="train every weight of the model")


class LoraMethod(Section):
    """Low-rank adaptation (arXiv 2106.09685); the vocabulary is PEFT's."""

    name: Literal["lora"] = Field("lora", description="train low-rank updates of linear layers")
    rank: PositiveInt = Field(16, description="rank of the update")
    alpha: Annotated[float, Field(gt=0)] = Field(
        32.0, description="scale: the update is multiplied by alpha / rank (rslora: alpha / sqrt(rank))"
    )
    dropout: Share = Field(0.0, description="dropout on the input of the update (probability)")
    target_modules: str | Strings = Field(
        "all-linear",
        description="all-linear (all but the output head), a regex over full module names, "
        "or a list of names or suffixes",
    )
    layers: Literal["all"] | str | Ints = Field(
        "all", description="decoder blocks to adapt: all, `8;19`, or a list of indices"
    )
    rslora: bool = Field(False, description="rank-stabilised scale alpha / sqrt(rank), arXiv 2312.03732")
    implementation: Literal["leantune", "peft"] = Field(
        "leantune", description="whose LoRA module runs; peft is there to compare with"
    )


class LoreftMethod(Section):
    """Low-rank linear subspace ReFT (arXiv 2404.03592)."""

    name: Literal["loreft"] = Field("loreft", description="train edits of hidden states (LoReFT)")
    rank: PositiveInt = Field(8, description="dimension of the edited subspace")
    layers: Literal["all"] | str | Ints = Field(
        "all", description="decoder blocks whose output is edited: all, `8;19`, or a list of indices"
    )
    position: str = Field(
        "f7+l7", description="prompt tokens to edit: fN first, lN last, fN+lM both"
    )
    tied: bool = Field(
        True, description="one intervention per layer for first and last tokens (false: one for each)"
    )
    dropout: Share = Field(0.0, description="dropout on the edited state (probability)")
    activation: Literal["linear", "relu", "gelu", "silu", "tanh"] = Field(
        "linear", description="activation after the learned projection W h + b"
    )


class DenseBase(Section):
    """Frozen weights as they are."""

    name: Literal["dense"] = Field("dense", description="keep the weights in floating point")


class SingleStrategy(Section):
    """One process."""

    name: Literal["single"] = Field("single", description="one process on one device")
    devices: Literal[1] = Field(1, description="number of devices")


class DdpStrategy(Section):
    """A full copy of the model on every device; gradients are summed once a step."""

    name: Literal["ddp"] = Field("ddp", description="a copy of the model on each device")
    devices: PositiveInt = Field(2, description="devices in all, over all nodes (processes)")
    nodes: PositiveInt = Field(1, description="machines; devices must be a multiple of it")
    timeout_seconds: Annotated[float, Field(gt=0)] = Field(
        1800.0, description="longest wait for another rank (seconds)"
    )


class OptimizerSection(Section):
    """The optimizer of the trained parameters."""

    name: Literal["adamw", "adam", "sgd", "adadelta"] = Field(
        "adamw", description="adamw (fused where torch has it), adam, sgd or adadelta"
    )
    betas: Betas = Field((0.9, 0.999), description="decay of the moments (adamw, adam)")
    eps: Annotated[float, Field(gt=0)] = Field(1e-8, description="term added to the denominator")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        0.0, description="weight decay per step; never applied to orthonormal factors, norms and biases"
    )
    momentum: Share = Field(0.0, description="momentum (sgd)")
    rho: Share = Field(0.9, description="decay of the squared-gradient average (adadelta)")


class ScheduleSection(Section):
    """The learning rate over the run."""

    name: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="shape after the warm-up"
    )
    warmup_steps: Annotated[int, Field(ge=0)] | None = Field(
        None, description="steps of linear warm-up from 0 (or set warmup_share)"
    )
    warmup_share: Share | None = Field(None, description="warm-up as a share of all steps (0 to 1)")
    floor: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="lowest rate at the end, as a share of learning_rate (linear, cosine)"
    )


class TrainSection(Section):
    """Steps, batches and the optimizer."""

    epochs: Annotated[float, Field(gt=0)] = Field(1.0, description="passes over the training records")
    max_steps: PositiveInt | None = Field(
        None, description="optimizer steps; wins over epochs if it is reached first"
    )
    micro_batch_size: PositiveInt = Field(4, description="records per forward pass on one device")
    gradient_accumulation_steps: PositiveInt | None = Field(
        None, description="micro-batches per step on one device (or set global_batch_size)"
    )
    global_batch_size: PositiveInt | None = Field(
        None, description="records per optimizer step on all devices (or set gradient_accumulation_steps)"
    )
    learning_rate: Annotated[float, Field(gt=0)] = Field(2e-4, description="peak learning rate")
    optimizer: Annotated[OptimizerSection, BeforeValidator(_named)] = Field(
        OptimizerSection(), description="the optimizer and its numbers"
    )
    schedule: Annotated[ScheduleSection, BeforeValidator(_named)] = Field(
        ScheduleSection(), description="the learning rate over the run"
    )
    max_grad_norm: Annotated[float, Field(gt=0)] | None = Field(
        None, description="clip the global gradient norm to this; default: no clipping"
    )
    seed: Annotated[int, Field(ge=0)] = Field(
        42, description="seed of the order, the new parameters and dropout"
    )
    group_by_length: bool = Field(
        True, description="form batches of records of similar length (false: random batches)"
    )
    activation_checkpointing: bool = Field(
        False, description="recompute activations in backward: about a third more time, far less memory"
    )
    precision: Literal["auto", "fp32", "bf16_mixed"] = Field(
        "auto",
        description="fp32, or bf16_mixed (frozen weights and compute in bf16, trained weights in fp32); "
        "auto: fp32 on CPU, bf16_mixed on a GPU that has it",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="kind of device; auto: cuda if there is one"
    )


class EvalSection(Section):
    """Evaluation during training, on the validation records."""

    every_steps: PositiveInt | None = Field(
        None, description="steps between evaluations; default: at the end of each epoch"
    )
    micro_batch_size: PositiveInt | None = Field(
        None, description="records per forward pass; default: train.micro_batch_size"
    )
    keep_best: bool = Field(True, description="keep the checkpoint with the lowest validation loss")
    early_stop_patience: PositiveInt | None = Field(
        None, description="stop after so many evaluations without improvement; default: never"
    )
    early_stop_min_delta: Annotated[float, Field(ge=0)] = Field(
        0.0, description="smallest drop of the validation loss that counts as an improvement"
    )


Tracker = Literal["tensorboard", "trackio", "wandb"]


class OutputSection(Section):
    """What is written, and where."""

    dir: str | None = Field(
        None, description="run folder; default: runs/<name of the YAML file>, numbered if it exists"
    )
    overwrite: bool = Field(False, description="replace the run that is in dir")
    checkpoint_every_steps: PositiveInt | None = Field(
        None, description="steps between checkpoints; default: at the end of each epoch"
    )
    keep_checkpoints: PositiveInt = Field(
        2, description="newest checkpoints kept (the best one is kept besides)"
    )
    checkpoints: bool = Field(True, description="write checkpoints at all")
    trackers: Annotated[tuple[Tracker, ...], BeforeValidator(_as_tuple)] = Field(
        (), description="extra places for the metrics: tensorboard, trackio, wandb"
    )
    project: str = Field("leantune", description="project name shown by the trackers")


Method = Annotated[FullMethod | LoraMethod | LoreftMethod, Field(discriminator="name")]
Strategy = Annotated[SingleStrategy | DdpStrategy, Field(discriminator="name")]


def _strategy(value: Any) -> Any:
    """Let `devices: 2` alone mean ddp, and a bare name stand for its section."""
    value = _named(value)
    if isinstance(value, dict) and "name" not in value:
        several = value.get("devices", 1) != 1 or value.get("nodes", 1) != 1  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
        return {**value, "name": "ddp" if several else "single"}  # pyright: ignore[reportUnknownVariableType]
    return value  # pyright: ignore[reportUnknownVariableType]


class RunConfig(Section):
    """One run: method × base × strategy, on a model and data."""

    model: Annotated[ModelSection, BeforeValidator(_named)] = Field(description="the base model")
    data: DataSection = Field(description="the records")
    method: Annotated[Method, BeforeValidator(_named)] = Field(
        LoraMethod(), description="what is trained: full, lora or loreft"
    )
    base: Annotated[DenseBase, BeforeValidator(_named)] = Field(
        DenseBase(), description="how the frozen weights are stored: dense"
    )
    strategy: Annotated[Strategy, BeforeValidator(_strategy)] = Field(
        SingleStrategy(), description="where the weights live: single or ddp"
    )
    train: TrainSection = Field(TrainSection(), description="steps, batches and the optimizer")
    eval: EvalSection = Field(EvalSection(), description="evaluation during training")
    output: OutputSection = Field(OutputSection(), description="what is written, and where")
