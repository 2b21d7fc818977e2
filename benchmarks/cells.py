"""One cell of method × base × strategy without a run around it: model, placement, optimizer, one step.

What `leantune.train.build` does from a configuration, composed from plain values, so that it needs
torch, transformers, numpy and safetensors alone. Also random models and batches to measure it on.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from leantune.bases import build_base, fill
from leantune.data.batches import MicroBatch
from leantune.methods import Attached, attach
from leantune.models.anatomy import decoder_blocks, linear_sizes, linears, output_head, text_config
from leantune.models.empty import materialise
from leantune.models.expand import check_identity, plan_expansion
from leantune.models.precision import Precision, choose_precision
from leantune.models.shards import local_rows
from leantune.models.source import load_config, resolve_model
from leantune.strategies.placement import Placement
from leantune.strategies.process import World
from leantune.train.forward import summed_loss
from leantune.train.optimizer import build_optimizer, set_learning_rate

# The shape of TinyLlama-1.1B, and one that a CPU trains in milliseconds (64 columns can be packed).
LLAMA_1B = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}
LLAMA_TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"rank": 16},
    "dora": {"rank": 16},
    "loreft": {"rank": 8},
    "llama_pro": {"blocks": 2},
}
FLOPS = (
    "FLOPs are 2 a weight of the linear layers and token forward, 2 more for the gradient of the input in "
    "every block from the first trained one on, 2 more for that of the weight where it is trained: "
    "4·N·tokens with frozen weights, 6·N·tokens with method full. The head counts for labelled tokens only; "
    "attention adds 2·tokens·length·width a layer (causal), 3 times that with backward. De-quantising and "
    "the products of adapters do not count."
)


@dataclass
class Cell:
    """A model that is ready to train on this rank."""

    model: Any
    attached: Attached
    placement: Placement
    optimizer: torch.optim.Optimizer
    precision: Precision
    world: World

    def step(
        self, batch: MicroBatch, *, norm: bool = True, clip: float | None = None, rate: float | None = None
    ) -> Tensor:
        """One optimizer step as the training loop takes it, every rank with a batch of its own.

        `norm`: compute the gradient norm, as the loop does for its log; `clip` needs it. Returns the mean
        loss of all tokens of all ranks, [1], which nobody has waited for yet.
        """
        if rate is not None:
            set_learning_rate(self.optimizer, rate)
        count = len(batch.labels) * self.world.size
        self.placement.begin_pass(last=True)
        with self.attached.edits(batch.prompt_lengths):
            loss = summed_loss(self.model, batch, self.precision)
            (loss / count).backward()
        total = loss.detach().reshape(1) / count
        self.placement.sum_gradients(total)
        self.attached.before_step()
        if norm or clip is not None:
            size = self.placement.total_norm()
            float(size)  # the loop looks at it: it must be finite
            if clip is not None:
                nn.utils.clip_grads_with_norm_(self.placement.trained.values(), clip, size)
        self.optimizer.step()
        self.attached.after_step()
        self.optimizer.zero_grad(set_to_none=True)
        return total


def build_cell(
    method: str,
    base: str,
    strategy: str,
    model: str,
    world: World,
    *,
    precision: str = "fp32",
    settings: Mapping[str, Any] | None = None,
    placing: Mapping[str, Any] | None = None,
    learning_rate: float = 1e-3,
    seed: int = 0,
) -> Cell:
    """Build, shard and load; a collective. `settings` are the method's, `placing` those of fsdp."""
    chosen = choose_precision(precision, world.device)
    source = resolve_model(model)
    settings = METHODS[method] if settings is None else settings
    expansion = plan_expansion(load_config(source), settings["blocks"]) if "blocks" in settings else None
    built = build_base(base, source, chosen, expansion=expansion)
    attached = attach(method, built.model, settings, seed)
    stored = {name for name, p in built.model.named_parameters() if p.device.type == "meta"}
    trainable = attached.trainable()
    for parameter in trainable.values():
        parameter.data = parameter.data.to(chosen.trained)
    options: dict[str, Any] = {}
    if strategy == "fsdp":
        new = frozenset(trainable) - stored
        options = {
            "new_parameters": new,
            "gather_dtype": chosen.compute if len(trainable) > len(new) else None,
            "pinned": frozenset(attached.pinned()),
            **(placing or {}),
        }
    place = importlib.import_module(f"leantune.strategies.{strategy}").place
    placement: Placement = place(built.model, trainable, world, **options)
    materialise(built.model, world.device, placement.parameters_device())
    targets = attached.row_norm_targets()
    norms = fill(built, world.device, norms_of=list(targets.values()))
    for name, module in targets.items():
        attached.set_row_norms(name, *norms[module])
    placement.take(attached.trainable())
    if expansion is not None:
        check_identity(built.model, expansion)
        placement.end_passes()
    optimizer = build_optimizer(
        placement.trained,
        attached.decay_free(),
        name="adamw",
        learning_rate=learning_rate,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        momentum=0.0,
        rho=0.9,
    )
    built.model.train()
    return Cell(built.model, attached, placement, optimizer, chosen, world)


