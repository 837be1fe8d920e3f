"""The machine a result comes from: enough to compare results, nothing that names its owner."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

# Instruction sets that decide which kernels the products run on.
_TELLING_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "sve")
# Words of a CPU's model name that tell nothing apart.
_NOISE_WORDS = re.compile(r"\((r|tm)\)|\b(intel|amd|cpu|processor|\d+-core)\b|@.*$|,.*$", re.IGNORECASE)
_TELLING_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "LD_PRELOAD",
)


def describe_machine(device: str) -> dict[str, Any]:
    """CPU, cores and threads used, memory, instruction sets, and the GPU if that is the device."""
    cpu = _proc_cpuinfo()
    flags = set(cpu.get("flags", cpu.get("Features", "")).split())
    return {
        "cpu": cpu.get("model name") or platform.processor() or platform.machine(),
        "cores": _cores(),
        "threads": torch.get_num_threads(),
        "memory_gib": _memory_gib(),
        "flags": [flag for flag in _TELLING_FLAGS if flag in flags],
        "capability": torch.backends.cpu.get_cpu_capability(),
        "system": platform.system(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "environment": {name: os.environ[name] for name in _TELLING_VARIABLES if name in os.environ},
    }


def machine_name(machine: dict[str, Any]) -> str:
    """A short name for file names: ``xeon-amx-2c``, or the GPU's name."""
    if machine["gpu"] is not None:
        return _slug(machine["gpu"])
    amx = ["amx"] if "amx_tile" in machine["flags"] else []
    model = _slug(_NOISE_WORDS.sub(" ", machine["cpu"])) or _slug(machine["cpu"]) or "cpu"
    # Held to fewer threads than it has cores, a machine is in effect a smaller one.
    used = min(machine["cores"], machine["threads"])
    return "-".join([model, *amx, f"{used}c"])


def _slug(words: str) -> str:
    return "-".join(re.findall(r"[a-z0-9]+", words.lower()))


def _cores() -> int:
    """Cores this process may run on, which taskset and containers make fewer than the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_gib() -> float | None:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    return round(total / 2**30, 1)


def _proc_cpuinfo() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}
