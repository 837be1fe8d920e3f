"""Whatever turns images into logits: torch as it is, compiled, or a file that was exported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

Array = NDArray[Any]
# Images, as the exported graph takes them, to logits.
Runner = Callable[[Array], Array]


def torch_runner(module: nn.Module | Callable[..., Any]) -> Runner:
    """A module of torch on the CPU."""

    def run(images: Array) -> Array:
        with torch.inference_mode():
            logits = module(torch.from_numpy(np.ascontiguousarray(images)))
        return np.asarray(logits.numpy())

    return run
