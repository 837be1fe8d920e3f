r"""Combine the covariances of parts: tiles of an image, chunks of a sequence, ranks of a job.

A part is described by its total weight w, its mean μ and its scatter :math:`S = \sum_p w_p (x_p - \mu)(x_p -
\mu)^T`. Two parts combine exactly (Chan, Golub, LeVeque, 1979):

.. math::
    w = w_1 + w_2, \qquad \mu = \mu_1 + \tfrac{w_2}{w} \delta, \qquad
    S = S_1 + S_2 + \tfrac{w_1 w_2}{w} \delta \delta^T, \qquad \delta = \mu_2 - \mu_1 .

The covariance is S/w. Only the differences of means are squared, so a large offset costs no digits. Parts
are combined in float64, so that their number and order do not matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from covpool.device import has_float64
from covpool.errors import UsageError
from covpool.functional.covariance import as_batch, covariance, normalized_weights, without_outliers
from covpool.functional.numerics import at_least_float32, autocast_off


class Moments(NamedTuple):
    """Weight, mean and scatter of some features, in float64 where the device has it.

    :func:`moments` computes them, and :func:`covariance_merge` combines them. They are plain tensors: send
    them to another process, or save them.

    Attributes:
        weight: ``(...)``, the number of positions, or the sum of their weights.
        mean: ``(..., C)``.
        scatter: ``(..., C, C)``, the covariance times the weight.
    """

    weight: Tensor
    mean: Tensor
    scatter: Tensor

    def covariance(self) -> Tensor:
        """Return the covariance, ``(..., C, C)``; zero where the weight is zero."""
        return self.scatter / _nonzero(self.weight)[..., None, None]


def moments(x: Tensor, *, weights: Tensor | None = None) -> Moments:
    """Return weight, mean and scatter of n features of C channels.

    Args:
        x: features ``(..., C, n)``: channels, then positions.
        weights: ``(..., n)``, boolean or non-negative. Their sum is the weight of this part in a merge.
            Positions of weight zero may contain anything, including NaN.

    Example:
        >>> part = moments(torch.tensor([[1.0, 3.0], [2.0, 2.0]]))
        >>> part.weight.item(), part.mean.tolist(), part.scatter.round(decimals=3).tolist()
        (2.0, [2.0, 2.0], [[2.0, 0.0], [0.0, 0.0]])
    """
    sigma = covariance(x, weights=weights)  # checks the arguments
    dtype = torch.float64 if has_float64(x.device) else torch.float32
    with autocast_off(x):
        x_BCn, weights_Bn = as_batch(x, weights)
        if weights_Bn is None:
            shift = x_BCn[..., :1].detach()
            mean = (x_BCn - shift).sum(-1, dtype=dtype) / x.shape[-1]
            weight = torch.full(x.shape[:-2], x.shape[-1], dtype=dtype, device=x.device)
        else:
            x_BCn = without_outliers(x_BCn, weights_Bn)
            w_B1n = normalized_weights(weights_Bn, x_BCn.dtype).unsqueeze(1)
            # Without the shift, a constant channel would get a mean with rounding errors.
            heaviest = w_B1n.argmax(-1, keepdim=True).expand(-1, x_BCn.shape[1], -1)
            shift = x_BCn.detach().gather(-1, heaviest)
            mean = ((x_BCn - shift) * w_B1n).sum(-1, dtype=dtype)
            weight = weights_Bn.sum(-1, dtype=dtype).reshape(x.shape[:-2])
        mean = (mean + shift.squeeze(-1)).reshape(x.shape[:-1])
        return Moments(weight, mean, sigma.to(dtype) * weight[..., None, None])


def covariance_merge(parts: Iterable[tuple[Tensor, Tensor, Tensor]]) -> Moments:
    """Combine the :class:`Moments` of several parts, such as tiles of an image, into those of the whole.

    The result equals :func:`moments` of the concatenated positions up to rounding, in any order of the
    parts. It is differentiable. Pool with one root at the end:
    ``matrix_sqrt(covariance_merge(parts).covariance())``.

    Args:
        parts: ``(weight, mean, scatter)`` of each, as :func:`moments` returns them, with equal shapes.

    Raises:
        ValueError: if there are no parts, or their shapes differ.

    Example:
        >>> left, right = torch.tensor([[1.0, 2.0]]), torch.tensor([[6.0]])
        >>> whole = covariance_merge([moments(left), moments(right)])
        >>> whole.weight.item(), whole.mean.item(), whole.covariance().allclose(
        ...     covariance(torch.cat([left, right], dim=1)).double())
        (3.0, 3.0, True)
    """
    moments = [Moments(*part) for part in parts]
    if not moments:
        raise UsageError("covariance_merge needs at least one part; got none")
    shapes = {tuple(part.mean.shape) for part in moments}
    if len(shapes) > 1:
        listed = " and ".join(map(str, sorted(shapes)))
        raise UsageError(
            f"all parts must have the same batch and channels; the means have shapes {listed}: "
            "merge the parts of each image, and compute them with the same network"
        )
    return reduce(_merge, moments)


class StreamingCovariance:
    """The covariance of features that arrive part by part, so that they need not fit in memory.

    Memory does not grow with the number of parts: it holds one ``(..., C, C)`` matrix. But if the
    features require gradients, torch keeps every part for backward. If you need no gradients, call
    :meth:`update` under ``torch.no_grad()``.

    Example:
        >>> x = torch.randn(2, 3, 100)  # two images, 3 channels, 100 positions
        >>> stream = StreamingCovariance()
        >>> for tile in x.split(30, dim=-1):
        ...     stream.update(tile)
        >>> torch.allclose(stream.result(), covariance(x), atol=1e-6)
        True
    """

    def __init__(self) -> None:
        self._moments: Moments | None = None
        self._dtype = torch.float32

    def update(self, x: Tensor, *, weights: Tensor | None = None) -> None:
        """Add the features of a part.

        Args:
            x: ``(..., C, n)``; n may differ from part to part.
            weights: ``(..., n)``, boolean or non-negative; see :func:`moments`.
        """
        part = moments(x, weights=weights)
        self._moments = part if self._moments is None else covariance_merge([self._moments, part])
        self._dtype = torch.promote_types(self._dtype, at_least_float32(x.new_empty(0)).dtype)

    @property
    def moments(self) -> Moments:
        """Weight, mean and scatter of all parts so far, to combine with those of another stream."""
        if self._moments is None:
            raise UsageError("no features yet: call update(x) first")
        return self._moments

    def result(self) -> Tensor:
        """Return the covariance of all parts so far, ``(..., C, C)``, in the dtype of the features."""
        return self.moments.covariance().to(self._dtype)


def _merge(a: Moments, b: Moments) -> Moments:
    weight = a.weight + b.weight
    share = b.weight / _nonzero(weight)
    delta = b.mean - a.mean
    outer = delta.unsqueeze(-1) * delta.unsqueeze(-2)
    return Moments(
        weight,
        a.mean + share.unsqueeze(-1) * delta,
        a.scatter + b.scatter + (a.weight * share)[..., None, None] * outer,
    )


def _nonzero(weight: Tensor) -> Tensor:
    return torch.where(weight == 0, 1.0, weight)
