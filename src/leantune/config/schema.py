"""The schema of a run: one frozen, typed tree whose sections are the keys of `run.yaml`.

Every field carries a one-line description with its unit; `leantune train --help` and
`leantune schema` are made from them. Nothing here imports torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """One section of the run: no unknown keys, no silent conversions, no changes after validation."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False
    )


def _named(value: Any) -> Any:
    """Let `method: lora` stand for `method: {name: lora}`."""
    return {"name": value} if isinstance(value, str) else value


def _as_tuple(value: Any) -> Any:
    """YAML has lists only; fields of a frozen section are tuples."""
    return tuple(value) if isinstance(value, list) else value  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]


def _as_layers(value: Any) -> Any:
    """Let `layers: 8` stand for `layers: [8]`."""
    return (value,) if isinstance(value, int) and not isinstance(value, bool) else _as_tuple(value)


Strings = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
Layers = Annotated[
    str | tuple[int, ...], BeforeValidator(_as_layers, json_schema_input_type=str | int | list[int])
]
Betas = Annotated[tuple[float, float], BeforeValidator(_as_tuple)]
PositiveInt = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]


class ModelSection(Section):
    """The base model."""

    name: str = Field(
        description="local folder, hub id, or `demo` (SmolLM2-135M-Instruct, installed with leantune's "
        "demo group)"
    )
    revision: str | None = Field(default=None, description="branch, tag or commit of a hub model")
    tokenizer: str | None = Field(
        default=None, description="folder or hub id of the tokenizer; default: the model's own"
    )
    trust_remote_code: bool = Field(default=False, description="run Python code that comes with the model")
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = Field(
        default="auto", description="attention kernel; auto leaves the choice to transformers"
    )


DataFormat = Literal["auto", "alpaca", "chat", "prompt_completion", "text", "sql", "qa", "guanaco", "dummy"]


class DataSection(Section):
    """Where the records come from and how they become tokens."""

    train: str = Field(
        description="JSON, JSONL, CSV or Parquet file, `datasets` folder, hub id, "
        "`text-to-sql` (generated) or `dummy` (random tokens, for measuring)"
    )
    validation: str | None = Field(
        default=None, description="file, folder or hub id of the validation records"
    )
    validation_share: Share = Field(
        default=0.0, description="share of the training records held out for validation (0 to 1)"
    )
    subset: str | None = Field(default=None, description="configuration name of a hub data set")
    split: str = Field(default="train", description="split of a hub data set or `datasets` folder")
    validation_split: str = Field(
        default="validation",
        description="split of `validation` if that is a hub data set or folder of splits",
    )
    format: DataFormat = Field(default="auto", description="shape of a record; auto detects and prints it")
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="field of the format: name of your column, e.g. {instruction: query}",
    )
    template: str = Field(
        default="auto",
        description="auto, chat (the tokenizer's), alpaca, plain, or the path of a Jinja file; "
        "auto: alpaca for alpaca records if the tokenizer has no chat template",
    )
    system: str | None = Field(default=None, description="system message put before records that have none")
    train_on: Literal["answer", "all"] = Field(
        default="answer", description="tokens that carry loss: the answers (each assistant turn) or all"
    )
    max_length: Annotated[int, Field(ge=2)] = Field(default=1024, description="longest record, in tokens")
    too_long: Literal["truncate", "drop"] = Field(
        default="truncate", description="what happens to records longer than max_length"
    )
    max_records: PositiveInt | None = Field(
        default=None, description="use the first so many training records; default: all"
    )
    generated_records: PositiveInt = Field(
        default=1000, description="number of records of `dummy` and `text-to-sql`"
    )
    cache: bool = Field(
        default=True, description="keep the encoded records for the next run on the same input"
    )


class FullMethod(Section):
    """Train all weights."""

    name: Literal["full"] = Field(default="full", description="train every weight of the model")


