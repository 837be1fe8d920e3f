"""How a caller wants images to go through a network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from covpool.evaluate.passes import Pass
from covpool.functional.arguments import check_choice

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Passing:
    """A pass, with what is usual where nothing is said, and the device.

    Attributes:
        batch_size: images at a time; their mirror images come on top.
        workers: processes that load images.
        precision: of autocast: ``"float32"`` or ``"bfloat16"``.
        device: ``"cpu"``, ``"cuda"``, or ``"auto"`` for a GPU if there is one.
    """

    batch_size: int = 32
    workers: int = 0
    precision: Precision = "float32"
    device: str = "auto"

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, ("float32", "bfloat16"))
        check_choice("device", self.device, ("auto", "cpu", "cuda"))
        self.made()

    def made(self) -> Pass:
        """The pass; how far it is, is told by whoever uses its batches."""
        return Pass(self.batch_size, self.workers, self.precision, progress=None)
