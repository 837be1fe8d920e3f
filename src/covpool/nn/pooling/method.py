"""The interface of a pooling method, and the two simplest ones: the average and the plain covariance."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from torch import Tensor, nn

from covpool.functional.covariance import covariance, mean
from covpool.functional.triu import triu_vec


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


class Gap(Method):
    r"""The mean over positions, :math:`\tfrac1n \sum_p x_p`, or :math:`\sum_p w_p x_p` with weights.

    What every image network ends with. It has no use for a reduction: make the layer with ``dim=None``.
    """

    summary: ClassVar[str] = "global average pooling, the first-order baseline"
    order: ClassVar[int] = 1

    @property
    def out_features(self) -> int:
        """As many as there are channels."""
        return self.channels

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Average x ``(B, C, n)``, with weights ``(B, n)`` or none, in float32 at least."""
        return mean(x, weights)


class Cov(Method):
    r"""The covariance itself, :math:`\Sigma = X \bar I X^T`, as a vector of d(d+1)/2 numbers.

    What the normalizations of the other methods are measured against. See
    :func:`covpool.functional.covariance`. Cost: one product of d×n by n×d forward, two backward. Zero
    eigenvalues stay zero, and large ones stay as large as they are.
    """

    summary: ClassVar[str] = "the covariance without normalization (Plain-COV)"

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with weights ``(B, n)`` or none."""
        return triu_vec(covariance(x, weights=weights))
