"""An answer on its way from the worker's thread to a client that may go away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from starlette.requests import Request as HttpRequest

from leantune.generate.rows import Piece, Row
from leantune.serve.engine import Engine
from leantune.serve.errors import RequestError, stopping


class Answering:
    """One row that is answered for one client; made inside the event loop.

    Raises `RequestError` if too many wait. A client that goes frees its row.
    """

    def __init__(self, engine: Engine, row: Row, client: HttpRequest) -> None:
        self._row = row
        self._pieces: asyncio.Queue[Piece | RequestError] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        engine.submit(row, self._send)
        self._watch = self._loop.create_task(self._free_if_gone(client))

    async def pieces(self) -> AsyncIterator[Piece]:
        """The pieces as they come; raises `RequestError` if the answer failed."""
        try:
            while True:
                piece = await self._pieces.get()
                if isinstance(piece, RequestError):
                    raise piece
                if piece.finish == "cancelled":
                    raise stopping()
                yield piece
                if piece.finish is not None:
                    return
        finally:
            self.leave()

    async def whole(self) -> tuple[str, str, int]:
        """The text, why it ends, and how many tokens it has."""
        text, last = "", None
        async for last in self.pieces():
            text += last.text
        assert last is not None
        assert last.finish is not None
        return text, last.finish, last.num_tokens

    def leave(self) -> None:
        """Nobody listens any more."""
        self._row.cancelled = True
        self._watch.cancel()

    def _send(self, piece: Piece | RequestError) -> None:
        """Take a piece from the worker's thread."""
        with suppress(RuntimeError):  # the loop has been closed by force, and nobody listens
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    async def _free_if_gone(self, client: HttpRequest) -> None:
        while (await client.receive())["type"] != "http.disconnect":
            pass
        self._row.cancelled = True
        self._pieces.put_nowait(Piece(0, "", 0, "cancelled"))  # a row that waits will have none
