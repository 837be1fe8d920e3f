"""Devices: which one to use, its name, and what it can do. Nothing else in covpool names one.

``torch.accelerator`` finds the accelerator: NVIDIA and AMD GPUs are ``"cuda"`` in torch, those of Apple are
``"mps"``, those of Intel ``"xpu"``.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, cast

import torch

from covpool.arguments import DEVICES
from covpool.errors import UsageError
from covpool.storage.files import read_text

LOGGER = logging.getLogger("covpool")

CPU = torch.device("cpu")
# Devices that can do what is in the name.
PINNED_MEMORY = ("cuda", "xpu")
SYNC_BATCHNORM = ("cuda", "xpu")
EVENTS = ("cuda", "xpu")
SAVED_RANDOM_STATE = ("cuda", "xpu")
NO_FLOAT64 = ("mps",)
NO_EIGH = ("mps",)
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "sve")


def accelerator() -> str | None:
    """Return the kind of accelerator that torch can use on this machine, or ``None``."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else device.type


def chosen_device(name: str | torch.device = "auto", index: int | None = None) -> torch.device:
    """Return a device of this machine.

    Args:
        name: one of ``DEVICES``, where ``"auto"`` is the accelerator if there is one; or a device of torch.
        index: number of the accelerator; ``None`` for the current one.

    Raises:
        UsageError: if there is no such device.
    """
    available = accelerator()
    try:
        device = torch.device((available or "cpu") if name == "auto" else name)
    except RuntimeError as error:
        raise UsageError(f"device must be one of {', '.join(DEVICES)}; got {str(name)!r}") from error
    if device.type in ("cpu", "meta"):
        return device
    if device.type != available:
        here = "no GPU here: pass cpu" if available is None else f"{available} here: pass {available}"
        raise UsageError(f"device is {device}, but torch sees {here}")
    # Without a number it is None, whatever torch's types say.
    index = cast("int | None", device.index) if index is None else index
    count = torch.accelerator.device_count()
    if index is not None and index >= count:
        raise UsageError(f"device is {available}:{index}, but torch sees {count} here, numbered from 0")
    return torch.device(available) if index is None else torch.device(available, index)


def device_name(kind: str, index: int = 0) -> str:
    """Return the name of an accelerator, as its driver reports it; ``"Apple GPU"`` for ``"mps"``."""
    named = getattr(torch.get_device_module(kind), "get_device_name", None)
    return "Apple GPU" if named is None else str(named(index))


def device_lines() -> tuple[str, ...]:
    """Return a line for each device of this machine, the CPU first."""
    kind = accelerator()
    if kind is None:
        return ("cpu",)
    try:
        count = torch.accelerator.device_count()
        missing = _missing(torch.device(kind))
        return "cpu", *(f"{kind}:{i} {device_name(kind, i)}{missing}" for i in range(count))
    except RuntimeError:  # a broken driver, which the tests report
        return "cpu", f"{kind}, which does not respond"


def _missing(device: torch.device) -> str:
    """Return what the device lacks, and what covpool does instead."""
    notes = []
    if not has_float64(device):
        notes.append("no float64: sums in float32")
    if device.type in NO_EIGH:
        notes.append("no eigh: on the CPU")
    if not torch.amp.is_autocast_available(device.type):
        notes.append("no autocast: float32")
    return f" ({'; '.join(notes)})" if notes else ""


def toolkit_versions() -> dict[str, str | None]:
    """Return the version of CUDA that torch was built for, by the name that results have."""
    return {"cuda": torch.version.cuda}


def has_float64(device: torch.device) -> bool:
    """Return whether the device computes in float64; GPUs of Apple and some of Intel do not."""
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type not in NO_FLOAT64


def pins_memory() -> bool:
    """Return whether pinned memory makes copies to the accelerator faster."""
    return accelerator() in PINNED_MEMORY


def forked_rng(device: torch.device) -> AbstractContextManager[None]:
    """Restore the random state of the CPU at the end, and that of all accelerators if they are in use."""
    kind = accelerator()
    if kind not in SAVED_RANDOM_STATE:
        return torch.random.fork_rng(devices=())
    in_use = device.type == kind or torch.get_device_module(kind).is_initialized()
    count = torch.accelerator.device_count() if in_use else 0
    return torch.random.fork_rng(devices=range(count), device_type=kind)


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Autocast to ``"bfloat16"`` or ``"float16"``; ``"float32"`` does nothing.

    A device without autocast computes in float32, with a warning.
    """
    half = precision != "float32"
    if half and not torch.amp.is_autocast_available(device.type):
        _warn(f"{device.type} has no {precision} in torch {torch.__version__}: it computes in float32")
        return torch.autocast(CPU.type, enabled=False)
    if device.type == "cpu" and precision == "bfloat16":
        flags = {*cpu_flags()}
        # The flags of ARM processors do not list it.
        if "avx2" in flags and not flags & {"amx_bf16", "avx512_bf16"}:
            _warn("this CPU has no bfloat16 arithmetic: float32 is several times as fast on it")
    return torch.autocast(device.type, getattr(torch, precision) if half else None, enabled=half)


def fastest_precision() -> Literal["bfloat16", "float32"]:
    """Return the fastest precision of this CPU: bfloat16 with AMX, else float32."""
    return "bfloat16" if "amx_bf16" in cpu_flags() else "float32"


@functools.cache
def cpu_flags() -> tuple[str, ...]:
    """Return the instruction sets of the CPU that select the kernels of matrix products."""
    flags = cpu_info().get("flags", cpu_info().get("Features", "")).split()
    return tuple(flag for flag in _FLAGS if flag in flags)


def available_cores() -> int:
    """Return the number of cores of this process, which taskset and containers may limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_info() -> dict[str, str]:
    """Return the first processor of /proc/cpuinfo; empty if there is no such file."""
    try:
        text = read_text("/proc/cpuinfo")
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}


@functools.cache  # warn once
def _warn(sentence: str) -> None:
    LOGGER.warning("%s", sentence)


def timed(run: Callable[[], Any], calls: int, device: str) -> float:
    """Return the seconds that some consecutive calls take on a device.

    Events of CUDA and Intel GPUs measure on the device. Others are timed by the clock of the CPU, which waits
    for them.
    """
    if device in EVENTS:
        start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
        synchronize(device)
        start.record()
        for _ in range(calls):
            run()
        end.record()
        synchronize(device)
        return float(start.elapsed_time(end)) / 1e3
    synchronize(device)
    began = time.perf_counter()
    for _ in range(calls):
        run()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: str) -> None:
    """Wait until an accelerator has finished; the CPU always has."""
    if device != "cpu":
        torch.accelerator.synchronize()
