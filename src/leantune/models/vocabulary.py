"""Tokens that are added to a model: in its tokenizer, in its configuration, and as rows of its embeddings."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken
from torch import nn
from transformers import PreTrainedTokenizerBase

from leantune.errors import ModelError
from leantune.models.anatomy import input_embeddings, output_head
from leantune.models.source import ModelSource, load_config, load_tokenizer

_SHOWN = 8


@dataclass(frozen=True)
class Growth:
    """Rows of the embeddings and the output head: those of the checkpoint, and with the added tokens.

    The two are equal if the checkpoint has rows to spare. New rows start as the mean of its rows.
    """

    before: int
    after: int

    def describe(self, model: nn.Module) -> str:
        """What becomes of the rows of this model."""
        if self.after == self.before:
            return f"the added tokens take rows that the model has to spare: it has {self.before}"
        embedding, head = vocabulary_modules(model)
        tied = "tied" if embedding.weight is head.weight else "not tied"
        return (
            f"embeddings and output head ({tied}) have {self.after} rows, {self.after - self.before} more "
            "than the checkpoint; the new ones start as the mean of the others"
        )


def load_vocabulary(
    source: ModelSource, tokenizer: str | None, added: Sequence[str]
) -> tuple[PreTrainedTokenizerBase, Growth | None]:
    """The tokenizer of the model, or the one named, with tokens `added`; and the rows that they need."""
    loaded = load_tokenizer(source, tokenizer)
    if not added:
        return loaded, None
    return loaded, add_tokens(loaded, added, embedding_rows(load_config(source)))


def add_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str], rows: int) -> Growth:
    """Let the tokenizer read each of `tokens`, wherever it stands in a text, as one ordinary token.

    `rows` is how many embedding rows the model has. A token that the tokenizer has already, but the model
    has no row for, gets its row. Raises `ModelError` for tokens that are in use.
    """
    present = tokenizer.get_vocab()
    known = [token for token in tokens if present.get(token, rows) < rows]
    if known:
        raise ModelError(
            f"model.add_tokens: {_listed(known)}: the tokenizer has {'it' if len(known) == 1 else 'them'} "
            "already, with an embedding; remove from the list what is not new"
        )
    # As they are written: a tokenizer that folds case or spaces would also find them in other texts.
    new: Any = [AddedToken(t, normalized=False, special=False) for t in tokens if t not in present]
    tokenizer.add_tokens(new)
    ids = [tokenizer.get_vocab()[token] for token in tokens]
    return Growth(rows, max(rows, 1 + max(ids)))


def describe_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> str:
    """`2 tokens added: '<a>' (400), '<b>' (401)`."""
    vocabulary = tokenizer.get_vocab()
    shown = ", ".join(f"{token!r} ({vocabulary[token]})" for token in tokens[:_SHOWN])
    more = f" and {len(tokens) - _SHOWN} more" if len(tokens) > _SHOWN else ""
    return f"{len(tokens)} token{'s' if len(tokens) > 1 else ''} added: {shown}{more}"


def embedding_rows(config: Any) -> int:
    """The number of embedding rows that a model's configuration asks for."""
    return int(config.get_text_config(decoder=True).vocab_size)


def grown_config(config: Any, growth: Growth, name: str) -> Any:
    """A copy of a model's configuration with more rows.

    Raises `ModelError` if it has another number of rows than the model that tokens were added to.
    """
    rows = embedding_rows(config)
    if rows != growth.before:
        raise ModelError(
            f"model.name: {name} has {rows} embedding rows, but the tokens were added to a model that has "
            f"{growth.before}; use the model that was trained on"
        )
    grown = copy.deepcopy(config)
    grown.get_text_config(decoder=True).vocab_size = growth.after
    return grown


def check_grown(original: nn.Module, grown: nn.Module, sources: Mapping[str, str | None]) -> None:
    """Embeddings and head have got their rows, and no other weight has another shape than before.

    `sources`: the name in the original model of each weight of the grown one. Both may be on the meta
    device. Raises `ModelError` naming a weight that would not know the new tokens.
    """
    before, after = original.state_dict(), grown.state_dict(keep_vars=True)
    allowed = {id(p) for m in vocabulary_modules(grown) for p in m.parameters(recurse=False)}
    for name, place in sources.items():
        if place is not None and id(after[name]) not in allowed and after[name].shape != before[place].shape:
            raise ModelError(
                f"model.add_tokens: {name} of {type(grown).__name__} has a row for each token too, and only "
                "those of embeddings and output head can be added; resize the model with its own code first"
            )


def vocabulary_modules(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The modules with a row for each token: the input embedding and the output head."""
    return input_embeddings(model), output_head(model)


def vocabulary_names(model: nn.Module) -> tuple[str, str]:
    """The full names of the two `vocabulary_modules`."""
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head = vocabulary_modules(model)
    return names[id(embedding)], names[id(head)]


def last_names(model: nn.Module, names: Sequence[str]) -> list[str]:
    """The last part of each full module name, or all full names if the name of another module ends so too."""
    every = [name for name, _ in model.named_modules(remove_duplicate=False)]
    last = [name.rpartition(".")[2] for name in names]
    return last if all(sum(other.endswith(n) for other in every) == 1 for n in last) else list(names)


def _listed(tokens: Sequence[str]) -> str:
    more = f" and {len(tokens) - _SHOWN} more" if len(tokens) > _SHOWN else ""
    return ", ".join(map(repr, tokens[:_SHOWN])) + more
