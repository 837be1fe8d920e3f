"""Choose the precision of the computation on a device."""

from __future__ import annotations

import functools
import logging
from typing import Literal

import torch

from covpool.provenance.machine import describe_machine

LOGGER = logging.getLogger("covpool")


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Autocast to ``"bfloat16"`` or ``"float16"``; ``"float32"`` does nothing."""
    half = precision != "float32"
    if device.type == "cpu" and precision == "bfloat16":
        _warn_of_emulation()
    return torch.autocast(device.type, getattr(torch, precision) if half else None, enabled=half)


def fastest_precision() -> Literal["bfloat16", "float32"]:
    """Return the fastest precision of this CPU: bfloat16 with AMX, else float32."""
    return "bfloat16" if "amx_bf16" in describe_machine("cpu")["flags"] else "float32"


@functools.cache  # warn once
def _warn_of_emulation() -> None:
    flags = describe_machine("cpu")["flags"]
    # The flags of ARM processors do not list it.
    if "avx2" in flags and not {"amx_bf16", "avx512_bf16"} & set(flags):
        LOGGER.warning("this CPU has no bfloat16 arithmetic: float32 is several times as fast on it")
