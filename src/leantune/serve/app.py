"""The routes of the endpoint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from leantune.errors import LeantuneError
from leantune.serve.answering import Answering
from leantune.serve.body_limit import BodyLimit
from leantune.serve.engine import Engine
from leantune.serve.errors import RequestError
from leantune.serve.replies import DONE, ChatReply, Reply, TextReply, event
from leantune.serve.rows import row_of
from leantune.serve.schema import ChatRequest, CompletionRequest

_MOST_BYTES = 8 * 2**20  # of a request's body: more than the longest context


def make_app(engine: Engine) -> FastAPI:
    """The endpoint in front of an engine, which it closes when it stops."""
    started = int(time.time())

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.close)

    app = FastAPI(title="leantune", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(BodyLimit, most_bytes=_MOST_BYTES)
    app.add_exception_handler(LeantuneError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _unknown)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {
            "status": "ok",
            "waiting": engine.num_waiting,
            "running": engine.num_running,
            "batches": engine.batches,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(name, started) for name in engine.served.models]}

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, client: HttpRequest) -> Response:
        return await _answer(engine, body, client, ChatReply)

    @app.post("/v1/completions")
    async def complete(body: CompletionRequest, client: HttpRequest) -> Response:
        return await _answer(engine, body, client, TextReply)

    return app


async def _answer(
    engine: Engine, body: ChatRequest | CompletionRequest, client: HttpRequest, kind: type[Reply]
) -> Response:
    # Tokenising a long prompt must not hold up the others.
    row = await asyncio.to_thread(row_of, engine.served, body, engine.limits.max_new_tokens)
    reply = kind(body.model, len(row.tokens), body.includes_usage)
    answering = Answering(engine, row, client)
    if body.stream:
        return StreamingResponse(_events(answering, reply), media_type="text/event-stream")
    return JSONResponse(reply.whole(*await answering.whole()))


async def _events(answering: Answering, reply: Reply) -> AsyncIterator[str]:
    """The answer as server-sent events; an error after the first one can only be an event too."""
    try:
        for body in reply.opening():
            yield event(body)
        async for piece in answering.pieces():
            for body in reply.chunks(piece.text, piece.finish, piece.num_tokens):
                yield event(body)
        yield DONE
    except RequestError as error:
        yield event(error.body())
    finally:
        answering.leave()


def _model(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "leantune"}


async def _refused(_client: HttpRequest, error: Exception) -> JSONResponse:
    assert isinstance(error, LeantuneError)
    told = RequestError.of(error)
    return JSONResponse(told.body(), told.status)


async def _unknown(client: HttpRequest, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    told = RequestError(f"{client.method} {client.url.path}: {error.detail}", error.status_code)
    return JSONResponse(told.body(), told.status)


async def _invalid(_client: HttpRequest, error: Exception) -> JSONResponse:
    """All problems of a body in one message; the first one's key is to blame."""
    assert isinstance(error, RequestValidationError)
    keys = [".".join(str(part) for part in problem["loc"][1:]) for problem in error.errors()]
    texts = [problem["msg"].removeprefix("Value error, ") for problem in error.errors()]
    message = "; ".join(f"{key}: {text}" if key else text for key, text in zip(keys, texts, strict=True))
    told = RequestError(message, param=keys[0] or None)
    return JSONResponse(told.body(), told.status)
