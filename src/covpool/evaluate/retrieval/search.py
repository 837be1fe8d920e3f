"""Which vectors are nearest to which, by cosine similarity, exactly; a block of queries at a time.

Vectors have length 1, so their product is the cosine. Of equal similarities, the image that comes first in
the gallery comes first.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

# Bytes of a block, and those that each of its similarities takes while it is sorted and scored.
MEMORY = 1 << 28
BYTES = 40

# The place of the first query, and (b, k): for each query of the block, places in the gallery, nearest first.
Block = tuple[int, Tensor]


def search_exact(queries_QD: Tensor, gallery_GD: Tensor | None, memory: int = MEMORY) -> Iterator[Block]:
    """The whole ranking of every query.

    Args:
        queries_QD: vectors.
        gallery_GD: vectors; ``None`` if they are the queries, each of which is left out of its own ranking.
        memory: that a block may take, in bytes; a block is one query at least.
    """
    among_GD = queries_QD if gallery_GD is None else gallery_GD
    rows = max(1, memory // (BYTES * len(among_GD)))
    for start in range(0, len(queries_QD), rows):
        block = queries_QD[start : start + rows]
        similarity = block @ among_GD.T
        if gallery_GD is None:
            here = torch.arange(len(block))
            similarity[here, start + here] = -torch.inf  # so it comes last
        order = similarity.sort(dim=1, descending=True, stable=True).indices
        yield start, order if gallery_GD is not None else order[:, :-1]


def search_faiss(
    queries_QD: Tensor, gallery_GD: Tensor | None, k: int, memory: int = MEMORY
) -> Iterator[Block]:
    """The ``k`` nearest of every query, by faiss's exact index for inner products (``IndexFlatIP``).

    Args:
        queries_QD: as in :func:`search_exact`.
        gallery_GD: likewise.
        k: how many; at most all.
        memory: likewise.
    """
    import faiss

    among_GD = queries_QD if gallery_GD is None else gallery_GD
    index = faiss.IndexFlatIP(among_GD.shape[1])
    index.add(among_GD.numpy())
    more = int(gallery_GD is None)  # the query itself
    rows = max(1, memory // (BYTES * (k + more)))
    for start in range(0, len(queries_QD), rows):
        similarity, places = index.search(queries_QD[start : start + rows].numpy(), k + more)
        if gallery_GD is None:
            itself = places == np.arange(start, start + len(places))[:, None]
            similarity[itself] = -np.inf
        order = np.lexsort((places, -similarity))[:, :k]
        yield start, torch.from_numpy(np.take_along_axis(places, order, axis=1))
