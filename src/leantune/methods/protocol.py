"""What every method offers to the loop, to checkpoints and to generation.

A method is one file of this folder with a function `attach(model, *, seed, **settings)` that
prepares the model in place and returns an `Attached`; a file that serves several methods names them in
`METHODS` and is told which one as `method`. If it saves an adapter, it also has
`CONFIG_FILE` and `settings_from(config)`, the way back from the saved configuration; methods
that share a file name also have `accepts(config)`, which tells their configurations apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from leantune.errors import CheckpointError, ModelError
from leantune.methods.embeddings import TrainedEmbeddings
from leantune.methods.prompts import EditOptions
from leantune.models.anatomy import decoder_blocks


@dataclass(frozen=True)
class AdapterFiles:
    """A trained adapter as it goes to disk: a JSON configuration and named tensors."""

    config_file: str
    config: dict[str, Any]
    tensors_file: str
    tensors: dict[str, Tensor]


class Attached:
    """A method attached to a model: which parameters it owns, and its part in a step.

    The defaults are those of a method that is nothing but parameters.
    """

    # Whether the method's own parameters must be whole on every rank, because a row means nothing alone,
    # and fp32 in every precision.
    always_whole = False
    # Whether it edits hidden states, so that strength, subspaces and generation of `edits` mean something.
    edits_states = False
    # Whether dimensions of its subspace have names, so that the field `subspaces` of records counts.
    names_subspaces = False
    # The strings between which prompts are edited, if a position is `markers`.
    markers: tuple[str, str] | None = None
    # The embeddings of the model, if they are trained too.
    embeddings: TrainedEmbeddings | None = None

    def __init__(self, name: str, model: nn.Module) -> None:
        self.name = name
        self.model = model

    def trainable(self) -> dict[str, nn.Parameter]:
        """The trained parameters by a name that is stable across runs."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def decay_free(self) -> set[str]:
        """Names that weight decay must leave alone; by default vectors (norms, biases)."""
        return {name for name, parameter in self.trainable().items() if parameter.ndim < 2}

    def parts(self) -> Sequence[Attached]:
        """The methods that this is made of, each with files of its own; as a rule it alone."""
        return [self]

    def own(self) -> set[str]:
        """Names of the trained parameters that the method itself brought, if it must tell them apart."""
        return set(self.trainable())

    def pinned(self) -> set[str]:
        """Names of trained parameters that are whole on every rank, and fp32 in every precision."""
        return self.own() if self.always_whole else set()

    def frozen_blocks(self) -> int:
        """How many leading decoder blocks compute the same whatever is trained, hooks on them aside."""
        if self.embeddings is not None:
            return 0
        blocks, own = list(decoder_blocks(self.model)), self.own()
        trained = (any(name.startswith(f"{block}.") for name in own) for block in blocks)
        return next((index for index, found in enumerate(trained) if found), len(blocks))

    def edits(
        self, prompt_lengths: Tensor, prompt_starts: Tensor | None = None, **options: Unpack[EditOptions]
    ) -> AbstractContextManager[None]:
        """Forward passes inside this context edit these prompts.

        prompt_lengths: int64 [P], tokens of each prompt; prompt_starts: int64 [P], index of the
        first one (more than 0 with left padding). With a KV cache, only the first forward
        pass of the context (the prefill) has prompts in it.
        """
        del prompt_lengths, prompt_starts, options
        return nullcontext()

    def subspace_mask(self, names: Sequence[str | int]) -> Tensor:
        """The dimensions that act if these subspaces are chosen, bool [rank]; `ModelError` if it has none."""
        del names
        raise ModelError(f"method {self.name} has no subspaces to choose from; leave them out")

    def disabled(self) -> AbstractContextManager[None]:
        """Forward passes inside this context are those of the untouched model.

        Raises `ModelError` if weights of the model itself are trained, so that there is none to go back to.
        """
        return nullcontext()

    def refuse_if_changed(self) -> None:
        """What `disabled` of a method that can have trained embeddings does first."""
        if self.embeddings is not None:
            raise ModelError(
                "method.train_embeddings changed the embeddings themselves; load the base model to compare"
            )

    def num_edited(self, prompt_length: int) -> int | None:
        """How many tokens of a prompt this method edits; None if it does not go by position."""
        del prompt_length
        return None

    def row_norm_targets(self) -> Mapping[str, nn.Module]:
        """The linear layers whose row norms the method needs once they are loaded, by full name."""
        return {}

    def set_row_norms(self, name: str, unquantised: Tensor, stored: Tensor) -> None:
        """Take the row norms of one of the `row_norm_targets`, float32 [out] each.

        unquantised: of the checkpoint's own weight; stored: of the weight that the layer computes
        with. Parameters that start from them are set anew, so a checkpoint is restored after this.
        """
        del name, unquantised, stored

    def before_step(self) -> None:
        """Called after gradients are summed over ranks, before clipping and the optimizer."""

    def after_step(self) -> None:
        """Called after the optimizer has changed the parameters."""

    def describe(self) -> list[str]:
        """Lines for the user: what was matched."""
        return []

    def export(self) -> AdapterFiles | None:
        """The adapter as it is saved; None if the method saves a whole model."""
        return None

    def adapter_files(self) -> list[AdapterFiles]:
        """What the parts save; empty if the model is saved whole."""
        return [files for part in self.parts() if (files := part.export()) is not None]

    def check_saved(self, config: Mapping[str, Any]) -> None:
        """Raise `CheckpointError` if a saved configuration means something else than what was attached."""
        del config

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], origin: str) -> None:
        """Give the parameters the values of an export; names and shapes must match exactly.

        Raises `CheckpointError` naming what is missing, unexpected, or of another shape.
        """
        files = self.export()
        expected = files.tensors if files else {}
        missing = sorted(expected.keys() - tensors.keys())
        unexpected = sorted(tensors.keys() - expected.keys())
        shapes = [
            f"{name} is {tuple(tensors[name].shape)}, expected {tuple(expected[name].shape)}"
            for name in expected.keys() & tensors.keys()
            if tensors[name].shape != expected[name].shape
        ]
        problems = [f"missing: {', '.join(missing[:5])} ({len(missing)} in all)"] if missing else []
        if unexpected:
            problems.append(
                f"matching nothing in the model: {', '.join(unexpected[:5])} ({len(unexpected)} in all)"
            )
        problems += sorted(shapes)[:5] or _torn(expected, tensors)
        if problems:
            raise CheckpointError(f"{origin} does not fit this model; " + "; ".join(problems))
        for name, parameter in expected.items():  # the export holds the parameters' own storage
            parameter.copy_(tensors[name])


def _torn(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> list[str]:
    """Tensors that differ although the model has them as one, under two names."""
    first: dict[int, str] = {}
    pairs = [(first.setdefault(id(tensor), name), name) for name, tensor in expected.items()]
    return [
        f"{one} and {other} are tied in this model, but differ"
        for one, other in pairs
        if one in tensors and other in tensors and not torch.equal(tensors[one], tensors[other])
    ]


def free_name(modules: Iterable[nn.Module], name: str) -> str:
    """A name that none of these modules has for a part of its own: the name, or with a number behind it."""
    taken = {child for module in modules for child, _ in module.named_children()}
    candidates = (name if number == 0 else f"{name}_{number}" for number in range(len(taken) + 1))
    return next(candidate for candidate in candidates if candidate not in taken)


def named_generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator that depends on the seed and the name alone: equal on every rank, in any order."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def home(module: nn.Module) -> torch.device:
    """Where new parameters of a module are made: on its device, or the CPU while it has no memory yet."""
    device = next(module.parameters()).device
    return torch.device("cpu") if device.type == "meta" else device
