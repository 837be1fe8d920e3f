"""What a worker process that loads images does when it is told to end."""

from __future__ import annotations

import atexit
import os
import signal
from functools import partial
from multiprocessing.sharedctypes import RawValue
from types import FrameType
from typing import Any

# Whether the main process is at its end; workers see it too. This runs before Python ends its workers, which
# it does with one SIGTERM, and then waits for them as long as it takes.
_is_leaving = RawValue("b", 0)
atexit.register(setattr, _is_leaving, "value", 1)


def _outlive(is_leaving: Any, worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    told = iter((False, True))

    def handle(number: int, frame: FrameType | None) -> None:
        if is_leaving.value or next(told, True):
            os._exit(0)

    signal.signal(signal.SIGTERM, handle)


outlive_signals = partial(_outlive, _is_leaving)
"""For ``worker_init_fn``: lets the main process decide what a signal to all processes means, as Ctrl-C is.

A worker that died of it would take the main process along, in the middle of a step. It goes when the main
process goes, or when it is told twice, which is how torch ends workers that are stuck.
"""
