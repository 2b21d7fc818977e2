"""Starting the endpoint on a port, and ending it."""

from __future__ import annotations

import importlib.util
import ipaddress
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from leantune.errors import ConfigError

if TYPE_CHECKING:
    import uvicorn

_GRACE_S = 5  # for answers that are under way when the server is stopped


def require_packages() -> None:
    """Raise `ConfigError` if the packages of the endpoint are not installed."""
    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"serve needs {' and '.join(missing)}: install leantune[serve]")


def listen(host: str, port: int) -> socket.socket:
    """A socket on this address; port 0 is any free one. Whoever connects waits until it is served.

    Raises `ConfigError` if the address cannot be had.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error}; choose with --host and --port"
        ) from error


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens on this address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make_server(app: Any) -> uvicorn.Server:
    """What answers requests until Ctrl-C or a termination signal, and gives open answers time to end."""
    import uvicorn

    return uvicorn.Server(
        uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=_GRACE_S, server_header=False)
    )


def announcement(listener: socket.socket, host: str, models: Iterable[str]) -> list[str]:
    """What the user is told before the first request."""
    port = listener.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    lines = [f"models: {', '.join(models)}", f"listening on http://{shown}:{port}/v1 (Ctrl-C ends)"]
    if not is_loopback(host):
        lines.append(f"warning: {host} can be reached from other machines, and nobody is asked for a key")
    return lines
