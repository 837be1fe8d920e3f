"""Processes: join those of torchrun, stop cleanly on signals."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from covpool.device import chosen_device
from covpool.errors import CovpoolError, LostProcessError, ReportedByFirstError

LOGGER = logging.getLogger("covpool")


T = TypeVar("T")

# Minutes to wait for another process. The first one may list images or write a report meanwhile.
TIMEOUT = 10.0
# Seconds in which the processes that are left sign a list, so that the lost ones can be named.
ROLL_CALL = 10.0
# Texts in the errors of gloo when another process is lost, which have no type of their own.
LOST = ("gloo", "Application timeout caused pair closure")
# Seconds to wait for the last exchange; a thread needs microseconds once it runs.
LAST_EXCHANGE = 0.5
# Numbers the process groups; all processes count the same.
_GROUPS = itertools.count()


@dataclass(frozen=True)
class Processes:
    """This process among those of the run.

    Objects pass between processes by pickle, as in torch.distributed.

    Attributes:
        rank: the rank of this process.
        world_size: the number of processes.
        device: the device of this process.
    """

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, in every process."""
        if self.world_size == 1:
            return [value]
        values: list[T | None] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]

    def gather_to_first(self, value: T) -> list[T]:
        """Return the values of all processes in the first; an empty list in the others."""
        if self.world_size == 1:
            return [value]
        values: list[T | None] = [None] * self.world_size if self.is_first else []
        dist.gather_object(value, values if self.is_first else None, dst=0)
        return values  # type: ignore[return-value]

    def from_first(self, value: T | None) -> T:
        """Return the value of the first process, in every process."""
        values = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]  # type: ignore[return-value]

    def by_first(self, act: Callable[[], T]) -> T:
        """Call ``act`` in the first process, and return its result in all; if it raises, all raise."""
        outcome: tuple[T | None, Exception | None] = None, None
        if self.is_first:
            try:
                outcome = act(), None
            except Exception as error:
                outcome = None, error
        value, raised = outcome if self.world_size == 1 else self.from_first(outcome)
        if raised is not None:
            self.fail(outcome[1] or raised)
        return value  # type: ignore[return-value]

    def together(self, act: Callable[[], T]) -> T:
        """Call ``act`` in every process, and return the result of this one; if one raises, all raise."""
        value, error = None, None
        try:
            value = act()
        except Exception as raised:
            error = raised
        errors = [each for each in self.gather(None if error is None else _portable(error)) if each]
        if errors:
            self.fail(error or errors[0])
        return value  # type: ignore[return-value]

    def fail(self, error: Exception) -> NoReturn:
        """Raise an error in every process; only the first prints it."""
        if self.is_first:
            raise error
        raise ReportedByFirstError(str(error)) from error

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum over processes, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def tensors_by_first(self, read: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Call ``read`` in the first process, and return its tensors on the CPU of every process."""
        tensors: dict[str, Tensor] = {}

        def shapes() -> dict[str, tuple[torch.Size, torch.dtype]]:
            tensors.update(read())
            return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}

        known = self.by_first(shapes)
        if self.world_size == 1:
            return tensors
        received = {}
        for name, (shape, dtype) in known.items():
            tensor = tensors[name] if self.is_first else torch.empty(shape, dtype=dtype)
            on_device = tensor.to(self.device)
            dist.broadcast(on_device, src=0)
            received[name] = on_device.cpu()
        return received

    def broadcast_buffers(self, module: torch.nn.Module) -> None:
        """Copy the buffers of the first process, such as BatchNorm statistics, to all processes."""
        if self.world_size > 1:
            for buffer in module.buffers():
                dist.broadcast(buffer, src=0)


# A process that works by itself, on the CPU.
ALONE = Processes(rank=0, world_size=1, device=torch.device("cpu"))


@contextmanager
def joined_processes(device: str = "auto", timeout: float = TIMEOUT) -> Iterator[Processes]:
    """Join the processes of torchrun, or those of an existing process group.

    Only the first process prints warnings.

    Args:
        device: one of :data:`covpool.device.DEVICES`; ``"auto"`` is a GPU if there is one.
        timeout: minutes to wait for another process.

    Raises:
        UsageError: if there is no such device.
        LostProcessError: if another process does not answer in time, or closed its connection.
    """
    ours = not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ
    chosen = chosen_device(device, int(os.environ.get("LOCAL_RANK", 0)))
    if chosen.type != "cpu":
        torch.accelerator.set_device_index(chosen.index)
    try:
        store = _join(chosen.type, timedelta(minutes=timeout)) if ours else None
    except dist.DistError as error:
        raise LostProcessError(f"not all processes could join within {timeout:g} min: {error}") from error
    level, rank = LOGGER.level, dist.get_rank() if dist.is_initialized() else 0
    if rank:
        LOGGER.setLevel(logging.ERROR)
    try:
        yield Processes(
            rank=rank,
            world_size=dist.get_world_size() if dist.is_initialized() else 1,
            device=chosen,
        )
    except RuntimeError as error:
        is_lost = isinstance(error, dist.DistError) or any(words in str(error) for words in LOST)
        if store is None or not is_lost:
            raise
        raise LostProcessError(
            f"{_lost(store)} (limit: {timeout:g} min; of covpool train: --loop.timeout): the command stops. "
            "Rerun it to resume"
        ) from error
    finally:
        LOGGER.setLevel(level)
        if ours:
            # A thread of gloo may still need Python's lock to free a tensor of the last exchange. Destroying
            # the group holds that lock and waits for the thread, so the thread must finish before.
            time.sleep(LAST_EXCHANGE)
            dist.destroy_process_group()


def _join(kind: str, timeout: timedelta) -> Any:
    """Join the processes of torchrun, and return the store that they share."""
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    # torchrun keeps the store when it restarts processes, and so do processes that train several models.
    # Without its own prefix, a new group would find the addresses of an old one.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    group_store = dist.PrefixStore(f"covpool/{attempt}/{next(_GROUPS)}", store)  # type: ignore[attr-defined]
    dist.init_process_group(
        # Flags and names pass between CPUs, without waiting for a GPU.
        "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}",
        store=group_store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    group_store.set(f"host/{rank}", socket.gethostname())
    return group_store


def _lost(store: Any) -> str:
    """Name the processes that do not answer any more.

    Those that are left notice the loss at about the same time, and sign in the store.
    """
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    missing: list[str] = []
    is_known = threading.Event()

    def call() -> None:
        store.set(f"left/{rank}", "")
        until = time.monotonic() + ROLL_CALL
        absent = [*ranks]
        while absent and time.monotonic() < until:
            time.sleep(0.2)
            absent = [rank for rank in absent if not store.check([f"left/{rank}"])]
        missing.extend(f"rank {rank} on {store.get(f'host/{rank}').decode()}" for rank in absent)
        is_known.set()

    # In a thread, because the store may be on a lost machine; its client waits without a limit.
    threading.Thread(target=_suppressed, args=(call,), daemon=True).start()
    if not is_known.wait(2 * ROLL_CALL):
        return "the machine with the store of torchrun does not answer"
    if not missing:
        return "the connection between the processes was interrupted"
    return f"{', '.join(missing)} {'does' if len(missing) == 1 else 'do'} not answer"


def _suppressed(act: Callable[[], None]) -> None:
    """Call ``act``, and ignore that a store cannot be reached."""
    with suppress(RuntimeError):
        act()


def _portable(error: Exception) -> Exception:
    """Return an error that can be pickled, and is a CovpoolError if the caller can mend this one."""
    kind = CovpoolError if isinstance(error, CovpoolError | OSError | MemoryError) else RuntimeError
    return kind(str(error) or type(error).__name__)


CAUGHT = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """The last signal; ``received`` is its number, or 0."""

    received = 0

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Remember the signal. A second Ctrl-C raises at once."""
        if self.received == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.received = number


@contextmanager
def caught_signals() -> Iterator[Signals]:
    """Remember SIGTERM and Ctrl-C instead of ending the process."""
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():  # Python allows no handlers here
        yield signals
        return
    # A background job of a shell ignores Ctrl-C, and continues to.
    heard = [number for number in CAUGHT if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, signals.handle) for number in heard}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
