"""What a run learns from its records: the next token, a class, or which of two answers is better."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field

from leantune.config.section import Section

OBJECTIVES = ("next_token", "classification", "dpo", "reward")


def label_text(value: Any) -> str | None:
    """A class as text: texts as they are, whole numbers, true and false; None for anything else."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, str | int) else None


def _as_labels(value: Any) -> Any:
    """Let `labels: [0, 1]` stand for `labels: ["0", "1"]`."""
    if not isinstance(value, list | tuple):
        return value
    return tuple(label_text(label) or label for label in cast("list[Any]", value))


Labels = Annotated[
    tuple[str, ...],
    BeforeValidator(_as_labels, json_schema_input_type=list[str | int | bool]),
    Field(min_length=2),
]


class NextTokenObjective(Section):
    """Language modelling."""

    name: Literal["next_token"] = Field(
        default="next_token", description="learn the tokens of the answers (mean loss per token)"
    )


class ClassificationObjective(Section):
    """A class for each text."""

    name: Literal["classification"] = Field(
        default="classification",
        description="learn the label of each text with a head on the final state of its last token",
    )
    labels: Labels | None = Field(
        default=None,
        description="the classes, in the order of the head's outputs; default: those of the "
        "training records, sorted",
    )


class DpoObjective(Section):
    """Direct Preference Optimization (arXiv 2305.18290)."""

    name: Literal["dpo"] = Field(
        default="dpo",
        description="make chosen answers likelier than rejected ones, measured against the model without "
        "the adapter",
    )
    beta: Annotated[float, Field(gt=0)] = Field(
        default=0.1,
        description="strength of the pull towards the model without the adapter (beta of the paper)",
    )


class RewardObjective(Section):
    """A reward model."""

    name: Literal["reward"] = Field(
        default="reward",
        description="learn a number for each answer that is higher for chosen than for rejected ones, with a "
        "head on the final state of the last token",
    )


Objective = Annotated[
    NextTokenObjective | ClassificationObjective | DpoObjective | RewardObjective, Field(discriminator="name")
]
