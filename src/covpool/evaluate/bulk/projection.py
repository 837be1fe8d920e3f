"""Long vectors to short ones that keep their distances: a random projection.

By Johnson and Lindenstrauss, distances between a million vectors in N random directions differ from those in
all D by a factor in 1 ± ε, with N about 4·ln(10⁶)/(ε²/2 − ε³/3), whatever D is; in practice 512 numbers give
ε near 0.1 for most pairs. It needs no look at the data, so it is the same for every job of one seed.
"""

from __future__ import annotations

import torch
from torch import Tensor


def projection(length: int, to: int, seed: int = 0) -> Tensor:
    """A matrix ``(length, to)`` of orthogonal columns, √(length/to) long: it keeps lengths on average.

    Args:
        length: of the vectors.
        to: how many numbers are wanted, no more than ``length``.
        seed: the same one gives the same matrix.

    Raises:
        ValueError: if ``to`` is larger.

    Example:
        >>> matrix = projection(100, 20)
        >>> torch.allclose(matrix.T @ matrix, 5 * torch.eye(20), atol=1e-5)
        True
    """
    if to > length:
        raise ValueError(f"project must be at most {length}, the numbers that there are; got {to}")
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(length, to, generator=generator, dtype=torch.float64)
    orthogonal, triangle = torch.linalg.qr(normal)
    # With these signs every direction is equally likely, and no library's choice of them matters.
    matrix: Tensor = orthogonal * triangle.diagonal().sign() * (length / to) ** 0.5
    return matrix.float()
