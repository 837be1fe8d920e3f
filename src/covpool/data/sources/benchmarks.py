"""CUB-200-2011, FGVC-Aircraft and Stanford Cars as their authors ship them.

torchvision reads the lists of Aircraft (100 variants, in train, val and test) and Cars (196 classes, in train
and test). The usual protocol trains on ``train+val`` of Aircraft.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from covpool.data.image_set import ImageFiles, ImageSet
from covpool.data.sources import SPLITS, Listing, Marks, Row, Split, make_listing
from covpool.errors import UsageError
from covpool.storage.files import read_text

CUB_FOLDER = "CUB_200_2011"
IMAGES, LABELS, SPLIT, CLASSES = "images.txt", "image_class_labels.txt", "train_test_split.txt", "classes.txt"
# torchvision looks for these names.
AIRCRAFT_FOLDER, CARS_FOLDER = "fgvc-aircraft-2013b", "stanford_cars"
CARS_FILES = ("devkit/cars_train_annos.mat", "cars_test_annos_withlabels.mat", "cars_train", "cars_test")


class Benchmark(NamedTuple):
    """A data set with one layout; see :class:`covpool.data.sources.Source`."""

    MARKS: Marks
    read: Callable[[str], Listing]

    def open_splits(self, path: str, cache: str | None = None) -> Mapping[Split, ImageFiles]:
        """Open the images in the order of the authors' lists, with their splits and class names."""
        return self.read(path).sets()

    def open_unlabeled(self, path: str) -> ImageSet:
        """Open the images of all splits."""
        return self.read(path).unlabeled()


def _read_cub(path: str) -> Listing:
    inside = Path(path, CUB_FOLDER)
    root = inside if inside.is_dir() else Path(path)
    classes = _cub_lines(root / CLASSES)
    numbers = {key: place for place, key in enumerate(classes)}
    return make_listing(root, classes.values(), _cub_rows(root, numbers))


def _cub_rows(root: Path, numbers: dict[str, int]) -> Iterator[Row]:
    labels, is_train = _cub_lines(root / LABELS), _cub_lines(root / SPLIT)
    for number, name in _cub_lines(root / IMAGES).items():
        label, mark = labels.get(number), is_train.get(number)
        if label not in numbers:
            raise UsageError(f"{root / LABELS} has no class of {CLASSES} for image {number}, {name}")
        if mark not in ("0", "1"):
            raise UsageError(f"{root / SPLIT} has neither 0 nor 1 for image {number}, {name}")
        yield Row("train" if mark == "1" else "test", numbers[label], f"images/{name}")


def _cub_lines(path: Path) -> dict[str, str]:
    """Return the value of each number."""
    values = {}
    try:
        text = read_text(path)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    for line in text.splitlines():
        number, space, value = line.strip().partition(" ")
        if not space:
            raise UsageError(f"{path} should have a number and a value on each line; one is {line!r}")
        values[number] = value.strip()
    return values


# The loaders return the path instead of the image. torchvision is imported here, because it takes a while.
def _read_aircraft(path: str) -> Listing:
    from torchvision.datasets import FGVCAircraft

    root = _parent(path, AIRCRAFT_FOLDER)
    return _torchvision_listing(
        root, {split: FGVCAircraft(root, split, annotation_level="variant", loader=str) for split in SPLITS}
    )


def _read_cars(path: str) -> Listing:
    importlib.import_module("scipy.io")  # torchvision needs it, and hides that it is missing
    from torchvision.datasets import StanfordCars

    root = _parent(path, CARS_FOLDER)
    for name in CARS_FILES:
        (root / CARS_FOLDER / name).stat()  # this error names the file, unlike torchvision's
    return _torchvision_listing(
        root, {split: StanfordCars(root, split, loader=str) for split in SPLITS if split != "val"}
    )


def _parent(path: str, folder: str) -> Path:
    """Return the folder that contains the folder of a data set, which may be ``path`` itself."""
    absolute = Path(path).absolute()
    root = absolute.parent if absolute.name == folder else Path(path)
    if not (root / folder).is_dir():
        raise UsageError(f"{path} should be named {folder}, as in the archive of the data set")
    return root


def _torchvision_listing(root: Path, sets: dict[Split, Any]) -> Listing:
    def rows() -> Iterator[Row]:
        for split, images in sets.items():
            for i in range(len(images)):
                image, label = images[i]
                yield Row(split, int(label), Path(image).relative_to(root).as_posix())

    return make_listing(root, sets["train"].classes, rows())


cub = Benchmark(Marks(files=(LABELS, f"{CUB_FOLDER}/{LABELS}")), _read_cub)
aircraft = Benchmark(
    Marks(files=("data/variants.txt", f"{AIRCRAFT_FOLDER}/data/variants.txt")), _read_aircraft
)
cars = Benchmark(Marks(files=("devkit/cars_meta.mat", f"{CARS_FOLDER}/devkit/cars_meta.mat")), _read_cars)
