"""The three axes of a run: what is trained, how frozen weights are stored, where they live.

Each value of an axis is one section, told apart by its `name`.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BeforeValidator, Field

from leantune.config.section import (
    Layers,
    PositiveInt,
    Section,
    Share,
    Strings,
    as_layers,
    as_tuple,
    named,
    named_method,
)

# The name of a section whose other fields several values of an axis share.
NameT = TypeVar("NameT", bound=str)


class FullMethod(Section):
    """Train all weights."""

    name: Literal["full"] = Field(default="full", description="train every weight of the model")


class LowRankMethod(Section, Generic[NameT]):
    """What LoRA and DoRA have in common; the vocabulary is PEFT's."""

    name: NameT
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
    train_embeddings: bool = Field(
        default=False, description="train the token embeddings and the output head too, whole"
    )


class LoraMethod(LowRankMethod[Literal["lora"]]):
    """Low-rank adaptation (arXiv 2106.09685)."""

    name: Literal["lora"] = Field(default="lora", description="train low-rank updates of linear layers")
    implementation: Literal["leantune", "peft"] = Field(
        default="leantune", description="whose LoRA module runs; peft is there to compare with"
    )


class DoraMethod(LowRankMethod[Literal["dora"]]):
    """Weight-decomposed low-rank adaptation (arXiv 2402.09353)."""

    name: Literal["dora"] = Field(
        default="dora", description="train low-rank updates and the length of each weight row (DoRA)"
    )


Component = Literal["block_output", "block_input", "attention_output", "mlp_output", "mlp_activation"]
Position = Annotated[
    str | tuple[int, ...], BeforeValidator(as_layers, json_schema_input_type=str | int | list[int])
]
Activation = Literal["linear", "relu", "gelu", "silu", "tanh"]


class InterventionGroup(Section):
    """Places of a ReFT method that differ from the others; what is not set is as in the method section."""

    layers: Layers = Field(default="all", description="decoder blocks of this group: all, `8;19`, or a list")
    rank: PositiveInt | None = Field(default=None, description="dimension of the edited subspace")
    component: Component | None = Field(default=None, description="what is edited in these blocks")
    position: Position | None = Field(default=None, description="prompt tokens to edit")
    tied: bool | None = Field(default=None, description="one intervention for first and last tokens")


class ReftMethod(Section, Generic[NameT]):
    """What the representation fine-tuning methods have in common (arXiv 2404.03592)."""

    name: NameT
    rank: PositiveInt = Field(default=8, description="dimension of the edited subspace")
    layers: Layers = Field(
        default="all", description="decoder blocks that are edited: all, `8;19`, or a list of indices"
    )
    component: Component = Field(
        default="block_output",
        description="what is edited: the output or input of the block, the output of its attention or MLP, "
        "or that of the MLP's activation function",
    )
    position: Position = Field(
        default="f7+l7",
        description="prompt tokens to edit: fN first, lN last, fN+lM both, all, markers (those between "
        "data.markers), or indices such as `0;3;-1` (-1: the last)",
    )
    tied: bool = Field(
        default=True, description="one intervention per layer for first and last tokens (false: one for each)"
    )
    interventions: Annotated[tuple[InterventionGroup, ...], BeforeValidator(as_tuple)] = Field(
        default=(),
        description="groups of layers with a rank, component, position and tied of their own; takes the "
        "place of layers",
    )
    positions_convention: Literal["standard", "pyreft-alpaca"] = Field(
        default="standard",
        description="standard: l1 is the last prompt token; pyreft-alpaca: the one before it, as in the "
        "Alpaca script of pyreft",
    )
    generation: Literal["prompt", "all", "new"] = Field(
        default="prompt",
        description="which tokens are edited, in training and at generation: prompt (at its positions), all "
        "(also every token after it), new (those alone)",
    )
    dropout: Share = Field(default=0.0, description="dropout on the edited state (probability)")
    subspaces: dict[str, Layers] = Field(
        default_factory=dict,
        description="names for dimensions of the subspace, e.g. {formal: 0-3, sql: 4-7}; the column "
        "`subspaces` of a record says which of them it trains",
    )
    train_embeddings: bool = Field(
        default=False, description="train the token embeddings and the output head too, whole"
    )


