"""The options of an export, and the model and images that they select."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from covpool.data.division import sample
from covpool.data.image_set import ImageSet
from covpool.data.sources import evaluation_split
from covpool.data.transforms import Preprocessing, pixels_transform
from covpool.errors import UsageError
from covpool.export.graph import Array, ExportGraph, graph_input
from covpool.export.targets import TARGETS, Target
from covpool.functional.arguments import check_choice, check_whole
from covpool.inference.forward import Pass, open_bundle, open_split
from covpool.models.bundle import read_card
from covpool.models.card import Card
from covpool.models.model import PooledClassifier
from covpool.processes import Processes

Progress = Callable[[int, int], None]

CPU = torch.device("cpu")


@dataclass(frozen=True)
class ExportOptions:
    """How to export a bundle.

    Attributes:
        formats: any of ``onnx``, ``onnx-float16``, ``onnx-int8`` and ``torch``; a string separates them by
            commas.
        preprocessing: ``inside``: the graph receives uint8 pixels, ``(B, H, W, 3)``; ``beside``: it receives
            normalized images, ``(B, 3, H, W)``, and ``model.json`` describes the normalization.
        free_size: leave height and width of the images dynamic, where the backbone is convolutional.
        split: split to compare on (default: test if it exists, else val, else train).
        layout: layout of the data set.
        limit: largest number of images to compare on, balanced over classes.
        calibration: largest number of training images to calibrate int8 on.
        rounds: number of timed calls of each file.
        compile: also time torch.compile.
        batch_size: batch size of the comparison; a timed call has one image.
        workers: number of processes that read images.
    """

    formats: Sequence[str] = ("onnx", "torch")
    preprocessing: Literal["inside", "beside"] = "inside"
    free_size: bool = True
    split: str | None = None
    layout: str = "auto"
    limit: int = 1000
    calibration: int = 128
    rounds: int = 100
    compile: bool = False
    batch_size: int = 16
    workers: int = 0

    def __post_init__(self) -> None:
        names = self.formats.split(",") if isinstance(self.formats, str) else self.formats
        object.__setattr__(self, "formats", tuple(dict.fromkeys(names)))
        if not self.formats:
            raise UsageError(f"formats must name at least one of {', '.join(TARGETS)}")
        for name in self.formats:
            check_choice("formats", name, tuple(TARGETS))
        check_choice("preprocessing", self.preprocessing, ("inside", "beside"))
        for name in ("limit", "calibration", "rounds", "batch_size"):
            check_whole(name, getattr(self, name))
        check_whole("workers", self.workers, at_least=0)

    @property
    def targets(self) -> list[Target]:
        """The targets of ``formats``."""
        return [TARGETS[name] for name in self.formats]

    @property
    def takes_pixels(self) -> bool:
        """Whether the graph normalizes its input."""
        return self.preprocessing == "inside"


@dataclass(frozen=True, eq=False)
class Job:
    """An export whose inputs are open.

    Attributes:
        bundle: folder of the bundle.
        card: card of the bundle.
        model: the model, in evaluation mode and float32, on the CPU.
        graph: the model as it is traced.
        preprocessing: of the model's images.
        options: of the export.
        data: path of the data set.
        split: split to compare on.
        images: images to compare on.
        calibration: images to calibrate on; ``None`` if no target needs them.
    """

    bundle: str
    card: Card
    model: PooledClassifier
    graph: ExportGraph
    preprocessing: Preprocessing
    options: ExportOptions
    data: str
    split: str
    images: ImageSet
    calibration: ImageSet | None

    def batches(self, images: ImageSet, progress: Progress) -> Iterator[tuple[Tensor, Array]]:
        """Read batches of pixels in uint8, and the input of the graph; unreadable images are left out."""
        options = self.options
        passing = Pass(options.batch_size, options.workers, progress=progress)
        for batch in passing.batches(images, pixels_transform(self.preprocessing), Processes(0, 1, CPU)):
            if len(batch.ids):
                pixels = batch.images
                yield pixels, graph_input(pixels, self.preprocessing, takes_pixels=options.takes_pixels)


def open_job(bundle: str | Path, data: str | Path, options: ExportOptions) -> Job:
    """Open the bundle and the images, before minutes of tracing.

    Raises:
        UsageError: if bundle, images and options do not fit together.
    """
    card = read_card(bundle)
    if not card.config.num_classes:
        raise UsageError(
            f"{bundle} has no classifier, so there are no logits to compare. Add one with covpool svm."
        )
    model = open_bundle(str(bundle), CPU).float()
    preprocessing = Preprocessing.of(model.pretrained_cfg)
    if len(preprocessing.mean) != 3:
        raise UsageError(f"{bundle} takes gray images (in_chans=1), and covpool exports models of RGB images")
    path = str(data)  # never of the card's recipe: a bundle from others must not choose what is opened
    split = options.split or evaluation_split(path, options.layout)

    def some(split: str, count: int) -> ImageSet:
        images = open_split(model, path, split, options.layout)
        if count >= len(images):
            return images
        return sample(images.some(count, 0), count, 0)

    needs_calibration = any(target.needs_calibration for target in options.targets)
    return Job(
        bundle=str(bundle),
        card=card,
        model=model,
        graph=ExportGraph(model, preprocessing if options.takes_pixels else None),
        preprocessing=preprocessing,
        options=options,
        data=path,
        split=split,
        images=some(split, options.limit),
        calibration=some("train", options.calibration) if needs_calibration else None,
    )
