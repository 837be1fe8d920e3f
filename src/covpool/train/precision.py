"""Autocast by the name of a precision."""

from __future__ import annotations

import torch


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Autocast to ``"bfloat16"`` or ``"float16"``; with ``"float32"`` it does nothing."""
    half = precision != "float32"
    return torch.autocast(device.type, getattr(torch, precision) if half else None, enabled=half)
