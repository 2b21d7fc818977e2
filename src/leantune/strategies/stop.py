"""Stopping a run politely: the first Ctrl-C or SIGTERM asks for an end after the current step.

Python runs signal handlers between bytecodes, so a process that is blocked inside a C call (a long
kernel, a collective whose peer is gone) does not see the request until the call returns. Nobody
depends on that: `launch` ends such a process with SIGKILL when another worker has failed.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Some wrappers forward the Ctrl-C that the terminal has already delivered to the whole group.
_SAME_PRESS_SECONDS = 0.5


class StopRequest:
    """Context in which SIGINT and SIGTERM set `requested` instead of ending the process.

    A second SIGINT raises KeyboardInterrupt. Outside the main thread, and for a signal that the
    process was started to ignore (nohup, background jobs), nothing is installed.
    `announce`: tell the user on stderr; by default only rank 0 does.
    """

    def __init__(self, announce: bool | None = None) -> None:
        self.signal: signal.Signals | None = None
        self._announce = os.environ.get("RANK", "0") == "0" if announce is None else announce
        self._first_time = 0.0
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal has arrived."""
        return self.signal is not None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            # None stands for a handler that was not installed from Python; it cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal = signal.Signals(number)
            self._first_time = now
            if self._announce:
                # Not print: the handler may have interrupted a print on the same buffered stream.
                # On a terminal the line already holds ^C or a progress bar.
                start = b"\n" if os.isatty(2) else b""
                os.write(2, start + b"stopping after this step; press Ctrl-C again to abort\n")
        elif number == signal.SIGINT and now - self._first_time > _SAME_PRESS_SECONDS:
            raise KeyboardInterrupt
