"""Refuses request bodies that are too long, before they are read whole."""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from leantune.serve.errors import RequestError


class BodyLimit:
    """Middleware: a body of more than `most_bytes` is answered with 413, whatever its header says."""

    def __init__(self, app: ASGIApp, most_bytes: int) -> None:
        self._app = app
        self._most_bytes = most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if len(body) > self._most_bytes:
                error = RequestError(f"the request is longer than {self._most_bytes} bytes", status=413)
                await JSONResponse(error.body(), error.status)(scope, receive, send)
                return
            if message["type"] != "http.request" or not message.get("more_body", False):
                break
        read = False

        async def again() -> Message:
            """What was read, and then whatever comes, such as the news that the client has gone."""
            nonlocal read
            if read:
                return await receive()
            read = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, again, send)
