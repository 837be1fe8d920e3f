"""Split a data set into training, validation and test images."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from covpool.data.division import sample, split_off
from covpool.data.image_set import ImageSet, Joined
from covpool.data.loader import TrainingLoader
from covpool.data.order import BalancedOrder, FolderOrder, Order, ShardOrder
from covpool.data.sources import open_splits
from covpool.data.transforms import Preprocessing, training_transform
from covpool.errors import UsageError
from covpool.processes import Processes
from covpool.train.recipe import DataOptions, Recipe

LOGGER = logging.getLogger("covpool")


@dataclass(frozen=True, eq=False)
class Splits:
    """The images of a run.

    Attributes:
        train: to learn from.
        val: to choose the best epoch by; ``None`` for the last.
        test: for the end; ``None`` where there are none.
    """

    train: ImageSet
    val: ImageSet | None
    test: ImageSet | None

    def sets(self) -> dict[str, ImageSet]:
        """Those that there are."""
        sets = {"train": self.train, "val": self.val, "test": self.test}
        return {name: images for name, images in sets.items() if images is not None}

    @functools.cached_property
    def fingerprints(self) -> dict[str, str]:
        """What tells each from other images. Of a million files it takes a while, so it is made once."""
        return {name: images.fingerprint() for name, images in self.sets().items()}

    def reported(self) -> tuple[str | None, ImageSet | None]:
        """Where the numbers at the end come from: test where there is one, and it is touched there alone."""
        if self.test is not None:
            return "test", self.test
        return ("val", self.val) if self.val is not None else (None, None)


def open_data(options: DataOptions, seed: int) -> Splits:
    """The images of a recipe; where there is no val, some of train are set aside by the seed.

    Raises:
        ValueError: in a sentence, if there is nothing to train on, or nothing to set aside.
    """
    sets = open_splits(options.path, options.layout, options.cache)
    train, val, test = (sets.get(split) for split in ("train", "val", "test"))
    if train is None:
        raise UsageError(f"{options.path} has no images to train on: it has {', '.join(sets)} alone")
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


def joined(train: ImageSet, val: ImageSet) -> ImageSet:
    """Train and val as one set, for the training after the best epoch is known.

    Raises:
        ValueError: if they are shards.
    """
    if train.group_sizes() is not None or val.group_sizes() is not None:
        raise UsageError(
            "refit needs train and val together; shards and Parquet files cannot be joined: write them as one"
        )
    return Joined((train, val))


def make_order(images: ImageSet, options: DataOptions, batch_size: int, seed: int) -> Order:
    """In which order they are learned from."""
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
    """The batches that this process learns from."""
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
            "%d images are set aside to validate on, and %d of %d classes have none among them: take what is "
            "measured on them with care, or give a larger --val-fraction",
            len(val),
            missing,
            len(train.classes),
        )
    return rest, val


def check_classes(classes: Sequence[str], path: str) -> None:
    """Now, not after an epoch, when the model is saved with them.

    Raises:
        ValueError: if there is one alone, or a name is no text.
    """
    if len(classes) == 1:
        raise UsageError(
            f"{path} has one class alone, {classes[0]!r}, and nothing to tell it from: put the "
            "images of each class into a folder of its name"
        )
    for name in classes:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"the name of class {name!r} is no UTF-8: rename its folder") from error


def _limited(images: ImageSet | None, limit: int, seed: int) -> ImageSet | None:
    """So many images of all classes alike."""
    if images is None or limit >= len(images):
        return images
    return sample(images.some(limit, seed), limit, seed)
