"""How good rankings are: recall at k, average precision, and that at R (Musgrave et al. 2020)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from covpool.evaluate.retrieval.search import Block

Column = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Scores:
    """For each query; NaN where the gallery has no image of its class, so that there is nothing to find.

    Attributes:
        matches: R, how many images of its class there are to find.
        first_match: the rank of the first that was found, from 1; 0 where none was.
        precision: the average precision, the mean over all R matches of the precision at their ranks;
            ``None`` where rankings are not whole.
        precision_at_r: the same sum over the first R ranks alone, by R.
        nearest: ``(Q, n)``, places in the gallery.
    """

    matches: NDArray[np.int64]
    first_match: NDArray[np.int64]
    precision: Column | None
    precision_at_r: Column
    nearest: NDArray[np.int64]

    @property
    def counted(self) -> NDArray[np.bool_]:
        """The queries that have something to find."""
        return self.matches > 0

    @property
    def best_known_precision(self) -> Column:
        """The average precision, or where that is not known, that at R."""
        return self.precision_at_r if self.precision is None else self.precision

    def recall(self, k: int) -> float:
        """The share of queries with a match among the first ``k``."""
        first = self.first_match[self.counted]
        return float(np.mean((first >= 1) & (first <= k)))


def score(
    blocks: Iterable[Block],
    query_labels: NDArray[np.int64],
    gallery_labels: NDArray[np.int64],
    nearest: int,
    *,
    without_itself: bool = False,
) -> Scores:
    """Score rankings.

    Args:
        blocks: of rankings, of at least as many ranks as a query has matches.
        query_labels: the class of each query.
        gallery_labels: that of each image of the gallery.
        nearest: of how many nearest images to keep the places.
        without_itself: whether every query is in the gallery, and left out of its ranking.
    """
    labels_Q, labels_G = torch.from_numpy(query_labels), torch.from_numpy(gallery_labels)
    same = (labels_G.bincount(minlength=int(labels_Q.max()) + 1))[labels_Q] - int(without_itself)
    ranks = len(labels_G) - int(without_itself)
    columns = []
    is_whole = True
    for start, order in blocks:
        place = slice(start, start + len(order))
        columns.append(
            (*_of_block(labels_G[order] == labels_Q[place, None], same[place]), order[:, :nearest])
        )
        is_whole &= order.shape[1] == ranks
    first, whole, at_r, nearest_Qn = (torch.cat(column).numpy() for column in zip(*columns, strict=True))
    return Scores(same.numpy(), first, whole if is_whole else None, at_r, nearest_Qn)


def _of_block(is_match: Tensor, matches: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """First match, average precision, and the same at R, of rankings ``(b, k)``."""
    ranks = torch.arange(1, is_match.shape[1] + 1)
    first = torch.where(is_match.any(dim=1), is_match.int().argmax(dim=1) + 1, 0)
    precision = (is_match.cumsum(dim=1) / ranks.double()) * is_match
    at_r = (precision * (ranks <= matches[:, None])).sum(dim=1)
    return first, precision.sum(dim=1) / matches, at_r / matches
