"""Run a network over images: the one loop behind validation, evaluation, features and bulk inference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from covpool.arguments import check_choice, check_whole
from covpool.data.image_set import ImageSet, Relabelled
from covpool.data.loader import BadImage, Batch, EvaluationLoader, Transform
from covpool.data.sources import open_images
from covpool.data.transforms import Preprocessing, normalize_transform, pixels_transform, ten_crop_transform
from covpool.device import autocast
from covpool.errors import UsageError
from covpool.models.bundle import load_model
from covpool.models.model import PooledClassifier
from covpool.processes import Processes
from covpool.terminal import counted

PRECISIONS = ("float32", "bfloat16", "float16")
VIEWS = ("one", "flip", "ten-crop")
Views = Literal["one", "flip", "ten-crop"]
ProgressCall = Callable[[int, int], None]
Outputs = dict[str, Tensor]


class Result(NamedTuple):
    """The outputs of one batch.

    Attributes:
        ids: ``(B,)``, the index of each image in the set; unreadable images are left out.
        labels: ``(B,)``.
        outputs: by name, ``(views, B, ...)`` in float32 on the CPU; empty if no image was readable.
        bad: the unreadable images of the batch.
    """

    ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    outputs: Outputs
    bad: Sequence[BadImage]


class Forward:
    """Compute outputs of a network for batches of images.

    Args:
        model: the network. Images get its memory format: convolutions are up to twice as fast on a CPU with
            channels last (see :func:`prepare`).
        outputs: maps images ``(B, 3, H, W)`` to tensors by name; by default the ``logits`` of the model.
        device: the device of the model.
        precision: autocast precision.
        views: ``"one"``; ``"flip"`` for the image and its horizontal flip; ``"ten-crop"``.
        preprocessing: normalizes images in uint8. Images in float are used as they are.
        pad_to: number of images to pad every batch to, so that a compiled network sees one shape.
    """

    def __init__(
        self,
        model: nn.Module,
        outputs: Callable[[Tensor], Outputs] | None = None,
        *,
        device: torch.device,
        precision: str = "float32",
        views: Views = "one",
        preprocessing: Preprocessing | None = None,
        pad_to: int = 0,
    ) -> None:
        self.model, self.device, self.precision = model, device, precision
        self.outputs = outputs or (lambda images: {"logits": model(images)})
        self.views, self.preprocessing, self.pad_to = views, preprocessing, pad_to
        self._has_channels_last = any(
            weight.dim() == 4 and not weight.is_contiguous() for weight in model.parameters()
        )

    def __call__(self, images: Tensor) -> Outputs:
        """Return the outputs of a batch, each ``(views, B, ...)`` in float32, on the device.

        Args:
            images: ``(B, 3, H, W)``, or ``(B, 10, 3, H, W)`` for ten crops.
        """
        count = len(images)
        images = images.to(self.device, non_blocking=True)
        if images.dtype == torch.uint8:
            assert self.preprocessing is not None
            images = normalize_transform(self.preprocessing)(images)
        if count < self.pad_to:
            images = torch.cat([images, images.new_zeros(self.pad_to - count, *images.shape[1:])])
        # One view after the other: all views together would need more memory.
        # A network that is compiled with frozen weights runs under no_grad alone.
        inference = torch.inference_mode(not self.pad_to)
        with inference, torch.no_grad(), autocast(self.device, self.precision):
            views = [self.outputs(self._laid_out(view)) for view in self._split(images)]
            return {name: torch.stack([view[name][:count].float() for view in views]) for name in views[0]}

    def run(
        self, batches: Iterable[Batch], is_stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[Result]:
        """Yield the outputs of every batch; the model returns to its training mode at the end.

        Args:
            batches: as from :class:`covpool.data.loader.EvaluationLoader`.
            is_stopped: called before each batch; the loop ends if it returns true.
        """
        was_training = self.model.training
        self.model.eval()
        try:
            for batch in batches:
                if is_stopped():
                    return
                outputs = self(batch.images) if len(batch.ids) else {}
                outputs = {name: values.cpu() for name, values in outputs.items()}
                yield Result(batch.ids.numpy(), batch.labels.numpy(), outputs, batch.bad)
        finally:
            self.model.train(was_training)

    def transform(self) -> Transform:
        """Return the transform of the loader: ten crops, or pixels in uint8 (small to send)."""
        assert self.preprocessing is not None
        make = ten_crop_transform if self.views == "ten-crop" else pixels_transform
        transform: Transform = make(self.preprocessing)
        return transform

    def _split(self, images: Tensor) -> Sequence[Tensor]:
        if self.views == "ten-crop":
            return images.unbind(dim=1)
        return (images, images.flip(-1)) if self.views == "flip" else (images,)

    def _laid_out(self, images: Tensor) -> Tensor:
        return images.contiguous(memory_format=torch.channels_last) if self._has_channels_last else images


@dataclass(frozen=True)
class Pass:
    """Options of a run over the images of a set.

    Attributes:
        batch_size: images per batch and process.
        workers: processes that read images, for each process.
        precision: autocast precision.
        progress: called with the number of images done and the total; ``None`` for no progress.
    """

    batch_size: int
    workers: int
    precision: str = "float32"
    progress: ProgressCall | None = None

    def __post_init__(self) -> None:
        check_whole("batch_size", self.batch_size)
        check_whole("workers", self.workers, at_least=0)
        check_choice("precision", self.precision, PRECISIONS)

    def described(self) -> dict[str, Any]:
        """Return the options that results list."""
        return {"batch_size": self.batch_size, "workers": self.workers, "precision": self.precision}

    def run(
        self,
        model: PooledClassifier,
        images: ImageSet,
        processes: Processes,
        outputs: Callable[[Tensor], Outputs] | None = None,
        *,
        views: Views = "one",
        pad: bool = False,
    ) -> Iterator[Result]:
        """Yield the outputs of this process's batches, with the preprocessing of the model.

        Args:
            model: on the device of the process.
            images: the set.
            processes: share the images of the set.
            outputs: see :class:`Forward`.
            views: see :class:`Forward`.
            pad: pad the last batch to the batch size.

        Raises:
            ValueError: if an output is not finite.
        """
        forward = Forward(
            model,
            outputs,
            device=processes.device,
            precision=self.precision,
            views=views,
            preprocessing=Preprocessing.of(model.pretrained_cfg),
            pad_to=self.batch_size if pad else 0,
        )
        for result in forward.run(self.batches(images, forward.transform(), processes)):
            self._check_finite(result, images)
            yield result

    def batches(self, images: ImageSet, transform: Transform, processes: Processes) -> Iterator[Batch]:
        """Yield this process's batches of a set; progress counts the other processes as equally far."""
        loader = EvaluationLoader(
            images,
            transform,
            batch_size=self.batch_size,
            rank=processes.rank,
            world_size=processes.world_size,
            workers=self.workers,
        )
        done = 0
        for batch in loader:
            yield batch
            done += (len(batch.ids) + len(batch.bad)) * processes.world_size
            if self.progress is not None and processes.is_first:
                self.progress(min(done, len(images)), len(images))

    def _check_finite(self, result: Result, images: ImageSet) -> None:
        """Raise at the first batch: later batches would be as useless."""
        for name, values in result.outputs.items():
            wrong = result.ids[~values.isfinite().transpose(0, 1).flatten(1).all(dim=1).numpy()]
            if len(wrong):
                raise UsageError(
                    f"the {name} of {counted(len(wrong), 'image')} of a batch are not finite in "
                    f"{self.precision}, first of {images.name(int(wrong[0]))}: "
                    + (
                        "check the weights of the model"
                        if self.precision == "float32"
                        else "use --precision float32"
                    )
                )


def prepare(model: PooledClassifier, device: torch.device) -> PooledClassifier:
    """Return the model on a device, in evaluation mode, with channels last."""
    return model.eval().to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def open_bundle(path: str, device: torch.device) -> PooledClassifier:
    """Load the model of a bundle, ready for :class:`Forward`."""
    return prepare(load_model(path, device=device), device)


def open_split(model: PooledClassifier, path: str, split: str, layout: str = "auto") -> ImageSet:
    """Open the images of a split, labeled with the classes of the model.

    The split may lack images of some classes and may list the classes in another order.

    Raises:
        ValueError: if the images have other classes, or there is no such split.
    """
    images = open_images(path, split, layout)
    if model.classes is None:
        if model.num_classes != len(images.classes):
            raise UsageError(
                f"the bundle has {model.num_classes} classes, and {path} has {len(images.classes)}: "
                "give the images that it is for"
            )
        return images
    if new := sorted(set(images.classes) - set(model.classes)):
        raise UsageError(
            f"{path} has {counted(len(new), 'class')} that the bundle does not know, first {new[0]!r}: give "
            "the images that it is for"
        )
    return images if images.classes == model.classes else Relabelled(images, model.classes)
