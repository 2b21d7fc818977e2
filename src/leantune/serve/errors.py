"""Requests that cannot be answered, as a client is told of them."""

from __future__ import annotations

from typing import Any

from leantune.errors import ConfigError, LeantuneError

_KINDS = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class RequestError(LeantuneError):
    """A request that cannot be answered. status: of HTTP; param: the key of the body that is to blame."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    @classmethod
    def of(cls, error: LeantuneError) -> RequestError:
        """What this error of ours means to the client that caused it."""
        if isinstance(error, RequestError):
            return error
        return cls("; ".join(error.problems) if isinstance(error, ConfigError) else str(error))

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = _KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def stopping() -> RequestError:
    """What is told to requests that the end of the server leaves without an answer."""
    return RequestError("the server is stopping", status=503)
