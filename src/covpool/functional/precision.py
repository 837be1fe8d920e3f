"""Which dtype the mathematics runs in, and the island where autocast has no say."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision becomes float32; float32 and float64 pass through untouched."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def autocast_off(x: Tensor) -> AbstractContextManager[object]:
    """Inside, every product runs in the dtype of its operands, whatever autocast says outside.

    ``torch.amp.custom_fwd`` would be the usual tool; it does not work with ``setup_context``.
    """
    if x.device.type == "meta":  # shapes alone: there is nothing to cast, and autocast does not know it
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)
