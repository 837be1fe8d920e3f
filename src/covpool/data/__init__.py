"""List, read, check and order images, and make batches of them."""

from typing import TYPE_CHECKING, Literal

from covpool import lazily

# The module or object of each source. The first that recognizes a path opens it.
SOURCES = {
    "csv": "covpool.data.sources.csv",
    "shards": "covpool.data.sources.shards",
    "cub": "covpool.data.sources.benchmarks:cub",
    "aircraft": "covpool.data.sources.benchmarks:aircraft",
    "cars": "covpool.data.sources.benchmarks:cars",
    "parquet": "covpool.data.sources.parquet",
    "folder": "covpool.data.sources.folder",
}

if TYPE_CHECKING:
    from covpool.data.image_set import ImageSet
    from covpool.data.loader import EvaluationLoader, TrainingLoader
    from covpool.data.shards.reader import open_shards
    from covpool.data.shards.write import write_shards
    from covpool.data.sources import Source, layout_of, open_images, open_splits, open_unlabeled, splits
    from covpool.data.transforms import (
        Augmentation,
        Preprocessing,
        evaluation_transform,
        training_transform,
    )
    from covpool.errors import BadImageError

    Layout = str
else:
    Layout = Literal[("auto", *SOURCES)]

__all__ = [
    "Augmentation",
    "BadImageError",
    "EvaluationLoader",
    "ImageSet",
    "Preprocessing",
    "Source",
    "TrainingLoader",
    "evaluation_transform",
    "layout_of",
    "open_images",
    "open_shards",
    "open_splits",
    "open_unlabeled",
    "splits",
    "training_transform",
    "write_shards",
]

__getattr__ = lazily(
    __name__,
    "data",
    {
        "covpool.data.image_set": "ImageSet",
        "covpool.data.loader": "EvaluationLoader TrainingLoader",
        "covpool.data.shards.reader": "open_shards",
        "covpool.data.shards.write": "write_shards",
        "covpool.data.sources": "Source layout_of open_images open_splits open_unlabeled splits",
        "covpool.data.transforms": "Augmentation Preprocessing evaluation_transform training_transform",
        "covpool.errors": "BadImageError",
    },
)