class SourceReftMethod(ReftMethod[NameT], Generic[NameT]):
    """A ReFT method with a source W h + b that depends on the state."""

    activation: Activation = Field(
        default="linear", description="activation after the learned projection W h + b"
    )


class LoreftMethod(SourceReftMethod[Literal["loreft"]]):
    """Low-rank linear subspace ReFT (arXiv 2404.03592, equation 3)."""

    name: Literal["loreft"] = Field(
        default="loreft", description="edit hidden states: h + R (act(W h + b) - Rᵀ h), R orthonormal"
    )


class NoreftMethod(SourceReftMethod[Literal["noreft"]]):
    """LoReFT without orthogonality."""

    name: Literal["noreft"] = Field(
        default="noreft", description="edit hidden states: h + Pᵀ (act(W h + b) - P h), P free"
    )
    projection_bias: bool = Field(default=False, description="a bias on P h")


class ConsreftMethod(ReftMethod[Literal["consreft"]]):
    """LoReFT with a constant source."""

    name: Literal["consreft"] = Field(
        default="consreft", description="edit hidden states: h + R (c - Rᵀ h), c constant, R orthonormal"
    )


class LobireftMethod(ReftMethod[Literal["lobireft"]]):
    """A low-rank bias."""

    name: Literal["lobireft"] = Field(
        default="lobireft", description="edit hidden states: h + R c, c constant, R orthonormal"
    )


class DireftMethod(SourceReftMethod[Literal["direft"]]):
    """LoReFT without the difference operation, as pyreft has it."""

    name: Literal["direft"] = Field(
        default="direft",
        description="edit hidden states: h + R act(W h + b), R orthonormal (pyreft's DiReFT; that of the "
        "paper is nodireft)",
    )


class NodireftMethod(SourceReftMethod[Literal["nodireft"]]):
    """What the paper calls DiReFT (section 3.2)."""

    name: Literal["nodireft"] = Field(
        default="nodireft",
        description="edit hidden states: h + Pᵀ act(W h + b), P free (the paper's DiReFT; `direft-paper` "
        "is another name of it)",
    )


class LlamaProMethod(Section):
    """Block expansion (arXiv 2401.02415)."""

    name: Literal["llama_pro"] = Field(
        default="llama_pro",
        description="add decoder blocks, copies that change nothing at first, and train them alone",
    )
    blocks: PositiveInt = Field(
        default=4,
        description="new decoder blocks k, spread evenly over the L of the model: "
        "after block (i + 1) * L // k - 1 for i < k",
    )


class DenseBase(Section):
    """Frozen weights as they are."""

    name: Literal["dense"] = Field(default="dense", description="keep the weights in floating point")


class PackedBase(Section, Generic[NameT]):
    """What the bases of few bits have in common."""

    name: NameT
    keep_dense: Strings = Field(default=(), description="linear layers that stay dense: names or suffixes")


class Nf4Base(PackedBase[Literal["nf4"]]):
    """4-bit NormalFloat (arXiv 2305.14314)."""

    name: Literal["nf4"] = Field(
        default="nf4", description="4 bits a weight (NF4) and a scale for 64 weights of a row"
    )
    double_quant: bool = Field(
        default=False, description="quantise the block scales too: 0.37 bits a weight less"
    )


class HqqBase(PackedBase[Literal["hqq"]]):
    """Half-quadratic quantisation."""

    name: Literal["hqq"] = Field(
        default="hqq", description="few bits a weight, a scale and a zero for each group of a row (HQQ)"
    )
    bits: Literal[8, 4, 3, 2] = Field(default=4, description="bits a weight: 8, 4, 3 or 2")
    group_size: Annotated[int, Field(gt=0, multiple_of=8)] = Field(
        default=64,
        description="weights of a row that share a scale and a zero (a multiple of 8); "
        "small groups are closer to the weights and take more memory",
    )


