"""Attention over spatial positions: weights of a softmax, and the values that they average.

Shapes: x ``(B, C, n)``, scores and attention ``(B, M, n)`` of M queries, weights ``(B, n)``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from covpool.functional.covariance import normalized_weights
from covpool.functional.numerics import reciprocal_or_zero

# A score at a position of weight zero is clipped at this much above the largest score that counts. It does
# not change the value, only the derivative with respect to its weight.
HIGHEST = 30


def scores(queries: Tensor, x: Tensor) -> Tensor:
    r"""Return :math:`q_m^T x_p` for queries ``(M, C)``, ``(B, M, n)``.

    ``queries @ x`` copies x first, which takes several times as long for some 10 queries.
    """
    return torch.bmm(queries.expand(x.shape[0], -1, -1), x)


def attention(scores: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""Return the softmax of scores over positions, each position counted by its weight.

    .. math::
        a_{mp} = \frac{w_p e^{s_{mp}}}{\sum_r w_r e^{s_{mr}}}

    A position of weight 2 counts as two positions. Positions of weight zero get none, and the derivative with
    respect to their weight is correct. If all weights are zero, all attention is zero.

    Args:
        scores: ``(B, M, n)``, finite at positions of weight zero.
        weights: ``(B, n)``, boolean or non-negative.

    Example:
        >>> attention(torch.zeros(1, 1, 3), torch.tensor([[1.0, 3.0, 0.0]]))
        tensor([[[0.2500, 0.7500, 0.0000]]])
    """
    if weights is None:
        return scores.softmax(-1)
    w_B1n = normalized_weights(weights, scores.dtype).unsqueeze(1)
    hidden_B1n = w_B1n == 0
    scores_BMn = scores + w_B1n.masked_fill(hidden_B1n, 1.0).log()
    largest_BM1 = scores_BMn.detach().masked_fill(hidden_B1n, -torch.inf).amax(-1, keepdim=True)
    largest_BM1 = largest_BM1.masked_fill(hidden_B1n.all(-1, keepdim=True), 0.0)
    e_BMn = (scores_BMn - largest_BM1).clamp(max=HIGHEST).exp()
    e_BMn = torch.where(hidden_B1n, e_BMn * w_B1n, e_BMn)
    return e_BMn * reciprocal_or_zero(e_BMn.sum(-1, keepdim=True))


def slices(channels: int, queries: int) -> tuple[int, int]:
    """Return the number of queries that share the channels, and the channels of each.

    The last query may have fewer channels. There are at most ``queries``, and none without a channel.

    Example:
        >>> slices(320, 32), slices(6, 32), slices(10, 4)
        ((32, 10), (6, 1), (4, 3))
    """
    each = -(-channels // queries)
    return -(-channels // each), each


def by_query(x: Tensor, queries: int, each: int) -> Tensor:
    """Split the first dimension, the channels, into ``(queries, each)``, padded with zeros."""
    missing = queries * each - x.shape[0]
    padded = F.pad(x, [0, 0] * (x.ndim - 1) + [0, missing]) if missing else x
    result: Tensor = padded.unflatten(0, (queries, each))
    return result


def attended(x: Tensor, attention: Tensor, value: Tensor | None, each: int) -> Tensor:
    r"""Average the values of every query's own slice of channels by its attention, ``(B, D)``.

    .. math::
        y_c = \sum_p a_{mp} (V x_p)_c = \Big(V \sum_p a_{mp} x_p\Big)_c, \qquad c \text{ in the slice of } m

    The features are averaged before the projection: M·C·n + D·C products in place of D·C·n.

    Args:
        x: ``(B, C, n)``.
        attention: ``(B, M, n)``.
        value: V, ``(D, C)``; ``None`` for the features themselves, D = C.
        each: channels of a slice; see :func:`slices`.
    """
    queries = attention.shape[1]
    if value is None and queries == 1:
        return torch.bmm(attention, x.mT).squeeze(1)
    if value is None:
        x_BMJn = by_query(x.transpose(0, 1), queries, each).movedim(2, 0)
        return torch.matmul(x_BMJn, attention.unsqueeze(-1)).flatten(1)[:, : x.shape[1]]
    mean_MBC = torch.bmm(attention, x.mT).transpose(0, 1)
    y_MBJ = torch.bmm(mean_MBC, by_query(value, queries, each).mT)
    return y_MBJ.transpose(0, 1).flatten(1)[:, : value.shape[0]]
