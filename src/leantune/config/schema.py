"""The schema of a run: one frozen, typed tree whose sections are the keys of `run.yaml`.

Every field carries a one-line description with its unit; `leantune train --help` and
`leantune schema` are made from them. Nothing here imports torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from leantune.config.axes import (
    Base,
    DenseBase,
    LoraMethod,
    Method,
    Part,
    SingleStrategy,
    Strategy,
    named_strategy,
)
from leantune.config.objectives import NextTokenObjective, Objective
from leantune.config.section import (
    Betas,
    PositiveInt,
    Section,
    Share,
    Strings,
    as_tuple,
    named,
    named_method,
    off_is_text,
)


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
    add_tokens: Strings = Field(
        default=(),
        description="tokens that the tokenizer gets besides its own; their embeddings start as the mean "
        "of the others, and must be trained: method full, or train_embeddings",
    )
    trust_remote_code: bool = Field(default=False, description="run Python code that comes with the model")
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = Field(
        default="auto", description="attention kernel; auto leaves the choice to transformers"
    )


DataFormat = Literal[
    "auto",
    "alpaca",
    "chat",
    "prompt_completion",
    "text",
    "sql",
    "qa",
    "guanaco",
    "dummy",
    "classification",
    "preference",
]


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
    markers: Annotated[tuple[str, str], BeforeValidator(as_tuple)] | None = Field(
        default=None,
        description="two strings, e.g. ['[[', ']]']: method.position markers edits what stands between them "
        "in the prompt; they are left out of the text",
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


class OptimizerSection(Section):
    """The optimizer of the trained parameters."""

    name: Literal[
        "adamw", "adam", "sgd", "adadelta", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit"
    ] = Field(
        default="adamw",
        description="adamw (fused where torch has it), adam, sgd, adadelta; from bitsandbytes: adamw_8bit "
        "(moments in 8 bits: a quarter of their memory, rounded), paged_adamw_32bit, paged_adamw_8bit "
        "(moments move to host memory when the GPU is full, which costs time)",
    )
    betas: Betas = Field(default=(0.9, 0.999), description="decay of the moments (adam, all adamw)")
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
    optimizer: Annotated[OptimizerSection, BeforeValidator(named, str | OptimizerSection)] = Field(
        default=OptimizerSection(), description="the optimizer and its numbers"
    )
    schedule: Annotated[ScheduleSection, BeforeValidator(named, str | ScheduleSection)] = Field(
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
        description="recompute the activations of blocks in backward: a third (full) to a half more time, "
        "far less memory",
    )
    checkpoint_every_blocks: PositiveInt = Field(
        default=1,
        description="recompute each k-th decoder block only (needs activation_checkpointing): "
        "a k-th of its cost, and of its saving",
    )
    activation_offload: bool = Field(
        default=False,
        description="what activation_checkpointing keeps, the input of each block, moves to host memory "
        "and back: one copy each way a block",
    )
    loss_chunk_tokens: PositiveInt | None = Field(
        default=None,
        description="labelled positions per pass through the output head: logits exist for one chunk at "
        "a time, at the cost of one more product with the head; default: all at once",
    )
    cache_frozen_prefix: Annotated[
        Literal["auto", "memory", "disk", "off"], BeforeValidator(off_is_text, str)
    ] = Field(
        default="auto",
        description="keep what blocks below the lowest trained one put out in the first epoch, and skip "
        "them afterwards; auto: memory, if they are a quarter of all or more, there is a second epoch, and "
        "it fits",
    )
    prefix_cache_gib: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="most GiB that cache_frozen_prefix takes on a machine; default: a quarter of the "
        "available memory (disk: of the free disk)",
    )
    reshuffle: Literal["auto", "records", "windows"] = Field(
        default="auto",
        description="what each epoch draws anew: the records of each step, or only the order of the steps "
        "(windows), so that the same records stay together; auto: windows if cache_frozen_prefix could pay, "
        "else records",
    )
    precision: Literal["auto", "fp32", "bf16", "bf16_mixed", "bf16_fp32_buffers", "fp16_mixed"] = Field(
        default="auto",
        description="types of the frozen weights, of what is trained, of the arithmetic and of buffers; "
        "auto: fp32 on a CPU, bf16_mixed on a GPU that computes in bf16, fp16_mixed on any other",
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
    trackers: Annotated[tuple[Tracker, ...], BeforeValidator(as_tuple)] = Field(
        default=(), description="extra places for the metrics: tensorboard, trackio, wandb"
    )
    project: str = Field(default="leantune", description="project name shown by the trackers")


class RunConfig(Section):
    """One run: method × base × strategy, on a model and data."""

    model: Annotated[ModelSection, BeforeValidator(named, str | ModelSection)] = Field(
        description="the base model"
    )
    data: DataSection = Field(description="the records")
    method: Annotated[Method, BeforeValidator(named_method, str | list[Part] | Method)] = Field(
        default=LoraMethod(),
        description="what is trained: full, lora, dora, loreft (or another ReFT method), llama_pro, or a "
        "list such as [lora, loreft]",
    )
    objective: Annotated[Objective, BeforeValidator(named, str | Objective)] = Field(
        default=NextTokenObjective(),
        description="what is learned from the records: next_token, classification, dpo or reward",
    )
    base: Annotated[Base, BeforeValidator(named, str | Base)] = Field(
        default=DenseBase(), description="how the frozen weights are stored: dense, nf4 or hqq"
    )
    strategy: Annotated[Strategy, BeforeValidator(named_strategy, str | Strategy)] = Field(
        default=SingleStrategy(), description="where the weights live: single, ddp or fsdp"
    )
    train: TrainSection = Field(default=TrainSection(), description="steps, batches and the optimizer")
    eval: EvalSection = Field(default=EvalSection(), description="evaluation during training")
    output: OutputSection = Field(default=OutputSection(), description="what is written, and where")
