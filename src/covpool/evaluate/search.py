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

NOTHING = "none of the images could be used, so there is nothing to search"


@dataclass(frozen=True, eq=False)
class Embeddings:
    """Of the images of a set that could be used, in its order.

    Attributes:
        ids: ``(N,)``, the image's number in the set.
        labels: ``(N,)``, its class.
        vectors: ``(N, D)``, of length 1, float32.
        bad: the images that could not be used.
    """

    ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    vectors: Tensor
    bad: tuple[BadImage, ...]


@dataclass(frozen=True, eq=False)
class Side:
    """Queries, or what is searched.

    Attributes:
        split: its name.
        images: the set.
        embeddings: of its images.
    """

    split: str
    images: ImageSet
    embeddings: Embeddings

    def name(self, place: int) -> str:
        """Of the image at a place of the embeddings."""
        return self.images.name(int(self.embeddings.ids[place]))

    def label(self, place: int) -> str:
        """The name of its class."""
        return self.images.classes[int(self.embeddings.labels[place])]


def taken_from(gallery: Side, split: str, images: ImageSet) -> tuple[Side, NDArray[np.int64]]:
    """Queries whose vectors are in the gallery already, and their places there.

    Args:
        gallery: of all their splits, and perhaps others.
        split: of the queries.
        images: the queries.

    Raises:
        ValueError: in a sentence, if no query could be used.
    """
    starts, total = dict[str, int](), 0
    for name, part in zip(split_names(gallery.split), _parts(gallery.images), strict=True):
        starts[name], total = total, total + len(part)
    parts = zip(split_names(split), _parts(images), strict=True)
    numbers = np.concatenate([starts[name] + np.arange(len(part)) for name, part in parts])
    known = gallery.embeddings
    places = np.searchsorted(known.ids, numbers).clip(max=len(known.ids) - 1)
    usable = known.ids[places] == numbers
    if not usable.any():
        raise UsageError(NOTHING)
    places = places[usable]
    vectors = known.vectors[torch.from_numpy(places)]
    # What is bad is told of the gallery.
    return Side(split, images, Embeddings(np.flatnonzero(usable), known.labels[places], vectors, ())), places


def _parts(images: ImageSet) -> tuple[ImageSet, ...]:
    """The set of each split."""
    return images.sets if isinstance(images, Joined) else (images,)


def embed(model: PooledClassifier, images: ImageSet, options: Pass, processes: Processes) -> Embeddings:
    """Compute the embeddings of a set: the input of the classifier, scaled to unit length.

    The first process, which searches, gets the embeddings of all images. The others keep only their own:
    all embeddings in every process would take too much memory.

    Args:
        model: in evaluation mode.
        images: the set.
        options: batch size, workers, precision and progress.
        processes: share the images of the set.

    Raises:
        ValueError: if no image is readable, or an embedding is not finite.
    """

    def vectors(batch: Tensor) -> dict[str, Tensor]:
        received = model.forward_head(model.forward_features(batch), pre_logits=True)
        return {"vectors": F.normalize(received.float(), dim=1)}

    def own() -> Embeddings:
        results = list(options.run(model, images, processes, vectors))
        found = [result for result in results if len(result.ids)]
        return Embeddings(
            np.concatenate([np.zeros(0, np.int64), *(result.ids for result in found)]),
            np.concatenate([np.zeros(0, np.int64), *(result.labels for result in found)]),
            torch.cat([torch.empty(0, model.head_hidden_size), *(r.outputs["vectors"][0] for r in found)]),
            tuple(image for result in results for image in result.bad),
        )

    mine = processes.together(own)
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
