"""SIGTERM and Ctrl-C: finish the step, write a checkpoint, leave with an exit code that tells."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

CAUGHT = (signal.SIGTERM, signal.SIGINT)


class Interrupted(Exception):  # noqa: N818  # it is no error: nothing was lost
    """Training was asked to stop, and has written a checkpoint.

    Attributes:
        exit_code: 143 after SIGTERM, 130 after Ctrl-C, as shells have it.
    """

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


class Signals:
    """Which signal came, if one did.

    Attributes:
        received: its number, or 0.
    """

    received = 0

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Remember the signal. A second Ctrl-C means now."""
        if self.received == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.received = number


@contextmanager
def caught_signals() -> Iterator[Signals]:
    """Inside, SIGTERM and Ctrl-C are remembered instead of ending the process."""
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():  # where Python allows no handlers
        yield signals
        return
    # What runs in the background of a shell has Ctrl-C ignored, and keeps it so.
    heard = [number for number in CAUGHT if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, signals.handle) for number in heard}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
