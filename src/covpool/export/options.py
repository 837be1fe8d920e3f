"""The options of an export, its images, and the job that they describe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from covpool.data.image_set import ImageSet
from covpool.data.shards.reader import ShardSet
from covpool.data.sources import splits
from covpool.data.transforms import Preprocessing, normalize_transform, pixels_transform
from covpool.errors import UsageError
from covpool.export.graph import Array
from covpool.functional.arguments import check_choice, check_whole
from covpool.inference.forward import Pass, open_split
from covpool.models.bundle import load_model, read_card
from covpool.models.card import Card
from covpool.models.model import PooledClassifier
from covpool.processes import Processes
from covpool.train.splits import sample

CPU = torch.device("cpu")


class Format(NamedTuple):
    """A file, and the precision of its backbone."""

    file: str
    precision: str


FORMATS = {
    "onnx": Format("model.onnx", "float32"),
    "onnx-float16": Format("model-float16.onnx", "float16"),
    "onnx-int8": Format("model-int8.onnx", "int8"),
    "torch": Format("model.pt2", "float32"),
}


@dataclass(frozen=True)
class ExportOptions:
    """How a bundle is exported.

    Attributes:
        formats: some of ``onnx``, ``onnx-float16``, ``onnx-int8`` and ``torch``; a string has them by commas.
        preprocessing: ``inside``: the graph takes pixels in uint8, ``(B, H, W, 3)``; ``beside``: it takes
            what is scaled and normalised, ``(B, 3, H, W)``, and ``model.json`` says how.
        free_size: leave height and width of the images open, where the backbone is a convolution.
        split: whose images are compared; test where there is one, else val, else train, if not given.
        layout: of the data.
        images: that are compared, at most; of all classes alike.
        calibration: images of train that int8 is fitted to, at most.
        rounds: calls of each contender that are timed.
        compile: time torch.compile too.
        batch_size: images at a time in the comparison; a timed call has one.
        workers: processes that read images.
    """

    formats: Sequence[str] = ("onnx", "torch")
    preprocessing: Literal["inside", "beside"] = "inside"
    free_size: bool = True
    split: str | None = None
    layout: str = "auto"
    images: int = 1000
    calibration: int = 128
    rounds: int = 100
    compile: bool = False
    batch_size: int = 16
    workers: int = 0

    def __post_init__(self) -> None:
        names = self.formats.split(",") if isinstance(self.formats, str) else self.formats
        object.__setattr__(self, "formats", tuple(dict.fromkeys(names)))
        if not self.formats:
            raise UsageError(f"formats must name at least one of {', '.join(FORMATS)}")
        for name in self.formats:
            check_choice("formats", name, tuple(FORMATS))
        check_choice("preprocessing", self.preprocessing, ("inside", "beside"))
        for name in ("images", "calibration", "rounds", "batch_size"):
            check_whole(name, getattr(self, name))
        check_whole("workers", self.workers, at_least=0)

    @property
    def takes_pixels(self) -> bool:
        """Whether the graph scales and normalises."""
        return self.preprocessing == "inside"


Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Source:
    """Where images come from, and how they are read.

    Attributes:
        path: as for :func:`covpool.data.sources.open_images`.
        layout: likewise.
        batch_size: images at a time.
        workers: processes that read them.
    """

    path: str
    layout: str
    batch_size: int
    workers: int

    def compared_split(self) -> str:
        """What is compared on: test where there is one, else val, else train."""
        there = splits(self.path, self.layout)
        return next(split for split in ("test", "val", "train", *there) if split in there)

    def some(self, model: PooledClassifier, split: str, count: int, seed: int = 0) -> ImageSet:
        """At most so many images of a split, of all classes alike."""
        images = open_split(model, self.path, split, self.layout)
        if count >= len(images):
            return images
        return sample(images.some(count, seed) if isinstance(images, ShardSet) else images, count, seed)

    def pixels(self, images: ImageSet, preprocessing: Preprocessing, progress: Progress) -> Iterator[Tensor]:
        """Yield batches ``(B, 3, size, size)`` in uint8, without unreadable images."""
        passing, alone = Pass(self.batch_size, self.workers, progress=progress), Processes(0, 1, CPU)
        batches = passing.batches(images, pixels_transform(preprocessing), alone)
        return (batch.images for batch in batches if len(batch.ids))


def graph_input(pixels_B3HW: Tensor, preprocessing: Preprocessing, *, takes_pixels: bool) -> Array:
    """A batch as an exported graph takes it: pixels, or normalised."""
    if takes_pixels:
        return np.ascontiguousarray(pixels_B3HW.permute(0, 2, 3, 1).numpy())
    return np.asarray(normalized(pixels_B3HW, preprocessing).numpy())


def normalized(pixels_B3HW: Tensor, preprocessing: Preprocessing) -> Tensor:
    """As training and evaluation do it, not as the graph does."""
    images: Tensor = normalize_transform(preprocessing)(pixels_B3HW)
    return images.contiguous(memory_format=torch.channels_last)


def trained_on(card: Card) -> str | None:
    """The images that a bundle was trained on, where its recipe says so."""
    data: Any = card.recipe.get("data")
    path = data.get("path") if isinstance(data, dict) else None
    return path if isinstance(path, str) else None


@dataclass(frozen=True, eq=False)
class Job:
    """A bundle on its way to files.

    Attributes:
        bundle: its folder.
        card: what it says of itself.
        model: in evaluation mode and float32, on the CPU.
        preprocessing: of its images.
        options: what is wanted.
        source: of images.
        split: whose images are compared.
        images: those images.
        calibration: the images that int8 is fitted to; ``None`` where it is not wanted.
    """

    bundle: str
    card: Card
    model: PooledClassifier
    preprocessing: Preprocessing
    options: ExportOptions
    source: Source
    split: str
    images: ImageSet
    calibration: ImageSet | None


def open_job(bundle: str | Path, data: str | Path | None, options: ExportOptions) -> Job:
    """Open everything now, not after minutes of tracing.

    Raises:
        ValueError: in a sentence, if bundle, images and options do not go together.
    """
    card = read_card(bundle)
    if not card.config.num_classes:
        raise UsageError(f"{bundle} has no classifier, so there is nothing to compare: see covpool svm")
    path = str(data) if data is not None else trained_on(card)
    if not path:
        raise UsageError("files are compared with the bundle on your own images: give --data")
    source = Source(path, options.layout, options.batch_size, options.workers)
    model = load_model(bundle).float().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    split = options.split or source.compared_split()
    wants_int8 = "onnx-int8" in options.formats
    return Job(
        bundle=str(bundle),
        card=card,
        model=model,
        preprocessing=Preprocessing.of(model.pretrained_cfg),
        options=options,
        source=source,
        split=split,
        images=source.some(model, split, options.images),
        calibration=source.some(model, "train", options.calibration) if wants_int8 else None,
    )
