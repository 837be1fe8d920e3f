"""What a pooling method is."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from torch import Tensor, nn


class Method(nn.Module):
    """Features ``(B, C, n)`` to one vector an image, ``(B, out_features)``.

    A subclass takes ``channels`` and its own options, keyword-only with defaults; it sets ``summary``,
    a line for :func:`covpool.nn.methods`, and ``out_features``; it gives positions of weight zero no
    say, whatever they hold. Layouts and the reduction are not its business. ``order`` is that of the
    moment it pools: a model around a first-order method takes the backbone as it is.
    """

    summary: ClassVar[str]
    order: ClassVar[int] = 2
    out_features: int

    def __init__(self, channels: int, **options: Any) -> None:
        super().__init__()

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with weights ``(B, n)`` or none."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Start again; a method without parameters has nothing to do."""

    @classmethod
    def options(cls) -> tuple[str, ...]:
        """The names of the options this method takes."""
        parameters = inspect.signature(cls).parameters.values()
        return tuple(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)
