"""What the trained head of a model says: the class of texts, the reward of answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from leantune.checkpoint.trained import Trained
from leantune.data.batches import collate, cut_window
from leantune.data.encode import encode_examples
from leantune.data.examples import Example
from leantune.data.judged import answered_example, classification_example
from leantune.data.readers import Row
from leantune.errors import ConfigError, DataError
from leantune.evaluate.run import encoding_rules
from leantune.generate.decode import evaluating
from leantune.methods.head import AttachedHead, head_of
from leantune.train.forward import head_outputs


def classify(trained: Trained, texts: Sequence[str | tuple[str, str]], batch_size: int = 16) -> list[str]:
    """The class of each text (or pair of texts), as in training; longer texts are truncated as there.

    Raises `ConfigError` for a model that has not learned classes, `DataError` for an empty text.
    """
    head = _head(trained, "classify", "classification")
    assert head.labels is not None
    pairs = [(text, "") if isinstance(text, str) else text for text in texts]
    rows = [Row({"text": a, "text_b": b}, f"text {i}", i - 1) for i, (a, b) in enumerate(pairs, start=1)]
    examples = [classification_example(row, {}, require_label=False) for row in rows]
    return [head.labels[i] for i in _outputs(trained, examples, batch_size).argmax(dim=1).tolist()]


def reward(
    trained: Trained, prompts: Sequence[str], answers: Sequence[str], batch_size: int = 16
) -> list[float]:
    """The reward of each answer to its prompt; only differences between answers to one prompt mean anything.

    Raises `ConfigError` for a model that has not learned rewards, `DataError` for an empty answer, or if
    there are more or fewer answers than prompts.
    """
    _head(trained, "reward", "reward")
    if len(prompts) != len(answers):
        raise DataError(f"{len(prompts)} prompts, but {len(answers)} answers; expected one for each")
    format = trained.template.format
    pairs = enumerate(zip(prompts, answers, strict=True), start=1)
    examples = [answered_example(prompt, answer, format, f"answer {i}") for i, (prompt, answer) in pairs]
    return _outputs(trained, examples, batch_size)[:, 0].tolist()


def _head(trained: Trained, verb: str, objective: str) -> AttachedHead:
    head = head_of(trained.attached)
    if head is None or (head.labels is None) != (objective == "reward"):
        raise ConfigError(
            f"{verb}: {trained.name} was not trained with objective {objective}, so it has no head for that"
        )
    return head


def _outputs(trained: Trained, examples: Sequence[Example], batch_size: int) -> Tensor:
    """What the head says of each example: fp32 [n, outputs] on the CPU."""
    empty = next((example for example in examples if example.drop_reason), None)
    if empty is not None:
        raise DataError(f"{empty.where}: {empty.drop_reason}")
    if not examples:
        return torch.zeros(0, 1)
    # Every example has its outputs: none is dropped for its length, or because it has nothing to learn.
    rules = replace(encoding_rules(trained), too_long="truncate", train_on="label")
    records = encode_examples(examples, trained.template, rules, source="the texts")
    outputs: dict[int, Tensor] = {}
    with evaluating(trained.model):
        for chunk in cut_window(records, np.arange(len(records)), batch_size).chunks:
            batch = collate(records, chunk, pad_id=0).to(trained.model.device)
            with trained.attached.edits(batch.prompt_lengths, **batch.edit_options):
                rows = head_outputs(trained.attached, batch, trained.precision).cpu()
            outputs |= dict(zip(chunk.tolist(), rows, strict=True))
    return torch.stack([outputs[i] for i in range(len(records))])
