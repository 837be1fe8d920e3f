"""Images on their way through a network: as batches, counted as they pass, in the fastest memory format."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from covpool.data.batch import Batch, Transform
from covpool.data.image_set import ImageSet
from covpool.data.loader import EvaluationLoader
from covpool.functional.arguments import check_choice, check_whole
from covpool.models.bundles.bundle import load_model
from covpool.models.model import PooledClassifier
from covpool.train.processes import Processes

PRECISIONS = ("float32", "bfloat16", "float16")
ProgressCall = Callable[[int, int], None]


def open_bundle(path: str, device: torch.device) -> PooledClassifier:
    """The model of a bundle; with the channels last, convolutions are up to twice as fast on a CPU."""
    model = load_model(path, device=device)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def channels_last(images_B3HW: Tensor) -> Tensor:
    """The same images, in the memory format of the model."""
    return images_B3HW.contiguous(memory_format=torch.channels_last)


def check_pass(batch_size: int, workers: int, precision: str) -> None:
    """Raise if one of them makes no sense."""
    check_whole("batch_size", batch_size)
    check_whole("workers", workers, at_least=0)
    check_choice("precision", precision, PRECISIONS)


def batches(
    images: ImageSet,
    transform: Transform,
    processes: Processes,
    *,
    batch_size: int,
    workers: int,
    progress: ProgressCall | None = None,
) -> Iterator[Batch]:
    """This process's batches of a set. ``progress`` is told of all, as if the others were as far."""
    loader = EvaluationLoader(
        images,
        transform,
        batch_size=batch_size,
        rank=processes.rank,
        world_size=processes.world_size,
        workers=workers,
    )
    done = 0
    for batch in loader:
        yield batch
        done += (len(batch.ids) + len(batch.bad)) * processes.world_size
        if progress is not None and processes.is_first:
            progress(min(done, len(images)), len(images))