class LoraMethod(Section):
    """Low-rank adaptation (arXiv 2106.09685); the vocabulary is PEFT's."""

    name: Literal["lora"] = Field(default="lora", description="train low-rank updates of linear layers")
    rank: PositiveInt = Field(default=16, description="rank of the update")
    alpha: Annotated[float, Field(gt=0)] = Field(
        default=32.0,
        description="scale: the update is multiplied by alpha / rank (rslora: alpha / sqrt(rank))",
    )
    dropout: Share = Field(default=0.0, description="dropout on the input of the update (probability)")
    target_modules: str | Strings = Field(
        default="all-linear",
        description="all-linear (all but the output head), a regex over full module names, "
        "or a list of names or suffixes",
    )
    layers: Layers = Field(
        default="all", description="decoder blocks to adapt: all, `8;19`, or a list of indices"
    )
    rslora: bool = Field(
        default=False, description="rank-stabilised scale alpha / sqrt(rank), arXiv 2312.03732"
    )
    implementation: Literal["leantune", "peft"] = Field(
        default="leantune", description="whose LoRA module runs; peft is there to compare with"
    )


class LoreftMethod(Section):
    """Low-rank linear subspace ReFT (arXiv 2404.03592)."""

    name: Literal["loreft"] = Field(default="loreft", description="train edits of hidden states (LoReFT)")
    rank: PositiveInt = Field(default=8, description="dimension of the edited subspace")
    layers: Layers = Field(
        default="all", description="decoder blocks whose output is edited: all, `8;19`, or a list of indices"
    )
    position: str = Field(default="f7+l7", description="prompt tokens to edit: fN first, lN last, fN+lM both")
    tied: bool = Field(
        default=True, description="one intervention per layer for first and last tokens (false: one for each)"
    )
    dropout: Share = Field(default=0.0, description="dropout on the edited state (probability)")
    activation: Literal["linear", "relu", "gelu", "silu", "tanh"] = Field(
        default="linear", description="activation after the learned projection W h + b"
    )


class DenseBase(Section):
    """Frozen weights as they are."""

    name: Literal["dense"] = Field(default="dense", description="keep the weights in floating point")


class SingleStrategy(Section):
    """One process."""

    name: Literal["single"] = Field(default="single", description="one process on one device")
    devices: Literal[1] = Field(default=1, description="number of devices")


class DdpStrategy(Section):
    """A full copy of the model on every device; gradients are summed once a step."""

    name: Literal["ddp"] = Field(default="ddp", description="a copy of the model on each device")
    devices: PositiveInt = Field(default=2, description="devices in all, over all nodes (processes)")
    nodes: PositiveInt = Field(default=1, description="machines; devices must be a multiple of it")
    timeout_seconds: Annotated[float, Field(gt=0)] = Field(
        default=1800.0, description="longest wait for another rank (seconds)"
    )


class OptimizerSection(Section):
    """The optimizer of the trained parameters."""

    name: Literal["adamw", "adam", "sgd", "adadelta"] = Field(
        default="adamw", description="adamw (fused where torch has it), adam, sgd or adadelta"
    )
    betas: Betas = Field(default=(0.9, 0.999), description="decay of the moments (adamw, adam)")
    eps: Annotated[float, Field(gt=0)] = Field(default=1e-8, description="term added to the denominator")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.0,
        description="weight decay per step; never applied to orthonormal factors, norms and biases",
    )
    momentum: Share = Field(default=0.0, description="momentum (sgd)")
    rho: Share = Field(default=0.9, description="decay of the squared-gradient average (adadelta)")


class ScheduleSection(Section):
    """The learning rate over the run."""

    name: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="shape after the warm-up"
    )
    warmup_steps: Annotated[int, Field(ge=0)] | None = Field(
        default=None,
        description="steps over which the rate rises to the full one (or set warmup_share)",
    )
    warmup_share: Share | None = Field(default=None, description="warm-up as a share of all steps (0 to 1)")
    floor: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.0,
        description="where the rate falls to, as a share of learning_rate (linear, cosine)",
    )


