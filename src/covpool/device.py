"""Choose the precision of the computation on a device."""

from __future__ import annotations

import functools
import logging
from typing import Literal

import torch

from covpool.provenance.machine import describe_machine

LOGGER = logging.getLogger("covpool")


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Autocast to ``"bfloat16"`` or ``"float16"``; with ``"float32"`` it does nothing."""
    half = precision != "float32"
    if device.type == "cpu" and precision == "bfloat16":
        _warn_of_emulation()
    return torch.autocast(device.type, getattr(torch, precision) if half else None, enabled=half)


def fastest_precision() -> Literal["bfloat16", "float32"]:
    """Of this CPU: bfloat16 where it has AMX, which multiplies it several times as fast."""
    return "bfloat16" if "amx_bf16" in describe_machine("cpu")["flags"] else "float32"


@functools.cache  # once is enough
def _warn_of_emulation() -> None:
    flags = describe_machine("cpu")["flags"]
    # Of ARM's processors the flags do not tell.
    if "avx2" in flags and not {"amx_bf16", "avx512_bf16"} & set(flags):
        LOGGER.warning("this CPU cannot multiply bfloat16, and float32 is several times as fast on it")
