"""Split a data set into training, validation and test images, and divide image sets by class.

A division depends only on a seed and on the image names.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from covpool.data.image_set import ImageSet, Joined, Subset, class_counts
from covpool.data.loader import TrainingLoader
from covpool.data.order import BalancedOrder, FolderOrder, Order, ShardOrder
from covpool.data.sources import open_splits
from covpool.data.transforms import Preprocessing, training_transform
from covpool.errors import BadImageError, UsageError
from covpool.processes import Processes
from covpool.storage.files import Digest, digest_number
from covpool.training.recipe import DataOptions, Recipe

LOGGER = logging.getLogger("covpool")
# The images of a split that are read to notice an exchange where all files have the same size.
READ = 64


@dataclass(frozen=True, eq=False)
class Splits:
    """The images of a run.

    Attributes:
        train: training images.
        val: validation images, which choose the best epoch; ``None`` to use the last epoch.
        test: test images, used once at the end; ``None`` if there are none.
    """

    train: ImageSet
    val: ImageSet | None
    test: ImageSet | None

    def sets(self) -> dict[str, ImageSet]:
        """Return the splits that exist."""
        sets = {"train": self.train, "val": self.val, "test": self.test}
        return {name: images for name, images in sets.items() if images is not None}

    @functools.cached_property
    def fingerprints(self) -> dict[str, str]:
        """Fingerprint of each split. Cached, because it takes a while for a million files."""
        return {name: images.fingerprint() for name, images in self.sets().items()}

    @functools.cached_property
    def contents(self) -> dict[str, str]:
        """Hash of the contents of each split that is not covered by the fingerprint."""
        return {name: contents(images) for name, images in self.sets().items()}

    def reported(self) -> tuple[str | None, ImageSet | None]:
        """Return the split for the final metrics: test if it exists, which is used only here, else val."""
        if self.test is not None:
            return "test", self.test
        return ("val", self.val) if self.val is not None else (None, None)


def open_data(options: DataOptions, seed: int) -> Splits:
    """Open the images of a recipe. Without val, training images are set aside, chosen by the seed.

    Raises:
        ValueError: if there are no training images, or too few to set some aside.
    """
    sets = open_splits(options.path, options.layout, options.cache)
    train, val, test = (sets.get(split) for split in ("train", "val", "test"))
    if train is None:
        raise UsageError(f"{options.path} has no training images: it has only {', '.join(sets)}")
    if val is None and options.val_fraction > 0:
        if train.group_sizes() is not None:
            raise UsageError(
                f"{options.path} has no val, and shards cannot be divided: pass --val-fraction to 'covpool "
                "shard', name some Parquet files validation-*.parquet, or pass --data.val-fraction 0 here to "
                "keep the last epoch instead of the best"
            )
        train, val = _set_aside(train, options.val_fraction, seed)
    if options.limit is not None:
        train, val, test = (_limited(images, options.limit, seed) for images in (train, val, test))
    assert train is not None
    check_classes(train.classes, str(options.path))
    return Splits(train, val, test)


def contents(images: ImageSet) -> str:
    """Return a hash of the sizes of all files, and of the bytes of a few; equal for copies of the data.

    It shows that images were exchanged under the same names. Dates would differ between copies. Shards and
    Parquet files return an empty string: their fingerprints include hashes, or sizes and statistics.
    """
    if images.group_sizes() is not None:
        return ""
    count = len(images)
    digest = Digest(repr([images.size(i) for i in range(count)]).encode())
    for i in range(0, count, max(count // READ, 1)):
        try:
            digest.update(Digest(images.read(i)).digest())
        except (OSError, BadImageError):
            digest.update(b"-")
    return digest.hexdigest()


def joined(train: ImageSet, val: ImageSet) -> ImageSet:
    """Join train and val, to train again after the best epoch is known.

    Raises:
        ValueError: if they are shards.
    """
    if train.group_sizes() is not None or val.group_sizes() is not None:
        raise UsageError(
            "refit needs train and val together; shards and Parquet files cannot be joined: write them as one"
        )
    return Joined((train, val))


def make_order(images: ImageSet, options: DataOptions, batch_size: int, seed: int) -> Order:
    """Return the order of the training images."""
    sizes = images.group_sizes()
    if options.balance == "sampling":
        if sizes is not None:
            raise UsageError(
                "shards and Parquet files are read in order, not drawn by class: use --balance weights"
            )
        return BalancedOrder(np.asarray(images.labels), batch_size, seed)
    if sizes is not None:
        return ShardOrder(sizes, batch_size, seed, options.window)
    return FolderOrder(len(images), batch_size, seed)


def make_loader(
    images: ImageSet, recipe: Recipe, preprocessing: Preprocessing, processes: Processes
) -> TrainingLoader:
    """Return the loader of this process's training batches."""
    return TrainingLoader(
        images,
        make_order(images, recipe.data, recipe.batch_size, recipe.seed),
        training_transform(preprocessing, recipe.augmentation),
        seed=recipe.seed,
        rank=processes.rank,
        world_size=processes.world_size,
        workers=recipe.data.workers,
    )


def _set_aside(train: ImageSet, fraction: float, seed: int) -> tuple[ImageSet, ImageSet]:
    try:
        rest, val = split_off(train, fraction, seed)
    except ValueError as error:
        raise UsageError(f"{error}; --val-fraction 0 trains without validating") from error
    missing = len(train.classes) - len(np.unique(val.labels))
    if missing:
        LOGGER.warning(
            "%d images are set aside for validation; %d of %d classes have none, so the validation metrics "
            "are less reliable: use a larger --val-fraction",
            len(val),
            missing,
            len(train.classes),
        )
    return rest, val


def check_classes(classes: Sequence[str], path: str) -> None:
    """Check the class names before training; otherwise saving the model would fail after an epoch.

    Raises:
        ValueError: if there is only one class, or a name is not valid UTF-8.
    """
    if len(classes) == 1:
        raise UsageError(
            f"{path} has only one class, {classes[0]!r}: put the images of each class into a folder with "
            "the name of the class"
        )
    for name in classes:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"the name of class {name!r} is not UTF-8: rename its folder") from error


def _limited(images: ImageSet | None, limit: int, seed: int) -> ImageSet | None:
    """Return up to ``limit`` images, evenly from all classes."""
    if images is None or limit >= len(images):
        return images
    return sample(images.some(limit, seed), limit, seed)


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