def flops_of_step(cell: Cell, batch: MicroBatch) -> float:
    """Floating-point operations of a step, as `FLOPS` says; `batch`: what this rank trains on."""
    config = text_config(cell.model)
    num_records, length = batch.input_ids.shape
    tokens = num_records * length
    width = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    layers = linears(cell.model)
    total = 0.0
    below_first = True
    for name, block in decoder_blocks(cell.model).items():
        below_first &= not any(p.requires_grad for p in block.parameters())
        mine = [module for key, module in layers.items() if key.startswith(f"{name}.")]
        passes = 1 if below_first else 2
        for module in mine:
            total += 2.0 * tokens * weights(module) * (passes + is_trained(module))
        total += 2.0 * tokens * length * width * (1 if below_first else 3)
    head = output_head(cell.model)
    return total + 2.0 * len(batch.labels) * weights(head) * (2 + is_trained(head))


def weights(module: torch.nn.Module) -> int:
    """Values in the matrix of a linear layer."""
    rows, columns = linear_sizes(module)
    return rows * columns


def is_trained(module: torch.nn.Module) -> bool:
    """Whether the matrix itself is trained, not only an adapter on it."""
    weight = getattr(module, "weight", None)
    return weight is not None and weight.requires_grad


def held_bytes(model: nn.Module) -> int:
    """Bytes of the parameters and buffers that this rank holds; tied ones count once."""
    tensors = {id(t): local_rows(t).local for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


class TensorBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that come to life inside, exactly: `live` now, and at the `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                self._count(value.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)


def random_llama(
    folder: Path, shape: Mapping[str, int], dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Path:
    """A Llama of this shape with random weights, the same for the same seed and device; no tokenizer."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, LlamaConfig

    settings: dict[str, Any] = {**shape, "tie_word_embeddings": False, "dtype": dtype}
    config = LlamaConfig(**settings)
    with torch.device("meta"):
        names = AutoModelForCausalLM.from_config(config).state_dict()
    generator = torch.Generator(device).manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, empty in names.items():
        value = torch.ones(empty.shape, device=device)
        if empty.ndim > 1:
            value.normal_(0.0, 0.02, generator=generator)
        tensors[name] = value.to(dtype).cpu()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    return folder


def random_batch(
    vocab_size: int, num_records: int, length: int, device: torch.device, seed: int = 0
) -> MicroBatch:
    """Records of random tokens, all of one length; the second half of each is its answer."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (num_records, length), generator=generator)
    prompt = length // 2
    starts = length * torch.arange(num_records).unsqueeze(1)
    index = (starts + torch.arange(prompt - 1, length - 1)).flatten()
    batch = MicroBatch(
        sample_ids=tuple(range(num_records)),
        input_ids=tokens,
        lengths=torch.full((num_records,), length),
        prompt_lengths=torch.full((num_records,), prompt),
        label_index=index,
        labels=tokens[:, prompt:].flatten(),
        seed=seed,
    )
    return batch.to(device)
