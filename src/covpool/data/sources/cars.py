"""Stanford Cars as its authors ship it, read by torchvision: 196 classes, in train and test."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

from covpool.data.sources.listing import Listing, Row, Split, make_listing

FOLDER = "stanford_cars"  # torchvision looks for this name
CLASSES = Path("devkit", "cars_meta.mat")
OTHERS = ("devkit/cars_train_annos.mat", "cars_test_annos_withlabels.mat", "cars_train", "cars_test")
SPLITS: tuple[Split, ...] = ("train", "test")


def recognises(path: Path) -> bool:
    """By the list of classes."""
    return (_parent(path) / FOLDER / CLASSES).is_file()


def read(path: Path) -> Listing:
    """List the images, in the order of the authors' lists."""
    importlib.import_module("scipy.io")  # torchvision reads the lists by it, and hides that it is missing
    from torchvision.datasets import StanfordCars  # here, because it takes its time

    root = _parent(path)
    for name in OTHERS:
        (root / FOLDER / name).stat()  # its error names the file, torchvision's does not
    # In place of the picture, its path.
    sets = {split: StanfordCars(root, split, loader=str) for split in SPLITS}

    def rows() -> Iterator[Row]:
        for split, images in sets.items():
            for i in range(len(images)):
                image, label = images[i]
                yield Row(split, int(label), Path(image).relative_to(root).as_posix())

    return make_listing(root, sets["train"].classes, rows())


def _parent(path: Path) -> Path:
    return path.absolute().parent if path.absolute().name == FOLDER else path
