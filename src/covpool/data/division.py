"""Stratified division of an image set: a validation part, a sample, or cross-validation folds.

The choice depends only on a seed and on the image names.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from covpool.data.image_set import ImageSet, Subset, class_counts
from covpool.errors import UsageError
from covpool.storage.files import digest_number


def split_off(images: ImageSet, fraction: float, seed: int = 0) -> tuple[Subset, Subset]:
    """Split a set in two, stratified by class.

    The choice depends only on the seed and the image names, not on the machine or the order of the set. It
    changes little when images are added or removed. Every class keeps at least one image.

    Args:
        images: the set.
        fraction: share of the images to set aside, above 0 and below 1.
        seed: random seed.

    Returns:
        The remaining images and the images set aside, both in the order of the set.

    Raises:
        ValueError: if the fraction leaves a part empty.
    """
    if not 0 < fraction < 1:
        raise UsageError(f"fraction must be above 0 and below 1; got {fraction}")
    shares = _shares(class_counts(images), fraction, leave=1)
    if not shares.any():
        raise UsageError(
            f"no image can be set aside: {fraction} of {len(images)} is too few: every class keeps one"
        )
    is_aside = _chosen(images, shares, seed)
    return Subset(images, np.flatnonzero(~is_aside)), Subset(images, np.flatnonzero(is_aside))


def sample(images: ImageSet, count: int, seed: int = 0) -> Subset:
    """Return up to ``count`` images of a set, stratified by class.

    The choice depends only on the seed and the image names.
    """
    fraction = min(count / len(images), 1.0)
    shares = _shares(class_counts(images), fraction, leave=0)
    return Subset(images, np.flatnonzero(_chosen(images, shares, seed)))


def fold_numbers(images: ImageSet, folds: int, seed: int = 0) -> NDArray[np.int64]:
    """Return the fold of each image, from 0; each class is spread over the folds as evenly as possible.

    The fold of an image depends only on the seed and on the image names.
    """
    order = _by_class(images, seed)[0]
    numbers = np.empty(len(images), dtype=np.int64)
    numbers[order] = np.arange(len(images)) % folds
    return numbers


def _by_class(images: ImageSet, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the images class by class, in each class in random order, and their labels."""
    labels = np.asarray(images.labels, dtype=np.int64)
    keys = np.array([digest_number(f"{seed}:{images.name(i)}") for i in range(len(images))], dtype=np.uint64)
    order = np.lexsort((keys, labels))
    return order, labels[order]


def _chosen(images: ImageSet, shares: NDArray[np.int64], seed: int) -> NDArray[np.bool_]:
    """Return the mask of a random choice with the given number of images per class."""
    order, labels = _by_class(images, seed)
    starts = np.searchsorted(labels, np.arange(len(shares)))
    is_chosen = np.zeros(len(images), dtype=bool)
    for start, share in zip(starts, shares, strict=True):
        is_chosen[order[start : start + share]] = True
    return is_chosen


def _shares(counts: NDArray[np.int64], fraction: float, leave: int) -> NDArray[np.int64]:
    """Return the number of images per class: rounded down, plus one for the largest remainders.

    At least ``leave`` images of each class are left.
    """
    exact = np.multiply(fraction, counts, dtype=np.float64)
    most = np.maximum(counts - leave, 0)
    shares: NDArray[np.int64] = np.minimum(exact.astype(np.int64), most)
    left = max(0, round(fraction * counts.sum()) - int(shares.sum()))
    rest = np.where(shares < most, exact - shares, -1.0)
    largest = np.argsort(-rest, kind="stable")[:left]
    shares[largest[rest[largest] > 0]] += 1
    return shares
