"""A vector for every image of a set, gathered from all processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from covpool.data.batch import BadImage, Batch
from covpool.data.image_set import ImageSet, Joined
from covpool.data.sources.listing import split_names
from covpool.evaluate.passes import channels_last
from covpool.models.model import PooledClassifier
from covpool.train.precision import autocast
from covpool.train.processes import Processes

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
        raise ValueError(NOTHING)
    places = places[usable]
    vectors = known.vectors[torch.from_numpy(places)]
    # What is bad is told of the gallery.
    return Side(split, images, Embeddings(np.flatnonzero(usable), known.labels[places], vectors, ())), places


def _parts(images: ImageSet) -> tuple[ImageSet, ...]:
    """The set of each split."""
    return images.sets if isinstance(images, Joined) else (images,)


def embed(
    model: PooledClassifier, batches: Iterable[Batch], processes: Processes, precision: str = "float32"
) -> Embeddings:
    """What the classifier receives, scaled to length 1: of all images in the first process, which searches.

    The others keep those of their own images: all vectors in every process would take its multiple.

    Args:
        model: in evaluation mode.
        batches: this process's.
        processes: among which the set is divided.
        precision: of autocast.

    Raises:
        ValueError: in a sentence, if no image could be used, or a vector is not finite.
    """
    own = processes.together(lambda: _own(model, batches, processes.device, precision))
    gathered = processes.gather_to_first(own)
    found: list[Embeddings] = []
    processes.by_first(lambda: found.append(_joined(gathered, precision)))  # what it raises, all raise
    return found[0] if found else own


def _joined(gathered: list[Embeddings], precision: str) -> Embeddings:
    bad = tuple(image for part in gathered for image in part.bad)
    parts = [part for part in gathered if len(part.ids)]
    if not parts:
        raise ValueError(NOTHING)
    ids = np.concatenate([part.ids for part in parts])
    order = np.argsort(ids, kind="stable")
    vectors = torch.cat([part.vectors for part in parts])
    if not bool(vectors.isfinite().all()):
        remedy = "" if precision == "float32" else ": try --precision float32"
        raise ValueError(f"some vectors are not finite in {precision}{remedy}")
    labels = np.concatenate([part.labels for part in parts])
    return Embeddings(ids[order], labels[order], vectors[torch.from_numpy(order)], bad)


def _own(
    model: PooledClassifier, batches: Iterable[Batch], device: torch.device, precision: str
) -> Embeddings:
    """Those of this process."""
    ids: list[Tensor] = [torch.empty(0, dtype=torch.int64)]
    labels, vectors, bad = list(ids), [torch.empty(0, model.head_hidden_size)], list[BadImage]()
    with torch.inference_mode():
        for batch in batches:
            bad.extend(batch.bad)
            if len(batch.ids) == 0:
                continue
            images = channels_last(batch.images.to(device, non_blocking=True))
            with autocast(device, precision):
                received = model.forward_head(model.forward_features(images), pre_logits=True)
            ids.append(batch.ids)
            labels.append(batch.labels)
            vectors.append(F.normalize(received.float(), dim=1).cpu())
    return Embeddings(torch.cat(ids).numpy(), torch.cat(labels).numpy(), torch.cat(vectors), tuple(bad))
