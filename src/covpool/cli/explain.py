"""``covpool explain``: see :func:`covpool.explain.explaining.explain_images`."""

# Annotations are not postponed here: jsonargparse would import what is for type checkers to evaluate them.
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from covpool.explain.explaining import Explanation

EXAMPLE = "covpool explain runs/birds/bundle photos --out runs/birds/explained"


@dataclass(frozen=True)
class Arguments:
    """Draw where in an image the evidence for a class is: maps over places whose sum is the logit.

    Exact for isqrt_cov, cov, mpn_cov and gap with a linear head or SVMs; by gradient, and called so, for
    others. Orange places speak for the class, blue ones against it.

    Attributes:
        bundle: the folder of a trained model.
        data: an image, a folder of images, or images as for covpool train: those of its last split.
        out: the folder for the figures, and maps.json with the numbers.
        top: as many classes, the likeliest ones.
        classes: these in their place, as ``[wren,robin]``.
        against: also draw why the likeliest class, and not this one.
        pairs: also draw which two places agree.
        limit: of images.
    """

    bundle: Path
    data: str
    out: Path = Path("explained")
    top: int = 3
    classes: tuple[str, ...] = ()
    against: str | None = None
    pairs: bool = False
    limit: int = 24


def run(arguments: Arguments) -> "Explanation":
    """Explain, and draw."""
    from covpool.explain.explaining import explain_images
    from covpool.progress import Progress

    with Progress("images") as progress:
        return explain_images(
            arguments.bundle,
            arguments.data,
            arguments.out,
            top=arguments.top,
            classes=arguments.classes,
            against=arguments.against,
            pairs=arguments.pairs,
            limit=arguments.limit,
            progress=progress,
        )


def text(result: "Explanation") -> str:
    """What was drawn, and how far sums are from logits."""
    from covpool.wording import counted

    bad = f"; {result.bad} could not be read" if result.bad else ""
    lines = [f"{counted(result.images, 'image')} explained{bad}"]
    if result.kind == "exact":
        lines.append(
            f"maps are exact: sums and logits differ by {result.largest_gap:.0e} of what places add, at most"
        )
    else:
        lines.append(
            "maps are by gradient, an approximation: of this pooling or head no sum over places is known"
        )
    return "\n".join([*lines, f"figures and maps.json: {result.folder}"])
