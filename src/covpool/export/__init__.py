"""Export trained networks to ONNX and torch.export, and compare each file with the model."""

# Annotations are not postponed: jsonargparse would import the modules under TYPE_CHECKING to evaluate them.
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from covpool import lazily
from covpool.arguments import check_choice, check_whole
from covpool.errors import UsageError

if TYPE_CHECKING:
    from covpool.errors import ExportRefusedError
    from covpool.export.exporting import ExportReport, export_model
    from covpool.export.targets import Target, read_metadata

__all__ = ["ExportOptions", "ExportRefusedError", "ExportReport", "export_model", "read_metadata"]

__getattr__ = lazily(
    __name__,
    "export",
    {
        "covpool.errors": "ExportRefusedError",
        "covpool.export.exporting": "ExportReport export_model",
        "covpool.export.targets": "read_metadata",
    },
)


@dataclass(frozen=True)
class ExportOptions:
    """How to export a bundle.

    Attributes:
        formats: any of ``onnx``, ``onnx-float16``, ``onnx-int8`` and ``torch``; a string separates them by
            commas.
        preprocessing: ``inside``: the graph receives uint8 pixels, ``(B, H, W, 3)``; ``outside``: it receives
            normalized images, ``(B, 3, H, W)``, and ``model.json`` describes the normalization.
        free_size: leave height and width of the images dynamic, where the backbone is convolutional.
        split: split to compare on (default: test if it exists, else val, else train).
        layout: layout of the data; ``auto`` detects it.
        limit: largest number of images to compare on, balanced over classes.
        calibration: largest number of training images to calibrate int8 on.
        rounds: number of timed calls of each file.
        compile: also time torch.compile.
        batch_size: batch size of the comparison; a timed call has one image.
        workers: number of processes that read images.
    """

    formats: Sequence[str] = ("onnx", "torch")
    preprocessing: Literal["inside", "outside"] = "inside"
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
        check_choice("preprocessing", self.preprocessing, ("inside", "outside"))
        for name in ("limit", "calibration", "rounds", "batch_size"):
            check_whole(name, getattr(self, name))
        check_whole("workers", self.workers, at_least=0)
        from covpool.export.targets import TARGETS  # last, and here: it imports torch

        if not self.formats:
            raise UsageError(f"formats must name at least one of {', '.join(TARGETS)}")
        for name in self.formats:
            check_choice("formats", name, tuple(TARGETS))

    @property
    def targets(self) -> "list[Target]":
        """The targets of ``formats``."""
        from covpool.export.targets import TARGETS

        return [TARGETS[name] for name in self.formats]

    @property
    def takes_pixels(self) -> bool:
        """Whether the graph normalizes its input."""
        return self.preprocessing == "inside"
