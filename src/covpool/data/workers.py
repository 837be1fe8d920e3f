"""What a worker process that loads images does when it, or the main process, is told to end."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Callable
from functools import cache, partial
from multiprocessing.sharedctypes import RawValue
from types import FrameType, TracebackType
from typing import Any


def outlive_signals() -> Callable[[int], None]:
    """For ``worker_init_fn``: lets the main process decide what a signal to all of them means, as Ctrl-C is.

    A worker that died of it would take the main process along, in the middle of a step. It goes when the
    main process goes, or when it is told twice, which is how torch ends workers that are stuck.
    """
    return partial(_outlive, _is_leaving())


@cache
def _is_leaving() -> Any:
    """Whether the main process is at its end; workers see it too.

    It is set before Python ends its workers, which it does with one SIGTERM, and then waits for them as long
    as it takes. Not made on import: it takes a page of shared memory.
    """
    flag = RawValue("b", 0)
    atexit.register(setattr, flag, "value", 1)
    return flag


def _outlive(is_leaving: Any, worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.excepthook = _report
    told = iter((False, True))

    def handle(number: int, frame: FrameType | None) -> None:
        if is_leaving.value or next(told, True):
            os._exit(0)

    signal.signal(signal.SIGTERM, handle)


def _report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """As Python does, but not that the main process was interrupted while a tensor was handed over."""
    if not isinstance(error, (EOFError, ConnectionError)):
        sys.__excepthook__(kind, error, traceback)
