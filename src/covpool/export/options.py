"""What is exported, and what it is compared on: all of it in one dataclass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from covpool.functional.arguments import check_choice, check_whole


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
            raise ValueError(f"formats must name at least one of {', '.join(FORMATS)}")
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
