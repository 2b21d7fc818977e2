"""What may be asked of interventions while a model answers: how strong, which subspaces, which tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from leantune.config.subspaces import Choice, read_choice
from leantune.errors import ConfigError, ModelError
from leantune.methods.choice import AdapterSet
from leantune.methods.protocol import Attached

_STRONGEST = 100

EditedTokens = Literal["prompt", "all", "new"]


class Asked(Protocol):
    """What is asked for one prompt; None: as it was trained.

    adapter: the one that acts, of several; strength: what interventions add is multiplied by it;
    subspaces: bool [rank], the dimensions that act; generation: which tokens are edited, the same for all
    prompts of a batch.
    """

    @property
    def adapter(self) -> str | None: ...
    @property
    def strength(self) -> float | None: ...
    @property
    def subspaces(self) -> Tensor | None: ...
    @property
    def generation(self) -> str | None: ...


class AskedOf(NamedTuple):
    """`EditSettings` as one model understands them."""

    strength: float | None = None
    subspaces: Tensor | None = None
    generation: EditedTokens | None = None
    adapter: str | None = None


@dataclass(frozen=True)
class EditSettings:
    """How the interventions of a ReFT adapter act while it is used; the defaults leave them as trained.

    strength: what they add is multiplied by it (0: the untouched model); subspaces: names of
    `method.subspaces` and dimensions that act alone, as a list or as text with commas; generation: the
    tokens that are edited: prompt (at its positions), all (also every token after it), new (those alone);
    adapter: of a model with several adapters (`checkpoint.adapter.load_adapters`) the one that acts.
    Raises `ConfigError` for a value that cannot be obeyed.
    """

    strength: float = 1.0
    subspaces: Choice | None = None
    generation: EditedTokens | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        problems = list[str]()
        number = isinstance(self.strength, int | float) and not isinstance(self.strength, bool)
        if not number or not abs(self.strength) <= _STRONGEST:
            problems.append(
                f"strength: {self.strength!r} is not a number from -{_STRONGEST} to {_STRONGEST}; 1 is as "
                "trained, 0 the untouched model"
            )
        if self.generation not in (None, "prompt", "all", "new"):
            problems.append(f"generation: {self.generation!r} is none of prompt, all, new")
        if self.subspaces is not None:
            try:
                object.__setattr__(self, "subspaces", read_choice(self.subspaces))
            except ValueError as error:
                problems.append(f"subspaces: {error}")
        if problems:
            raise ConfigError(problems)

    def of(self, attached: Attached) -> AskedOf:
        """The same for one model; raises `ModelError` for what it cannot obey."""
        if self.adapter is not None:
            return (
                replace(self, adapter=None).of(_chosen(attached, self.adapter))._replace(adapter=self.adapter)
            )
        own = AskedOf(None if self.strength == 1 else self.strength, None, self.generation)
        asked = {"strength": own.strength, "generation": own.generation, "subspaces": self.subspaces}
        keys = [key for key, value in asked.items() if value is not None]
        if keys and not attached.edits_states:
            raise ModelError(
                f"{', '.join(keys)}: method {attached.name} has no interventions to obey it; leave it out"
            )
        return (
            own if self.subspaces is None else own._replace(subspaces=attached.subspace_mask(self.subspaces))
        )


AS_TRAINED = EditSettings()


def _chosen(attached: Attached, name: str) -> Attached:
    """One of several adapters."""
    adapters = attached.adapters if isinstance(attached, AdapterSet) else {}
    if name not in adapters:
        raise ModelError(
            f"adapter {name!r} is not loaded; there are: {', '.join(adapters) or 'none to choose'}"
        )
    return adapters[name]


def edit_options(prompts: Sequence[Asked], device: torch.device) -> dict[str, Any]:
    """What `Attached.edits` is told of these prompts, besides their lengths.

    Only what a prompt asks for is told; those that do not ask have it as it was trained.
    """
    options: dict[str, Any] = {}
    if any(prompt.adapter is not None for prompt in prompts):
        options["adapters"] = [prompt.adapter for prompt in prompts]
    if any(prompt.strength is not None for prompt in prompts):
        factors = [1.0 if prompt.strength is None else prompt.strength for prompt in prompts]
        options["strength"] = torch.tensor(factors, device=device)
    masks = [prompt.subspaces for prompt in prompts]
    if any(mask is not None for mask in masks):
        width = max(len(mask) for mask in masks if mask is not None)
        all_of_them = torch.ones(width, dtype=torch.bool)
        padded = [all_of_them if mask is None else _widened(mask, width) for mask in masks]
        options["subspaces"] = torch.stack(padded).to(device)
    if prompts[0].generation is not None:
        options["generation"] = prompts[0].generation
    return options


def _widened(mask_R: Tensor, width: int) -> Tensor:
    return nn.functional.pad(mask_R, (0, width - len(mask_R)), value=True)
