"""Where the channels are: every input becomes ``(B, C, *positions)``, as a view, with flat weights.

Shapes: B batch, C channels, ``*positions`` one to three (or more) dimensions with n positions in all.
"""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

from covpool.functional.arguments import check_floating

Layout = Literal["auto", "channels_first", "channels_last"]
LAYOUTS = ("auto", "channels_first", "channels_last")


def channels_first(x: Tensor, in_channels: int, layout: Layout) -> Tensor:
    """``x`` as ``(B, C, *positions)``, never copied.

    Args:
        x: features in the given layout.
        in_channels: C, to check x against.
        layout: ``"channels_first"`` is ``(B, C, *positions)``, ``"channels_last"`` is
            ``(B, *positions, C)``, ``"auto"`` is channels last for 3-D x (tokens) and channels first
            for 4-D and 5-D (maps of images and of video).
    """
    check_floating("x", x)
    if x.ndim < 3 or (layout == "auto" and x.ndim > 5):
        raise ValueError(
            f"x must be (B, C, H, W), (B, C, T, H, W) or tokens (B, n, C); got shape {tuple(x.shape)}: "
            "pass features from before the backbone's own pooling"
        )
    last = layout == "channels_last" or (layout == "auto" and x.ndim == 3)
    axis = x.ndim - 1 if last else 1
    if x.shape[axis] != in_channels:
        raise ValueError(
            f"x must have in_channels={in_channels} channels in dimension {axis} for layout={layout!r}; "
            f"got shape {tuple(x.shape)}: {_advice(x, in_channels, last)}"
        )
    if 0 in x.shape[1:]:
        raise ValueError(f"x must have at least one position; got shape {tuple(x.shape)}")
    return x.movedim(-1, 1) if last else x


def _advice(x: Tensor, in_channels: int, last: bool) -> str:
    other, axis = ("channels_first", 1) if last else ("channels_last", x.ndim - 1)
    if x.shape[axis] == in_channels:
        return f'pass layout="{other}", dimension {axis} has as many'
    return f"make the layer with in_channels={x.shape[x.ndim - 1 if last else 1]}"


def flat_weights(weights: Tensor, x: Tensor) -> Tensor:
    """Weights of ``(B, *positions)`` or ``(B, n)`` as ``(B, n)``, for x of ``(B, C, *positions)``."""
    if not isinstance(weights, Tensor):
        raise TypeError(f"weights must be a torch.Tensor; got {type(weights).__name__}")
    batch, positions = x.shape[0], tuple(x.shape[2:])
    accepted = [(batch, *positions), (batch, math.prod(positions))]
    if tuple(weights.shape) not in accepted:
        shapes = " or ".join(str(shape) for shape in dict.fromkeys(accepted))
        raise ValueError(
            f"weights must be {shapes}, one number for each position; got shape {tuple(weights.shape)}: "
            "use weights.expand(...) if one mask serves the whole batch"
        )
    return weights.flatten(1)