class SingleStrategy(Section):
    """One process."""

    name: Literal["single"] = Field(default="single", description="one process on one device")
    devices: Literal[1] = Field(default=1, description="number of devices")


class DistributedStrategy(Section, Generic[NameT]):
    """What the strategies of several processes have in common."""

    name: NameT
    devices: PositiveInt = Field(default=2, description="devices in all, over all nodes (processes)")
    nodes: PositiveInt = Field(default=1, description="machines; devices must be a multiple of it")
    timeout_seconds: Annotated[float, Field(gt=0)] = Field(
        default=1800.0, description="longest wait for another rank (seconds)"
    )


class DdpStrategy(DistributedStrategy[Literal["ddp"]]):
    """A full copy of the model on every device; gradients are summed once a step."""

    name: Literal["ddp"] = Field(default="ddp", description="a copy of the model on each device")


class FsdpStrategy(DistributedStrategy[Literal["fsdp"]]):
    """Each device holds its share of the rows of every weight (FSDP2)."""

    name: Literal["fsdp"] = Field(
        default="fsdp", description="a share of each weight on each device, gathered block by block"
    )
    sharding: Literal["full", "grad_op", "hybrid", "hybrid_grad_op"] = Field(
        default="full",
        description="full: weights are gathered for each block in forward and again in backward; "
        "grad_op: they stay gathered between the two (one communication less, memory for all weights); "
        "hybrid, hybrid_grad_op: the same inside a group of shard_devices, with copies between groups",
    )
    shard_devices: PositiveInt | None = Field(
        default=None,
        description="devices of one shard group (hybrid, hybrid_grad_op); default: those of one node",
    )
    cpu_offload: bool = Field(
        default=False,
        description="shards, their gradients and optimizer states live in host memory: weights cross the bus "
        "for each block, and the host computes the step",
    )
    adapter: Literal["auto", "replicated", "sharded"] = Field(
        default="auto",
        description="where LoRA and DoRA parameters live: replicated (on each device, one all-reduce "
        "a step) or sharded as the weights are; auto goes by their size",
    )
    sync_every_micro_batch: bool = Field(
        default=False,
        description="true: gradients stay sharded between micro-batches, at one communication each; "
        "false: one communication a step, gradients of full size until then",
    )


ReftMethods = LoreftMethod | NoreftMethod | ConsreftMethod | LobireftMethod | DireftMethod | NodireftMethod
Part = Annotated[
    Annotated[LoraMethod | DoraMethod | ReftMethods, Field(discriminator="name")],
    BeforeValidator(named_method, str | LoraMethod | DoraMethod | ReftMethods),
]


class TogetherMethod(Section):
    """LoRA or DoRA and a ReFT method in one run: `method: [lora, loreft]`."""

    name: Literal["together"] = Field(default="together", description="several methods on one model")
    parts: Annotated[tuple[Part, ...], BeforeValidator(as_tuple)] = Field(
        default=(LoraMethod(), LoreftMethod()),
        description="the methods, each a name or a section: lora or dora, and one that edits hidden states",
    )


Method = Annotated[
    FullMethod | LoraMethod | DoraMethod | ReftMethods | LlamaProMethod | TogetherMethod,
    Field(discriminator="name"),
]
Base = Annotated[DenseBase | Nf4Base | HqqBase, Field(discriminator="name")]
Strategy = Annotated[SingleStrategy | DdpStrategy | FsdpStrategy, Field(discriminator="name")]


def parts_of(method: Method) -> tuple[Method, ...]:
    """The methods of a run: those that are joined, or the one."""
    return method.parts if isinstance(method, TogetherMethod) else (method,)


def named_strategy(value: Any) -> Any:
    """Let `devices: 2` alone mean ddp, and a bare name stand for its section."""
    value = named(value)
    if isinstance(value, dict) and "name" not in value:
        several = value.get("devices", 1) != 1 or value.get("nodes", 1) != 1  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
        return {**value, "name": "ddp" if several else "single"}  # pyright: ignore[reportUnknownVariableType]
    return value  # pyright: ignore[reportUnknownVariableType]
