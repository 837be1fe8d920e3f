"""``covpool diagnose``: see :func:`covpool.explain.diagnosis.diagnose`."""

# Annotations are not postponed here: jsonargparse would import what is for type checkers to evaluate them.
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from covpool.explain.diagnosis import Diagnosis

EXAMPLE = "covpool diagnose runs/birds/bundle photos --out runs/birds/diagnosis"


@dataclass(frozen=True)
class Arguments:
    """Look at a network's covariances on images, and say what is amiss.

    Eigenvalues before and after the pooling, the residual of every step, constant channels, and the gradient.

    Attributes:
        bundle: the folder of a trained model.
        data: an image, a folder of images, or images as for covpool train: those of its last split.
        out: the folder for diagnosis.json and diagnosis.png.
        limit: of images.
    """

    bundle: Path
    data: str
    out: Path = Path("diagnosis")
    limit: int = 64


@dataclass(frozen=True)
class Told:
    """The diagnosis, and where it is."""

    found: "Diagnosis"
    folder: str


def run(arguments: Arguments) -> Told:
    """Diagnose."""
    from covpool.explain.diagnosis import diagnose_images
    from covpool.progress import Progress

    with Progress("images") as progress:
        found = diagnose_images(
            arguments.bundle, arguments.data, arguments.out, limit=arguments.limit, progress=progress
        )
    return Told(found, str(arguments.out))


def text(result: Told) -> str:
    """Figures, and what is amiss."""
    from covpool.explain.diagnosis import warnings
    from covpool.wording import counted

    found = result.found
    rows = [
        ("pooling", f"{found.method}, {found.channels} channels, {found.positions} positions"),
        ("constant channels", f"{found.constant:.0%}"),
        ("rank of the covariance", f"{found.rank}"),
        ("effective rank", _change(found.effective_rank, found.effective_rank_after)),
        ("condition number", _change(found.condition, found.condition_after)),
        ("residual of each step", ", ".join(f"{value:.2g}" for value in found.residuals)),
        ("gradient at the pooling", f"{found.gradient_rms:.1e}"),
    ]
    lines = [f"{name:<24}{value}" for name, value in rows if value]
    said = warnings(found) or ["nothing is amiss"]
    where = f"of {counted(found.images, 'image')}; {result.folder}/diagnosis.png"
    return "\n".join([*lines, "", *(f"- {sentence}" for sentence in said), "", where])


def _change(before: float, after: float | None) -> str:
    return f"{before:.3g}" if after is None else f"{before:.3g}, after the pooling {after:.3g}"
