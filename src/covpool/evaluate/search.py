"""Embed the images of a set, search nearest neighbors, and score the result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from covpool.data.image_set import ImageSet, Joined
from covpool.data.loader import BadImage
from covpool.data.sources import split_names
from covpool.errors import UsageError
from covpool.inference.forward import Pass
from covpool.models.model import PooledClassifier
from covpool.processes import Processes

NOTHING = "no image is readable, so there is nothing to search: run 'covpool check'"


@dataclass(frozen=True, eq=False)
class Embeddings:
    """Embeddings of the readable images of a set, in its order.

    Attributes:
        ids: ``(N,)``, index of each image in the set.
        labels: ``(N,)``, class of each image.
        vectors: ``(N, D)``, float32, of unit length.
        bad: the unreadable images.
    """

    ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    vectors: Tensor
    bad: tuple[BadImage, ...]


@dataclass(frozen=True, eq=False)
class Side:
    """The queries or the gallery."""

    split: str
    images: ImageSet
    embeddings: Embeddings

    def name(self, place: int) -> str:
        """Return the image name of an embedding, by index."""
        return self.images.name(int(self.embeddings.ids[place]))

    def label(self, place: int) -> str:
        """Return the class name of an embedding, by index."""
        return self.images.classes[int(self.embeddings.labels[place])]


def taken_from(gallery: Side, split: str, images: ImageSet) -> tuple[Side, NDArray[np.int64]]:
    """Return queries whose embeddings are in the gallery already, and their indices in it.

    Args:
        gallery: a gallery that holds all splits of the queries.
        split: split of the queries.
        images: the queries.

    Raises:
        ValueError: if no query is readable.
    """
    starts, total = dict[str, int](), 0
    for name, part in zip(split_names(gallery.split), _parts(gallery.images), strict=True):
        starts[name], total = total, total + len(part)
    parts = zip(split_names(split), _parts(images), strict=True)
    numbers = np.concatenate([starts[name] + np.arange(len(part)) for name, part in parts])
    known = gallery.embeddings
    indices = np.searchsorted(known.ids, numbers).clip(max=len(known.ids) - 1)
    usable = known.ids[indices] == numbers
    if not usable.any():
        raise UsageError(NOTHING)
    indices = indices[usable]
    vectors = known.vectors[torch.from_numpy(indices)]
    # Unreadable images are listed for the gallery, so not again here.
    return Side(
        split, images, Embeddings(np.flatnonzero(usable), known.labels[indices], vectors, ())
    ), indices


def _parts(images: ImageSet) -> tuple[ImageSet, ...]:
    """Return the set of each split."""
    return images.sets if isinstance(images, Joined) else (images,)


def embed(model: PooledClassifier, images: ImageSet, options: Pass, processes: Processes) -> Embeddings:
    """Compute the embeddings of a set: the input of the classifier, scaled to unit length.

    The first process, which searches, gets the embeddings of all images. The others keep only their own:
    all embeddings in every process would take too much memory.

    Raises:
        ValueError: if no image is readable, or an embedding is not finite.
    """

    def vectors(batch: Tensor) -> dict[str, Tensor]:
        received = model.forward_head(model.forward_features(batch), pre_logits=True)
        return {"vectors": F.normalize(received.float(), dim=1)}

    def embed_share() -> Embeddings:
        results = list(options.run(model, images, processes, vectors))
        batches = [result for result in results if len(result.ids)]
        return Embeddings(
            np.concatenate([np.zeros(0, np.int64), *(result.ids for result in batches)]),
            np.concatenate([np.zeros(0, np.int64), *(result.labels for result in batches)]),
            torch.cat([torch.empty(0, model.head_hidden_size), *(r.outputs["vectors"][0] for r in batches)]),
            tuple(image for result in results for image in result.bad),
        )

    mine = processes.together(embed_share)
    gathered = processes.gather_to_first(mine)
    joined: list[Embeddings] = []
    processes.by_first(lambda: joined.append(_joined(gathered)))  # an error there ends all processes
    return joined[0] if joined else mine


def _joined(gathered: list[Embeddings]) -> Embeddings:
    ids = np.concatenate([part.ids for part in gathered])
    if not len(ids):
        raise UsageError(NOTHING)
    order = np.argsort(ids, kind="stable")
    vectors = torch.cat([part.vectors for part in gathered])[torch.from_numpy(order)]
    labels = np.concatenate([part.labels for part in gathered])
    bad = tuple(image for part in gathered for image in part.bad)
    return Embeddings(ids[order], labels[order], vectors, bad)


Column = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Scores:
    """Retrieval scores per query; NaN for a query without another image of its class in the gallery.

    Attributes:
        matches: R, the number of gallery images of the query's class.
        first_match: rank of the first match, from 1; 0 if none was found.
        precision: average precision, the mean over all R matches of the precision at their ranks; ``None`` if
            rankings are incomplete.
        precision_at_r: the same sum over the first R ranks, divided by R.
        nearest: ``(Q, n)``, gallery indices of the nearest images.
    """

    matches: NDArray[np.int64]
    first_match: NDArray[np.int64]
    precision: Column | None
    precision_at_r: Column
    nearest: NDArray[np.int64]

    @property
    def counted(self) -> NDArray[np.bool_]:
        """Mask of the queries that have a match in the gallery."""
        return self.matches > 0

    @property
    def best_known_precision(self) -> Column:
        """Average precision, or average precision at R if rankings are incomplete."""
        return self.precision_at_r if self.precision is None else self.precision

    def recall(self, k: int) -> float:
        """Return recall at k: the share of queries with a match among the first ``k``."""
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
        blocks: blocks of rankings, with at least as many ranks as a query has matches.
        query_labels: class of each query.
        gallery_labels: class of each gallery image.
        nearest: number of nearest images to store per query.
        without_itself: whether every query is in the gallery and excluded from its own ranking.
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
    """Return first match, average precision and average precision at R of rankings ``(b, k)``."""
    ranks = torch.arange(1, is_match.shape[1] + 1)
    first = torch.where(is_match.any(dim=1), is_match.int().argmax(dim=1) + 1, 0)
    precision = (is_match.cumsum(dim=1) / ranks.double()) * is_match
    at_r = (precision * (ranks <= matches[:, None])).sum(dim=1)
    return first, precision.sum(dim=1) / matches, at_r / matches


# Bytes per block, and bytes per similarity while a block is sorted and scored.
MEMORY = 1 << 28
BYTES = 40

# Index of the first query, and (b, k): for each query of the block, gallery indices, nearest first.
Block = tuple[int, Tensor]


def search_exact(
    queries_QD: Tensor, gallery_GD: Tensor, itself_Q: Tensor | None = None, memory: int = MEMORY
) -> Iterator[Block]:
    """Yield the complete ranking of every query.

    Args:
        queries_QD: query embeddings.
        gallery_GD: gallery embeddings.
        itself_Q: gallery index of each query, which is excluded from its ranking; ``None`` if queries are not
            in the gallery.
        memory: maximum memory of a block in bytes; a block has at least one query.
    """
    rows = max(1, memory // (BYTES * len(gallery_GD)))
    for start in range(0, len(queries_QD), rows):
        block = queries_QD[start : start + rows]
        similarity = block @ gallery_GD.T
        if itself_Q is not None:
            similarity[torch.arange(len(block)), itself_Q[start : start + rows]] = -torch.inf  # sorts last
        order = similarity.sort(dim=1, descending=True, stable=True).indices
        yield start, order if itself_Q is None else order[:, :-1]


def search_faiss(
    queries_QD: Tensor, gallery_GD: Tensor, k: int, itself_Q: Tensor | None = None, memory: int = MEMORY
) -> Iterator[Block]:
    """Yield the ``k`` nearest images of every query, by faiss's exact inner-product index (``IndexFlatIP``).

    Args:
        queries_QD: as in :func:`search_exact`.
        gallery_GD: as in :func:`search_exact`.
        k: number of nearest images, at most the size of the gallery.
        itself_Q: as in :func:`search_exact`.
        memory: as in :func:`search_exact`.
    """
    import faiss

    index = faiss.IndexFlatIP(gallery_GD.shape[1])
    index.add(gallery_GD.numpy())
    more = int(itself_Q is not None)  # the query itself
    rows = max(1, memory // (BYTES * (k + more)))
    for start in range(0, len(queries_QD), rows):
        similarity, indices = index.search(queries_QD[start : start + rows].numpy(), k + more)
        if itself_Q is not None:
            similarity[indices == itself_Q[start : start + rows, None].numpy()] = -np.inf
        order = np.lexsort((indices, -similarity))[:, :k]
        yield start, torch.from_numpy(np.take_along_axis(indices, order, axis=1))
