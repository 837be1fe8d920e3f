"""The inputs of an export: the bundle, its graph and the images to compare on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from covpool.data.image_set import ImageSet
from covpool.data.sources import evaluation_split
from covpool.data.transforms import Preprocessing, pixels_transform
from covpool.errors import UsageError
from covpool.export import ExportOptions
from covpool.export.graph import Array, ExportGraph, graph_input
from covpool.inference.forward import Pass, open_bundle, open_split
from covpool.models.bundle import read_card
from covpool.models.card import Card
from covpool.models.model import PooledClassifier
from covpool.processes import Processes
from covpool.training.splits import sample

CPU = torch.device("cpu")

Progress = Callable[[int, int], None]


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
