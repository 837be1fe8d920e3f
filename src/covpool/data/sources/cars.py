"""Stanford Cars as its authors ship it, read by torchvision: 196 classes, in train and test."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from covpool.data.image_set import ImageFiles, ImageSet
from covpool.data.sources import Listing, Marks, Row, Split, make_listing
from covpool.errors import UsageError

FOLDER = "stanford_cars"  # torchvision looks for this name
MARKS = Marks(files=("devkit/cars_meta.mat", f"{FOLDER}/devkit/cars_meta.mat"))
OTHERS = ("devkit/cars_train_annos.mat", "cars_test_annos_withlabels.mat", "cars_train", "cars_test")
SPLITS: tuple[Split, ...] = ("train", "test")


def open_splits(path: str, cache: str | None = None) -> Mapping[Split, ImageFiles]:
    """Open the images in the order of the authors' lists."""
    return _read(path).sets()


def open_unlabeled(path: str) -> ImageSet:
    """Open the images of all splits."""
    return _read(path).unlabeled()


def _read(path: str) -> Listing:
    importlib.import_module("scipy.io")  # torchvision needs it, and hides that it is missing
    from torchvision.datasets import StanfordCars  # here, because the import takes a while

    root = _parent(path)
    if not (root / FOLDER).is_dir():
        raise UsageError(f"{path} should be named {FOLDER}, as in the archive of the data set")
    for name in OTHERS:
        (root / FOLDER / name).stat()  # this error names the file, unlike torchvision's
    # The loader returns the path instead of the image.
    sets = {split: StanfordCars(root, split, loader=str) for split in SPLITS}

    def rows() -> Iterator[Row]:
        for split, images in sets.items():
            for i in range(len(images)):
                image, label = images[i]
                yield Row(split, int(label), Path(image).relative_to(root).as_posix())

    return make_listing(root, sets["train"].classes, rows())


def _parent(path: str) -> Path:
    absolute = Path(path).absolute()
    return absolute.parent if absolute.name == FOLDER else Path(path)
