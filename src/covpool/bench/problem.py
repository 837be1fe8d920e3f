"""What is timed: feature maps of named sizes, with a fixed upstream gradient."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from covpool.errors import UsageError
from covpool.functional.arguments import check_whole


@dataclass(frozen=True)
class Size:
    """Features of one image, ``(channels, positions)``, and how many images make a batch."""

    name: str
    channels: int
    positions: int
    batch: int = 16

    def __post_init__(self) -> None:
        for name in ("channels", "positions", "batch"):
            check_whole(name, getattr(self, name))


SIZES = {
    size.name: size
    for size in (
        Size("14x14", 256, 196),
        Size("13x13", 256, 169),
        Size("7x7", 256, 49),
        Size("vit", 768, 196, batch=8),
        Size("28x28", 256, 784),
    )
}


def chosen_sizes(names: Iterable[str | Size] | None, batch: int | None = None) -> list[Size]:
    """Sizes by name, or ``"C:n"`` for any other; all the named ones for None."""
    sizes = [_size(name) for name in (SIZES if names is None else names)]
    return sizes if batch is None else [replace(size, batch=batch) for size in sizes]


def _size(name: str | Size) -> Size:
    if isinstance(name, Size):
        return name
    if name in SIZES:
        return SIZES[name]
    channels, colon, positions = name.partition(":")
    if not (colon and channels.isdecimal() and positions.isdecimal()):
        raise UsageError(f"sizes must be among {', '.join(SIZES)}, or C:n such as 64:49; got {name!r}")
    return Size(name, int(channels), int(positions))


@dataclass(frozen=True)
class Problem:
    """One size on one device: the features, and the gradient that comes back from above."""

    size: Size
    steps: int = 5
    seed: int = 0
    device: str = "cpu"

    @cached_property
    def features(self) -> Tensor:
        """``(B, C, n)``, not negative: what the ReLU before the pooling leaves."""
        size = self.size
        return self._normal(0, size.batch, size.channels, size.positions).relu()

    @cached_property
    def upstream(self) -> Tensor:
        """``(B, C, C)``, dense and symmetric.

        Symmetric because the equations of the paper are right for that alone; it costs a contender
        exactly what any other costs.
        """
        size = self.size
        grad = self._normal(1, size.batch, size.channels, size.channels)
        return grad + grad.mT

    def _normal(self, stream: int, *shape: int) -> Tensor:
        # Drawn on the CPU, so that every device sees the same numbers.
        generator = torch.Generator().manual_seed(2 * self.seed + stream)
        return torch.randn(*shape, generator=generator).to(self.device)
