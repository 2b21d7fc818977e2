"""From the body of a request to the row that answers it."""

from __future__ import annotations

from leantune.config.subspaces import Choice
from leantune.generate.edits import EditSettings
from leantune.generate.prompts import encode_prompts, max_positions
from leantune.generate.rows import Row
from leantune.serve.errors import RequestError
from leantune.serve.models import Served, ServedModel
from leantune.serve.schema import ChatRequest, CompletionRequest, Request

_LONGEST_ANSWER = 32_768  # tokens, of models that do not say how many positions they have


def row_of(served: Served, request: ChatRequest | CompletionRequest, max_new_tokens: int) -> Row:
    """The row of a request; `max_new_tokens` holds if it does not say how long the answer may be.

    Raises `RequestError` for a model that is not served, and `LeantuneError` for whatever else cannot be
    obeyed.
    """
    model = _model(served, request.model)
    if isinstance(request, ChatRequest):
        prompt = model.prompt([message.as_message() for message in request.messages])
    else:
        prompt = request.prompt
    markers = model.attached.markers
    (encoded,) = encode_prompts(served.model, served.tokenizer, [prompt], request.asked_tokens or 1, markers)
    limit = max_positions(served.model)
    if limit is not None:
        max_new_tokens = min(max_new_tokens, limit - len(encoded.ids))
    elif request.asked_tokens is not None and request.asked_tokens > _LONGEST_ANSWER:
        raise RequestError(
            f"max_tokens: {request.asked_tokens} is more than {_LONGEST_ANSWER}", param="max_tokens"
        )
    strength = 1.0 if request.strength is None else request.strength
    asked = EditSettings(strength, _choice(request), request.generation).of(model.attached)
    return Row(
        encoded.ids,
        request.sampling(request.asked_tokens or max_new_tokens),
        served.stop_token_ids(model),
        request.stop_strings,
        marked=encoded.marked,
        **asked._replace(adapter=model.adapter)._asdict(),
    )


def _choice(request: Request) -> Choice | None:
    return None if request.subspaces is None else tuple(request.subspaces)


def _model(served: Served, name: str) -> ServedModel:
    if name not in served.models:
        known = ", ".join(served.models)
        raise RequestError(
            f"model {name!r} is not served here; there are: {known}",
            status=404,
            param="model",
            code="model_not_found",
        )
    return served.models[name]
