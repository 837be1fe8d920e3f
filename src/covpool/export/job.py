"""What an export begins with: the model, its images, and what is wanted; all of it checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from covpool.data.image_set import ImageSet
from covpool.data.transforms import Preprocessing
from covpool.export.images import Source, trained_on
from covpool.export.options import ExportOptions
from covpool.models.bundles import Card, load_model, read_card
from covpool.models.model import PooledClassifier


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
        raise ValueError(f"{bundle} has no classifier, so there is nothing to compare: see covpool svm")
    path = str(data) if data is not None else trained_on(card)
    if not path:
        raise ValueError("files are compared with the bundle on your own images: give --data")
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
