"""What a pooling method is."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """The options of a method that has none."""


class Method(nn.Module):
    """Features ``(B, C, n)`` to one vector an image, ``(B, out_features)``.

    A subclass sets ``summary``, a line for :func:`covpool.nn.methods`, and ``Options``, a frozen dataclass
    that checks itself, with a default for every field; it gives positions of weight zero no say, whatever
    they hold. ``out_features`` is d(d+1)/2, the upper triangle of a symmetric matrix, unless it says
    otherwise. Layouts and the reduction are not its business. ``order`` is that of the moment it pools: a
    model around a first-order method takes the backbone as it is. ``reduces`` says that the method projects
    the channels itself: a model then puts no reduction before it unless it is asked for one.

    Args:
        channels: d, the channels of the features.
        **options: fields of ``Options``.
    """

    summary: ClassVar[str]
    order: ClassVar[int] = 2
    reduces: ClassVar[bool] = False
    Options: ClassVar[type[Any]] = NoOptions
    options: Any

    def __init__(self, channels: int, **options: Any) -> None:
        super().__init__()
        self.channels = channels
        self.options = self.Options(**options)

    @property
    def out_features(self) -> int:
        """The length of the vector."""
        return self.channels * (self.channels + 1) // 2

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with weights ``(B, n)`` or none."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Start again; a method without parameters has nothing to do."""

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """The names of the options this method takes."""
        return tuple(field.name for field in dataclasses.fields(cls.Options))

    def extra_repr(self) -> str:
        """Every option and the size of the result."""
        told = [f"{name}={getattr(self.options, name)!r}" for name in self.option_names()]
        return ", ".join([*told, f"out_features={self.out_features}"])
