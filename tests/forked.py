"""Run commands in a forked process, which does not have to import torch and timm again."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

from covpool.cli.main import main

DEADLINE = 240


def fork(call: Callable[[], object], log: Path) -> BaseProcess:
    """Call a function in a separate process. Its output goes to ``log``, its errors to ``log.err``."""
    process = multiprocessing.get_context("fork").Process(target=_child, args=(call, log))
    process.start()
    return process


def command(*words: object, log: Path) -> BaseProcess:
    """Run covpool with these arguments, as a shell would."""
    return fork(lambda: main([str(word) for word in words]), log)


def errors(log: Path) -> str:
    """Return the error output of a process."""
    return log.with_suffix(".err").read_text()


def finish(process: BaseProcess, log: Path) -> None:
    """Wait for a process and check that it succeeded."""
    process.join(DEADLINE)
    assert process.exitcode == 0, errors(log)


def send_when(
    process: BaseProcess, reached: Callable[[], object], log: Path, number: int = signal.SIGKILL
) -> None:
    """Send a signal to the running process as soon as ``reached`` returns true, then wait until it ends.

    A ``FileNotFoundError`` in ``reached`` counts as false.
    """
    give_up = time.monotonic() + DEADLINE
    try:
        while True:
            assert process.exitcode is None, errors(log)
            assert time.monotonic() < give_up, f"it did not come so far\n{errors(log)}"
            with suppress(FileNotFoundError):
                if reached():
                    break
            time.sleep(0.002)
        assert process.pid is not None
        os.kill(process.pid, number)
        process.join(DEADLINE)
    finally:
        process.kill()
    if number == signal.SIGKILL:
        assert process.exitcode == -signal.SIGKILL


def _child(call: Callable[[], object], log: Path) -> None:
    # Restore the default signal handling: background processes of a shell ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, path in ((1, log), (2, log.with_suffix(".err"))):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    code: object = 1
    try:
        code = call()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(code) if isinstance(code, int) else 0)
