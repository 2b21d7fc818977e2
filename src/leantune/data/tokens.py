"""Segments to token ids, with the boundary between prompt and answer exact to the token.

Each segment is tokenised by itself and the ids are joined. Tokenising the whole text and looking
for the boundary afterwards would be wrong wherever a token straddles it ("Answer: " + "42" may
hold a token " 4"): the model would be trained on a prompt that generation never shows it.

A tokenizer that puts BOS before texts puts it here too, once: not again if the template wrote it,
and also if a chat template left it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from leantune.data.markers import Markers
from leantune.data.templates import Segment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Texts put before a continuation, for tokenizers that add a space to the start of every text.
_ANCHORS = ("\n", "]", "=")


class Encoded(NamedTuple):
    """Tokens of one record; `prompt_length` counts those before the first learned segment.

    `marked`: the tokens of marked segments.
    """

    ids: list[int]
    supervised: list[bool]
    prompt_length: int
    marked: list[bool]

    def cut(self, length: int) -> Encoded:
        """The first `length` tokens."""
        prompt_length = min(self.prompt_length, length)
        return Encoded(self.ids[:length], self.supervised[:length], prompt_length, self.marked[:length])


class SegmentEncoder:
    """Tokenises lists of segments. The text starts with what the tokenizer puts there (BOS), once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        eos_id = tokenizer.eos_token_id
        self.eos_id = eos_id if isinstance(eos_id, int) else None
        self.prefix = self._special_prefix()
        tokens = tokenizer.convert_ids_to_tokens(self._tokenize(["a"])[0])
        self._adds_space = str(tokens[0]).startswith(("▁", "Ġ", " "))

    def encode(self, records: Sequence[Sequence[Segment]]) -> list[Encoded]:
        """Each record's tokens. The very first token is never supervised."""
        starts = self._start([record[0].text if record else "" for record in records])
        continued = self._continue([segment.text for record in records for segment in record[1:]])
        encoded, position = list[Encoded](), 0
        for record, start in zip(records, starts, strict=True):
            pieces = [start, *continued[position : position + len(record) - 1]] if record else [start]
            position += max(len(record) - 1, 0)
            encoded.append(self._join(record, pieces))
        return encoded

    def encode_prompts(self, prompts: Sequence[str], markers: Markers | None = None) -> list[Encoded]:
        """Rendered prompts as training saw them, with the spans between `markers` marked.

        Raises `DataError` for markers without a partner.
        """
        records = [[Segment(prompt)] for prompt in prompts]
        if markers is not None:
            records = [markers.split(record, f"prompt {i}") for i, record in enumerate(records, start=1)]
        return self.encode(records)

    def _join(self, record: Sequence[Segment], pieces: Sequence[list[int]]) -> Encoded:
        ids, supervised, marked = list[int](), list[bool](), list[bool]()
        prompt_length: int | None = None
        for number, (segment, piece) in enumerate(zip(record, pieces, strict=True)):
            if segment.supervised and prompt_length is None:
                prompt_length = len(ids)
            hidden = len(self.prefix) if number == 0 and piece[: len(self.prefix)] == self.prefix else 0
            if segment.eos and self.eos_id is not None:
                piece = [*piece, self.eos_id]
            ids += piece
            supervised += [False] * hidden + [segment.supervised] * (len(piece) - hidden)
            marked += [False] * hidden + [segment.marked] * (len(piece) - hidden)
        if supervised:
            supervised[0] = False  # nothing comes before it from which it could be predicted
        return Encoded(ids, supervised, len(ids) if prompt_length is None else prompt_length, marked)

    def _start(self, texts: list[str]) -> list[list[int]]:
        prefix = self.prefix
        return [
            ids if not prefix or ids[: len(prefix)] == prefix else prefix + ids
            for ids in self._tokenize(texts)
        ]

    def _continue(self, texts: list[str]) -> list[list[int]]:
        """Token ids of texts that follow other text."""
        if not self._adds_space:
            return self._tokenize(texts)
        results: dict[int, list[int]] = {}
        for anchor in _ANCHORS:
            missing = [i for i in range(len(texts)) if i not in results]
            marker = self._tokenize([anchor])[0]
            anchored = self._tokenize([anchor + texts[i] for i in missing])
            for i, ids in zip(missing, anchored, strict=True):
                if ids[: len(marker)] == marker:
                    results[i] = ids[len(marker) :]
        missing = [i for i in range(len(texts)) if i not in results]
        results |= dict(zip(missing, self._tokenize([texts[i] for i in missing]), strict=True))
        return [results[i] for i in range(len(texts))]

    def _special_prefix(self) -> list[int]:
        """What the tokenizer itself puts before a text (BOS, as a rule)."""
        bare = self._tokenize(["a"])[0]
        full = list(self.tokenizer("a", verbose=False)["input_ids"])  # pyright: ignore[reportArgumentType]
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start]
        return []

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        encoded = self.tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, truncation=False, verbose=False
        )
        return [list(ids) for ids in encoded["input_ids"]]  # pyright: ignore[reportGeneralTypeIssues,reportArgumentType]
