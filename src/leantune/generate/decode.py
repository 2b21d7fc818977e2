"""Batched and streamed decoding with any attached method.

Padding is left padding, masked by length. The model's own `generation_config.json` is set
aside while decoding, so that only what the caller asked for decides.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from queue import Queue
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from leantune.data.tokens import Encoded
from leantune.errors import ConfigError, DataError
from leantune.generate.edits import AS_TRAINED, AskedOf, EditSettings, edit_options
from leantune.generate.pieces import TextPieces, answer_text
from leantune.generate.prompts import PromptBatch, encode_prompts, left_pad, pad_id, stop_ids
from leantune.generate.sampling import Sampling
from leantune.methods.head import refuse_writing
from leantune.methods.protocol import Attached

__all__ = ["Sampling", "generate", "stream"]


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    sampling: Sampling,
    *,
    attached: Attached | None = None,
    stop_token_ids: Iterable[int] = (),
    edits: EditSettings | Sequence[EditSettings] = AS_TRAINED,
    batch_size: int = 16,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[str]:
    """Continue rendered prompts; answers come in the order of the prompts, without end tokens.

    `stop_token_ids` (those of the template) end an answer besides the EOS of model and tokenizer.
    `edits`: how interventions act, for all prompts or for each of them. `on_progress(done, total)` counts
    prompts. Raises `DataError` for a prompt that is empty or too long for the model.
    """
    if isinstance(prompts, str):
        raise DataError("prompts is one string; expected a list of strings")
    if batch_size < 1:
        raise ConfigError(f"batch_size: {batch_size} is out of range; expected at least 1")
    decoder = _Decoder.of(model, tokenizer, sampling, attached, stop_token_ids)
    asked = decoder.prompts(prompts, edits)
    # The longest come first: if memory is short, it shows in the first batch.
    order = sorted(range(len(asked)), key=lambda i: -len(asked[i].encoded.ids))
    answers = [""] * len(asked)
    with evaluating(model), _seeded(sampling, decoder.device):
        for begin in range(0, len(order), batch_size):
            chosen = order[begin : begin + batch_size]
            for index, tokens in zip(chosen, decoder.run([asked[i] for i in chosen]), strict=True):
                answers[index] = decoder.text(tokens)
            if on_progress is not None:
                on_progress(min(begin + batch_size, len(order)), len(order))
    return answers


def stream(
    model: Any,
    tokenizer: Any,
    prompt: str,
    sampling: Sampling,
    attached: Attached | None = None,
    *,
    stop_token_ids: Iterable[int] = (),
    edits: EditSettings = AS_TRAINED,
) -> Generator[str, None, None]:
    """Yield the answer to one prompt piece by piece; joined, the pieces are what `generate` returns.

    The model works in a thread; its errors are raised here, and closing the iterator stops it.
    """
    if sampling.num_beams > 1:
        raise ConfigError(
            f"num_beams: {sampling.num_beams} cannot be streamed, since beams change their minds; "
            "set num_beams to 1, or generate the whole answer"
        )
    decoder = _Decoder.of(model, tokenizer, sampling, attached, stop_token_ids)
    return _stream(model, decoder, decoder.prompts([prompt], edits))


def _stream(model: Any, decoder: _Decoder, prompts: Sequence[_Prompt]) -> Generator[str, None, None]:
    pieces = _Pieces(decoder)

    def work() -> None:
        try:
            with evaluating(model), _seeded(decoder.sampling, decoder.device):
                decoder.run(prompts, pieces)
            pieces.queue.put(None)
        except BaseException as error:  # whatever it is, it belongs to the consumer
            pieces.queue.put(error)

    worker = threading.Thread(target=work, name="leantune-stream", daemon=True)
    worker.start()
    try:
        while (piece := pieces.queue.get()) is not None:
            if isinstance(piece, BaseException):
                raise piece
            yield piece
    finally:
        pieces.stopped.set()
        worker.join()


class _Prompt(NamedTuple):
    """A prompt as tokens, and what is asked of the interventions for it."""

    encoded: Encoded
    asked: AskedOf


@dataclass(frozen=True)
class _Decoder:
    """What all batches of one call share."""

    model: Any
    tokenizer: Any
    sampling: Sampling
    attached: Attached
    stops: frozenset[int]
    pad: int
    device: torch.device

    @classmethod
    def of(
        cls,
        model: Any,
        tokenizer: Any,
        sampling: Sampling,
        attached: Attached | None,
        stop_token_ids: Iterable[int],
    ) -> _Decoder:
        attached = attached if attached is not None else Attached("none", model)
        refuse_writing(attached)
        return cls(
            model,
            tokenizer,
            sampling,
            attached,
            frozenset(stop_ids(model, tokenizer)) | frozenset(stop_token_ids),
            pad_id(model, tokenizer),
            model.get_input_embeddings().weight.device,
        )

    def prompts(self, texts: Sequence[str], edits: EditSettings | Sequence[EditSettings]) -> list[_Prompt]:
        """Encode rendered prompts; raises `LeantuneError` for what the model cannot read or obey."""
        settings = [edits] * len(texts) if isinstance(edits, EditSettings) else edits
        if len(settings) != len(texts) or len({one.generation for one in settings}) > 1:
            raise ConfigError(
                f"edits: {len(settings)} settings for {len(texts)} prompts; expected one for each, with the "
                "same generation"
            )
        longest = self.sampling.max_new_tokens
        encoded = encode_prompts(self.model, self.tokenizer, texts, longest, self.attached.markers)
        return [_Prompt(*pair) for pair in zip(encoded, (s.of(self.attached) for s in settings), strict=True)]

    def run(self, prompts: Sequence[_Prompt], pieces: _Pieces | None = None) -> list[list[int]]:
        """Generated tokens of one batch, each up to its first stop token."""
        tokens, marked = zip(*((p.encoded.ids, p.encoded.marked) for p in prompts), strict=True)
        batch = left_pad(tokens, self.pad, self.device, marked)
        with self._explicit_config(), self._edits(batch, [prompt.asked for prompt in prompts]):
            output: Tensor = self.model.generate(
                input_ids=batch.tokens,
                attention_mask=batch.mask,
                logits_processor=self._processors(batch),
                stopping_criteria=StoppingCriteriaList([_Stopped(pieces.stopped)] if pieces else []),
                streamer=pieces,
            )
        return [self._until_stop(row) for row in output[:, batch.tokens.shape[1] :].tolist()]

    def _edits(self, batch: PromptBatch, asked: Sequence[AskedOf]) -> AbstractContextManager[None]:
        """Beams are rows of the batch from the prefill on, so each needs what its prompt has."""
        beams = self.sampling.num_beams
        lengths, starts, marked = (
            tensor.repeat_interleave(beams, dim=0) for tensor in (batch.lengths, batch.starts, batch.marked)
        )
        options = edit_options([one for one in asked for _ in range(beams)], self.device)
        return self.attached.edits(lengths, starts, marked=marked, **options)

    def text(self, tokens: Sequence[int]) -> str:
        return answer_text(self.tokenizer, tokens)

    def _until_stop(self, tokens: list[int]) -> list[int]:
        end = next((i for i, token in enumerate(tokens) if token in self.stops), len(tokens))
        return tokens[:end]

    def _processors(self, batch: PromptBatch) -> LogitsProcessorList:
        penalty, beams = self.sampling.repetition_penalty, self.sampling.num_beams
        if penalty == 1:
            return LogitsProcessorList()
        return LogitsProcessorList([RepetitionPenalty(penalty, batch.starts.repeat_interleave(beams))])

    @contextmanager
    def _explicit_config(self) -> Iterator[None]:
        """Exactly these settings: `generate` fills every gap from the model's own configuration."""
        s = self.sampling
        drawn = {"temperature": s.temperature, "top_p": s.top_p, "top_k": s.top_k} if s.samples else {}
        own = self.model.generation_config
        self.model.generation_config = GenerationConfig(
            max_new_tokens=s.max_new_tokens,
            num_beams=s.num_beams,
            do_sample=s.samples,
            eos_token_id=sorted(self.stops) or None,
            pad_token_id=self.pad,
            use_cache=True,
            **drawn,
        )
        try:
            yield
        finally:
            self.model.generation_config = own


