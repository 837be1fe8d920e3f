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


def search_exact(
    queries_QD: Tensor, gallery_GD: Tensor, itself_Q: Tensor | None = None, memory: int = MEMORY
) -> Iterator[Block]:
    """The whole ranking of every query.

    Args:
        queries_QD: vectors.
        gallery_GD: vectors.
        itself_Q: the place of each query in the gallery, which is left out of its ranking; ``None`` if they
            are not in it.
        memory: that a block may take, in bytes; a block is one query at least.
    """
    rows = max(1, memory // (BYTES * len(gallery_GD)))
    for start in range(0, len(queries_QD), rows):
        block = queries_QD[start : start + rows]
        similarity = block @ gallery_GD.T
        if itself_Q is not None:
            similarity[torch.arange(len(block)), itself_Q[start : start + rows]] = -torch.inf  # so it is last
        order = similarity.sort(dim=1, descending=True, stable=True).indices
        yield start, order if itself_Q is None else order[:, :-1]


def search_faiss(
    queries_QD: Tensor, gallery_GD: Tensor, k: int, itself_Q: Tensor | None = None, memory: int = MEMORY
) -> Iterator[Block]:
    """The ``k`` nearest of every query, by faiss's exact index for inner products (``IndexFlatIP``).

    Args:
        queries_QD: as in :func:`search_exact`.
        gallery_GD: likewise.
        k: how many; at most all.
        itself_Q: likewise.
        memory: likewise.
    """
    import faiss

    index = faiss.IndexFlatIP(gallery_GD.shape[1])
    index.add(gallery_GD.numpy())
    more = int(itself_Q is not None)  # the query itself
    rows = max(1, memory // (BYTES * (k + more)))
    for start in range(0, len(queries_QD), rows):
        similarity, places = index.search(queries_QD[start : start + rows].numpy(), k + more)
        if itself_Q is not None:
            similarity[places == itself_Q[start : start + rows, None].numpy()] = -np.inf
        order = np.lexsort((places, -similarity))[:, :k]
        yield start, torch.from_numpy(np.take_along_axis(places, order, axis=1))
