"""FGVC-Aircraft as its authors ship it, read by torchvision: 100 variants, in train, val and test.

The usual protocol trains on ``train+val``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from covpool.data.sources.listing import SPLITS, Listing, Row, make_listing

FOLDER = "fgvc-aircraft-2013b"  # torchvision looks for this name
VARIANTS = Path("data", "variants.txt")


def recognises(path: Path) -> bool:
    """By the list of variants."""
    return (_parent(path) / FOLDER / VARIANTS).is_file()


def read(path: Path) -> Listing:
    """List the images, in the order of the authors' lists."""
    from torchvision.datasets import FGVCAircraft  # here, because it takes its time

    root = _parent(path)
    # In place of the picture, its path.
    sets = {split: FGVCAircraft(root, split, annotation_level="variant", loader=str) for split in SPLITS}

    def rows() -> Iterator[Row]:
        for split, images in sets.items():
            for i in range(len(images)):
                image, label = images[i]
                yield Row(split, label, Path(image).relative_to(root).as_posix())

    return make_listing(root, sets["train"].classes, rows())


def _parent(path: Path) -> Path:
    return path.absolute().parent if path.absolute().name == FOLDER else path
