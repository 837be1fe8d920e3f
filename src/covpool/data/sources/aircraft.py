"""FGVC-Aircraft as its authors ship it, read by torchvision: 100 variants, in train, val and test.

The usual protocol trains on ``train+val``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from covpool.data.image_set import ImageFiles, ImageSet
from covpool.data.sources import SPLITS, Listing, Marks, Row, Split, make_listing
from covpool.errors import UsageError

FOLDER = "fgvc-aircraft-2013b"  # torchvision looks for this name
MARKS = Marks(files=("data/variants.txt", f"{FOLDER}/data/variants.txt"))


def open_splits(path: str, cache: str | None = None) -> Mapping[Split, ImageFiles]:
    """Open the images in the order of the authors' lists."""
    return _read(path).sets()


def open_unlabeled(path: str) -> ImageSet:
    """Open the images of all splits."""
    return _read(path).unlabeled()


def _read(path: str) -> Listing:
    from torchvision.datasets import FGVCAircraft  # here, because the import takes a while

    root = _parent(path)
    if not (root / FOLDER).is_dir():
        raise UsageError(f"{path} should be named {FOLDER}, as in the archive of the data set")
    # The loader returns the path instead of the image.
    sets = {split: FGVCAircraft(root, split, annotation_level="variant", loader=str) for split in SPLITS}

    def rows() -> Iterator[Row]:
        for split, images in sets.items():
            for i in range(len(images)):
                image, label = images[i]
                yield Row(split, label, Path(image).relative_to(root).as_posix())

    return make_listing(root, sets["train"].classes, rows())


def _parent(path: str) -> Path:
    absolute = Path(path).absolute()
    return absolute.parent if absolute.name == FOLDER else Path(path)
