"""Run as one of the processes that torchrun started, or alone; stop cleanly on signals."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from covpool.errors import CovpoolError, ToldByFirstError, UsageError

LOGGER = logging.getLogger("covpool")
T = TypeVar("T")

# Seconds, of which a thread needs a few microseconds, once it gets to run.
LAST_EXCHANGE = 0.5
# Numbers the groups that this process has been in: the same ones in all of them.
_GROUPS = itertools.count()


@dataclass(frozen=True)
class Processes:
    """This process among those of the run.

    Objects pass between processes by pickle, as torch.distributed does it: they are all of one program.

    Attributes:
        rank: of this process.
        world_size: how many there are.
        device: of this process.
    """

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this one writes the files and talks to people."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """The value of every process, in every process."""
        if self.world_size == 1:
            return [value]
        values: list[T | None] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]

    def gather_to_first(self, value: T) -> list[T]:
        """The value of every process, in the first; nothing in the others."""
        if self.world_size == 1:
            return [value]
        values: list[T | None] = [None] * self.world_size if self.is_first else []
        dist.gather_object(value, values if self.is_first else None, dst=0)
        return values  # type: ignore[return-value]

    def from_first(self, value: T | None) -> T:
        """The value of the first process, in every process."""
        values = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]  # type: ignore[return-value]

    def by_first(self, act: Callable[[], T]) -> T:
        """What ``act`` returns in the first process, in every process; if it raises there, all of them do."""
        outcome: tuple[T | None, Exception | None] = None, None
        if self.is_first:
            try:
                outcome = act(), None
            except Exception as error:
                outcome = None, error
        value, found = outcome if self.world_size == 1 else self.from_first(outcome)
        if found is not None:
            self.fail(outcome[1] or found)
        return value  # type: ignore[return-value]

    def together(self, act: Callable[[], T]) -> T:
        """What ``act`` returns here, once it has returned in every process; if it raises in one, all fail."""
        value, error = None, None
        try:
            value = act()
        except Exception as found:
            error = found
        found_by = [found for found in self.gather(None if error is None else _portable(error)) if found]
        if found_by:
            self.fail(error or found_by[0])
        return value  # type: ignore[return-value]

    def fail(self, error: Exception) -> NoReturn:
        """Raise an error that every process has come to; the first tells it for all."""
        if self.is_first:
            raise error
        raise ToldByFirstError(str(error)) from error

    def sum_(self, tensor: Tensor) -> Tensor:
        """The sum over processes, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def tensors_by_first(self, read: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """What ``read`` gives in the first process, on the CPU of every process; the others need no file."""
        own: dict[str, Tensor] = {}

        def shapes() -> dict[str, tuple[torch.Size, torch.dtype]]:
            own.update(read())
            return {name: (tensor.shape, tensor.dtype) for name, tensor in own.items()}

        known = self.by_first(shapes)
        if self.world_size == 1:
            return own
        received = {}
        for name, (shape, dtype) in known.items():
            tensor = own[name] if self.is_first else torch.empty(shape, dtype=dtype)
            on_device = tensor.to(self.device)
            dist.broadcast(on_device, src=0)
            received[name] = on_device.cpu()
        return received

    def broadcast_buffers(self, module: torch.nn.Module) -> None:
        """Give all processes the first one's buffers, such as the statistics of BatchNorm."""
        if self.world_size > 1:
            for buffer in module.buffers():
                dist.broadcast(buffer, src=0)


@contextmanager
def joined_processes(device: str = "auto") -> Iterator[Processes]:
    """Join the processes that torchrun started, or those of a group that the caller has made already.

    Warnings are those of the first process: what it warns of, the others find too.

    Args:
        device: ``"cpu"``, ``"cuda"``, or ``"auto"`` for a GPU if there is one.

    Raises:
        ValueError: if a GPU is asked for and there is none.
    """
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    ours = not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ
    local = int(os.environ.get("LOCAL_RANK", 0))
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise UsageError("device is cuda, but torch sees no GPU here: pass cpu")
        torch.cuda.set_device(local)
    if ours:
        _join(kind)
    level, rank = LOGGER.level, dist.get_rank() if dist.is_initialized() else 0
    if rank:
        LOGGER.setLevel(logging.ERROR)
    try:
        yield Processes(
            rank=rank,
            world_size=dist.get_world_size() if dist.is_initialized() else 1,
            device=torch.device(kind, local) if kind == "cuda" else torch.device(kind),
        )
    finally:
        LOGGER.setLevel(level)
        if ours:
            # A thread of gloo that still holds a tensor of the last exchange needs Python's lock to let go of
            # it. Whoever destroys the group holds that lock and waits for the thread: it must be done before.
            time.sleep(LAST_EXCHANGE)
            dist.destroy_process_group()


def _join(kind: str) -> None:
    store, rank, world_size = next(rendezvous("env://"))
    # torchrun keeps the store when it starts processes anew, and so do processes that train one model after
    # the other. Without a name of its own, a new group would find the addresses of one that is gone.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        # Flags and names pass between CPUs, so that asking for them does not wait for a GPU.
        "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
        store=dist.PrefixStore(f"covpool/{attempt}/{next(_GROUPS)}", store),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world_size,
    )


def _portable(error: Exception) -> Exception:
    """Return an error that can be pickled, and is a CovpoolError if the caller can mend this one."""
    kind = CovpoolError if isinstance(error, CovpoolError | OSError | MemoryError) else RuntimeError
    return kind(str(error) or type(error).__name__)


CAUGHT = (signal.SIGTERM, signal.SIGINT)


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