class RepetitionPenalty(LogitsProcessor):
    """Divides positive and multiplies negative logits of tokens already seen (arXiv 1909.05858).

    Unlike the one of transformers it leaves padding out, so a prompt answers the same in any batch.
    """

    def __init__(self, penalty: float, starts: Tensor) -> None:
        self.penalty = penalty
        self.starts = starts

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids: int64 [B, T]; scores: [B, V]."""
        real = torch.arange(input_ids.shape[1], device=input_ids.device) >= self.starts[:, None]
        seen = torch.zeros_like(scores, dtype=torch.int64).scatter_add_(1, input_ids, real.long()) > 0
        penalised = torch.where(scores > 0, scores / self.penalty, scores * self.penalty)
        return torch.where(seen, penalised, scores)


class _Stopped(StoppingCriteria):
    """Ends generation when the consumer of a stream has gone."""

    def __init__(self, stopped: threading.Event) -> None:
        self.stopped = stopped

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        del scores, kwargs
        return torch.full((input_ids.shape[0],), self.stopped.is_set(), device=input_ids.device)


class _Pieces(BaseStreamer):
    """Sends the pieces of one answer to the consumer of a stream."""

    def __init__(self, decoder: _Decoder) -> None:
        self.queue: Queue[str | BaseException | None] = Queue()
        self.stopped = threading.Event()
        self._pieces = TextPieces(decoder.tokenizer, decoder.stops)
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        for token in value.flatten().tolist():
            self._send(self._pieces.put(token))

    def end(self) -> None:
        self._send(self._pieces.end())

    def _send(self, piece: str) -> None:
        if piece:
            self.queue.put(piece)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every module gets its own mode back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _seeded(sampling: Sampling, device: torch.device) -> Iterator[None]:
    """Draw from `sampling.seed`, and leave the caller's random state as it was."""
    if sampling.seed is None or not sampling.samples:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(sampling.seed)
        yield