class TrainSection(Section):
    """Steps, batches and the optimizer."""

    epochs: Annotated[float, Field(gt=0)] = Field(default=1.0, description="passes over the training records")
    max_steps: PositiveInt | None = Field(
        default=None, description="optimizer steps; wins over epochs if it is reached first"
    )
    micro_batch_size: PositiveInt = Field(
        default=4, description="most records in a forward pass of one device"
    )
    gradient_accumulation_steps: PositiveInt | None = Field(
        default=None, description="micro-batches per step on one device (or set global_batch_size)"
    )
    global_batch_size: PositiveInt | None = Field(
        default=None,
        description="records per optimizer step on all devices (or set gradient_accumulation_steps)",
    )
    learning_rate: Annotated[float, Field(gt=0)] = Field(default=2e-4, description="peak learning rate")
    optimizer: Annotated[OptimizerSection, BeforeValidator(_named, str | OptimizerSection)] = Field(
        default=OptimizerSection(), description="the optimizer and its numbers"
    )
    schedule: Annotated[ScheduleSection, BeforeValidator(_named, str | ScheduleSection)] = Field(
        default=ScheduleSection(), description="the learning rate over the run"
    )
    max_grad_norm: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="clip the global gradient norm to this; default: no clipping"
    )
    seed: Annotated[int, Field(ge=0)] = Field(
        default=42, description="seed of the order, the new parameters and dropout"
    )
    group_by_length: bool = Field(
        default=True, description="form batches of records of similar length (false: random batches)"
    )
    activation_checkpointing: bool = Field(
        default=False,
        description="recompute activations in backward: about a third more time, far less memory",
    )
    precision: Literal["auto", "fp32", "bf16_mixed"] = Field(
        default="auto",
        description="fp32, or bf16_mixed (frozen weights and compute in bf16, trained weights in fp32); "
        "auto: fp32 on CPU, bf16_mixed on a GPU that has it",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="kind of device; auto: cuda if there is one"
    )


class EvalSection(Section):
    """Evaluation during training, on the validation records."""

    every_steps: PositiveInt | None = Field(
        default=None, description="steps between evaluations; default: at the end of each epoch"
    )
    micro_batch_size: PositiveInt | None = Field(
        default=None, description="records per forward pass; default: train.micro_batch_size"
    )
    keep_best: bool = Field(
        default=True, description="keep the checkpoint with the lowest validation loss and export its weights"
    )
    early_stop_patience: PositiveInt | None = Field(
        default=None, description="stop after so many evaluations without improvement; default: never"
    )
    early_stop_min_delta: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="smallest drop of the validation loss that counts as an improvement"
    )


Tracker = Literal["tensorboard", "trackio", "wandb"]


class OutputSection(Section):
    """What is written, and where."""

    dir: str | None = Field(
        default=None, description="run folder; default: runs/<name of the YAML file>, numbered if it exists"
    )
    overwrite: bool = Field(default=False, description="replace the run that is in dir")
    checkpoint_every_steps: PositiveInt | None = Field(
        default=None, description="steps between checkpoints; default: at the end of each epoch"
    )
    keep_checkpoints: PositiveInt = Field(
        default=2, description="newest checkpoints kept (the best one is kept besides)"
    )
    checkpoints: bool = Field(default=True, description="write checkpoints at all")
    trackers: Annotated[tuple[Tracker, ...], BeforeValidator(_as_tuple)] = Field(
        default=(), description="extra places for the metrics: tensorboard, trackio, wandb"
    )
    project: str = Field(default="leantune", description="project name shown by the trackers")


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

    model: Annotated[ModelSection, BeforeValidator(_named, str | ModelSection)] = Field(
        description="the base model"
    )
    data: DataSection = Field(description="the records")
    method: Annotated[Method, BeforeValidator(_named, str | Method)] = Field(
        default=LoraMethod(), description="what is trained: full, lora or loreft"
    )
    base: Annotated[DenseBase, BeforeValidator(_named, str | DenseBase)] = Field(
        default=DenseBase(), description="how the frozen weights are stored: dense"
    )
    strategy: Annotated[Strategy, BeforeValidator(_strategy, str | Strategy)] = Field(
        default=SingleStrategy(), description="where the weights live: single or ddp"
    )
    train: TrainSection = Field(default=TrainSection(), description="steps, batches and the optimizer")
    eval: EvalSection = Field(default=EvalSection(), description="evaluation during training")
    output: OutputSection = Field(default=OutputSection(), description="what is written, and where")
