"""Rules between what a run learns and the rest of it: an objective needs its records and its method."""

from __future__ import annotations

from leantune.config.axes import parts_of
from leantune.config.objectives import ClassificationObjective
from leantune.config.schema import RunConfig

# The shape of the records that an objective other than next_token learns from.
RECORDS = {"classification": "classification", "dpo": "preference", "reward": "preference"}
_GENERATED = ("dummy", "text-to-sql")


def check_objective(config: RunConfig) -> list[str]:
    """Every problem of `objective` with the other sections."""
    name, shape = config.objective.name, RECORDS.get(config.objective.name)
    if shape is None:
        return _check_next_token(config)
    problems = _check_labels(config) + _check_trained(config)
    if config.data.train in _GENERATED:
        source = config.data.train
        problems.append(f"objective: {name} needs {shape} records, which data.train {source} has not")
    elif config.data.format not in ("auto", shape):
        problems.append(
            f"data.format: {config.data.format}, but objective {name} learns from {shape} records; set "
            f"data.format: {shape}, or leave it out"
        )
    if config.data.train_on != "answer":
        problems.append(f"data.train_on: has no effect here, because objective is {name}; remove the key")
    if config.train.loss_chunk_tokens is not None:
        problems.append(
            f"train.loss_chunk_tokens: has no effect here, because objective {name} has no loss per token; "
            "remove the key"
        )
    return problems


def _check_next_token(config: RunConfig) -> list[str]:
    objectives = [name for name, shape in RECORDS.items() if shape == config.data.format]
    if not objectives:
        return []
    return [
        f"data.format: {config.data.format} records are learned with an objective of their own; set "
        f"objective: {' or '.join(objectives)}"
    ]


def _check_labels(config: RunConfig) -> list[str]:
    objective = config.objective
    labels = objective.labels if isinstance(objective, ClassificationObjective) else None
    twice = sorted({label for label in labels or () if (labels or ()).count(label) > 1})
    return [f"objective.labels: {', '.join(twice)} named twice; name each class once"] if twice else []


def _check_trained(config: RunConfig) -> list[str]:
    """A reference that is the model without its adapter, or an adapter folder that a head goes into."""
    name, method = config.objective.name, config.method
    needs = "compares with the model without adapter" if name == "dpo" else "saves its head with an adapter"
    if method.name in ("full", "llama_pro"):
        return [
            f"method: {method.name} has no adapter, but objective {name} {needs}; use lora, dora or a ReFT "
            "method"
        ]
    if not any(getattr(part, "train_embeddings", False) for part in parts_of(method)):
        return []
    reason = "changes the model itself" if name == "dpo" else "trains the output head, which is not used"
    return [f"method.train_embeddings: {reason}, but objective {name} {needs}; remove the key"]
