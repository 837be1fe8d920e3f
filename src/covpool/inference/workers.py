"""Processes that decode batches, with a deadline for each image.

A decoder runs in C, so no exception can stop it. The process of a decoder that misses the deadline ends, and
another process takes its place.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import RawValue
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from covpool.data.loader import outlive_signals
from covpool.errors import WORKER_DIED, BadImageError, DataError

P = TypeVar("P")
R = TypeVar("R")

# Number of batches that a process decodes before the first of them is used.
AHEAD = 3
# Windows has no such timers.
HAS_TIMERS = hasattr(signal, "setitimer")

# A context in which an image, given by its index, is decoded.
Guard = Callable[[int], AbstractContextManager[object]]


class Deadline:
    """End this process if an image takes too long to decode.

    Args:
        seconds: the limit per image.
        slow: images that missed the deadline in an earlier process.
    """

    def __init__(self, seconds: float, slow: Sequence[int] = ()) -> None:
        self.seconds, self.slow, self.image = seconds, slow, RawValue("q", -1)

    @contextmanager
    def __call__(self, image: int) -> Iterator[None]:
        """Start the timer for an image.

        Raises:
            BadImageError: if the image missed the deadline before.
        """
        if image in self.slow:
            raise BadImageError("too slow", f"it took longer than {self.seconds:g} seconds to decode")
        self.image.value = image
        if HAS_TIMERS:
            signal.setitimer(signal.ITIMER_REAL, self.seconds)
        try:
            yield
        finally:
            if HAS_TIMERS:
                signal.setitimer(signal.ITIMER_REAL, 0)


class Job(NamedTuple, Generic[P, R]):
    """The work of all processes.

    Attributes:
        pieces: can be iterated repeatedly; process ``k`` of ``n`` handles ``pieces[k::n]`` without ``None``.
        handle: returns the result of a piece, and writes its pixels to a tensor.
        shape: the shape of the pixels of the largest piece.
        seconds: the limit per image.
        workers: the number of processes.
    """

    pieces: Any
    handle: Callable[[P, Tensor, Guard], R]
    shape: tuple[int, ...]
    seconds: float
    workers: int

    def share(self, number: int, start: int = 0) -> Iterator[P]:
        """Yield the pieces of a process, without the first ``start``."""
        turns = islice(self.pieces, number, None, self.workers)
        return islice((piece for piece in turns if piece is not None), start, None)


class Crash(NamedTuple):
    """The traceback of an internal error in a process."""

    text: str


class Worker(Generic[P, R]):
    """A process that is replaced when it misses a deadline."""

    def __init__(self, job: Job[P, R], number: int) -> None:
        self.job, self.number, self.done, self.slow = job, number, 0, list[int]()
        # Pixels are written to shared memory, because sending them takes longer.
        self.pixels = torch.empty(AHEAD, *job.shape, dtype=torch.uint8).share_memory_()
        self._start()

    def _start(self) -> None:
        self.deadline = Deadline(self.job.seconds, tuple(self.slow))
        self.pipe, theirs = multiprocessing.Pipe()
        pipes, place = (self.pipe, theirs), (self.number, self.done)
        arguments = pipes, self.job, place, self.pixels, self.deadline, outlive_signals()
        self.process = multiprocessing.Process(target=_work, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def next(self) -> tuple[R, Tensor]:
        """Return the next result and its pixels, which are valid until :meth:`release`."""
        while True:
            try:
                result = self.pipe.recv()
            except (EOFError, ConnectionError):
                self._replace()
                continue
            if isinstance(result, Crash):
                raise RuntimeError(f"an internal error in a process that reads images:\n{result.text}")
            return result, self.pixels[self.done % AHEAD]

    def release(self) -> None:
        """Allow the process to overwrite the pixels of the last result."""
        self.done += 1
        with contextlib.suppress(ConnectionError):  # it may have ended; next() replaces it
            self.pipe.send_bytes(b"x")

    def _replace(self) -> None:
        self.process.join()
        if not HAS_TIMERS or self.process.exitcode != -signal.SIGALRM:
            raise DataError(WORKER_DIED)
        self.slow.append(self.deadline.image.value)
        self.pipe.close()
        self._start()

    def end(self) -> None:
        """End the process."""
        self.pipe.close()
        self.process.kill()
        self.process.join()


def _work(
    pipes: tuple[Connection, Connection],
    job: Job[P, R],
    place: tuple[int, int],
    pixels: Tensor,
    deadline: Deadline,
    prepare: Callable[[int], None],
) -> None:
    """Handle the pieces of a process, until the main process closes its pipe or ends."""
    theirs, pipe = pipes
    theirs.close()  # a copy: with it open, the end of the main process would go unnoticed
    number, start = place
    prepare(number)
    torch.set_num_threads(1)
    if HAS_TIMERS:  # the caller may use the signal for itself
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    with contextlib.suppress(EOFError, ConnectionError):
        for k, piece in enumerate(job.share(number, start), start):
            if k - start >= AHEAD:
                pipe.recv_bytes()
            pipe.send(_handled(job, piece, pixels[k % AHEAD], deadline))
        while True:
            pipe.recv_bytes()


def _handled(job: Job[P, R], piece: P, pixels: Tensor, deadline: Deadline) -> R | Crash:
    try:
        return job.handle(piece, pixels, deadline)
    except Exception:
        return Crash(traceback.format_exc())


def in_processes(job: Job[P, R]) -> Iterator[tuple[P, R, Tensor]]:
    """Yield the pieces with their results and pixels, in order. Pixels are valid until the next piece.

    Raises:
        DataError: if a process was killed.
    """
    workers: list[Worker[P, R]] = []
    try:
        workers.extend(Worker(job, number) for number in range(job.workers))
        for place, piece in enumerate(job.pieces):
            if piece is not None:
                worker = workers[place % job.workers]
                yield piece, *worker.next()
                worker.release()
    finally:
        for worker in workers:
            worker.end()
