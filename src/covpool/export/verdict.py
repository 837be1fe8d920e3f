"""Whether a file agrees with torch well enough to be given away."""

from __future__ import annotations

from dataclasses import dataclass

from covpool.export.parity import Parity


class ExportRefusedError(ValueError):
    """What was exported is too far from the model; the message says by which figure."""


@dataclass(frozen=True)
class Tolerance:
    """What is asked of a file.

    Attributes:
        top1: the smallest part of the images on which the first class must be the same.
        relative: the largest difference of a logit, as a part of the largest logit; ``None`` for any.
    """

    top1: float
    relative: float | None


TOLERANCES = {
    "float32": Tolerance(top1=1.0, relative=1e-3),
    "float16": Tolerance(top1=0.99, relative=None),
    "int8": Tolerance(top1=0.97, relative=None),
}


def objection(file: str, precision: str, parity: Parity) -> str | None:
    """What speaks against a file, in a sentence without an end; ``None`` if nothing does."""
    tolerance = TOLERANCES[precision]
    if parity.top1 < tolerance.top1:
        return (
            f"{file} and torch agree in the first class on {parity.agreeing} of {parity.images} images, "
            f"{100 * parity.top1:.2f} %, below the {100 * tolerance.top1:g} % that {precision} must reach"
        )
    if tolerance.relative is not None and not parity.relative <= tolerance.relative:
        return (
            f"the logits of {file} differ from torch's by {parity.relative:.1e} of the largest, "
            f"above the {tolerance.relative:g} that {precision} may"
        )
    return None
