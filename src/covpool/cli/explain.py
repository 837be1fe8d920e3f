"""``covpool explain`` and ``covpool diagnose``: see :mod:`covpool.explain`."""

# Annotations are not postponed: jsonargparse would import the modules under TYPE_CHECKING to evaluate them.
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from covpool.arguments import Device
from covpool.cli.main import Command

if TYPE_CHECKING:
    from covpool.explain.diagnosis import Diagnosis
    from covpool.explain.explaining import Explanation


@dataclass(frozen=True)
class ExplainArguments:
    """Draw where in an image the evidence for a class is: maps over spatial positions that sum to the logit.

    Maps are exact for isqrt_cov, cov, mpn_cov and gap with a linear head or SVMs. For others they are
    gradient maps, and are labeled so. Orange positions are evidence for the class, blue ones against it.

    Attributes:
        bundle: folder of a model, as bundle of covpool fit and train, or hf-hub:user/name.
        data: an image, a folder of images, or images as for covpool train, whose last split is used.
        out: folder for the figures, and maps.json with the values.
        top: number of top predictions to explain.
        classes: classes to explain instead, as ``wren,robin``.
        against: class to compare with: also draw the evidence for the top prediction over this class.
        pairs: also draw the pairs of positions that agree most.
        limit: largest number of images.
        device: ``auto`` uses a GPU if there is one.
    """

    bundle: str
    data: str
    out: Path = Path("runs/explained")
    top: int = 3
    classes: tuple[str, ...] = ()
    against: str | None = None
    pairs: bool = False
    limit: int = 24
    device: Device = "auto"


def run_explain(arguments: ExplainArguments) -> "Explanation":
    """Explain, and draw."""
    from covpool.explain.explaining import explain_images
    from covpool.terminal import Progress

    with Progress("images") as progress:
        return explain_images(**vars(arguments), progress=progress)


def text_of_explain(result: "Explanation") -> str:
    """Return the number of images, and the largest difference between sums and logits."""
    from covpool.terminal import counted

    bad = f"; {result.bad} could not be read" if result.bad else ""
    lines = [f"{counted(result.images, 'image')} explained{bad}"]
    if result.kind == "exact":
        lines.append(
            f"maps are exact: sums and logits differ by at most {result.largest_gap:.0e} of the "
            "positions' absolute sum"
        )
    else:
        lines.append("maps are by gradient, an approximation: this pooling or head has no exact maps")
    return "\n".join([*lines, f"figure: {result.figure}", f"all figures and maps.json: {result.folder}"])


@dataclass(frozen=True)
class DiagnoseArguments:
    """Check a network's covariances on images, and print advice.

    It reports eigenvalues before and after the pooling, the residual of every step, constant channels, and
    the gradient.

    Attributes:
        bundle: folder of a model, as bundle of covpool fit and train, or hf-hub:user/name.
        data: an image, a folder of images, or images as for covpool train, whose last split is used.
        out: folder for diagnosis.json and diagnosis.png.
        limit: largest number of images.
        device: ``auto`` uses a GPU if there is one.
    """

    bundle: str
    data: str
    out: Path = Path("runs/diagnosis")
    limit: int = 64
    device: Device = "auto"


@dataclass(frozen=True)
class Diagnosed:
    """The diagnosis, and its folder."""

    diagnosis: "Diagnosis"
    folder: str


def run_diagnose(arguments: DiagnoseArguments) -> Diagnosed:
    """Diagnose."""
    from covpool.explain.diagnosis import diagnose_images
    from covpool.terminal import Progress

    with Progress("images") as progress:
        diagnosis = diagnose_images(**vars(arguments), progress=progress)
    return Diagnosed(diagnosis, str(arguments.out))


def text_of_diagnose(result: Diagnosed) -> str:
    """Return a table, and the warnings."""
    from covpool.explain.diagnosis import warnings
    from covpool.terminal import counted

    diagnosis = result.diagnosis
    rows = [
        ("pooling", f"{diagnosis.method}, {diagnosis.channels} channels, {diagnosis.positions} positions"),
        ("constant channels", f"{diagnosis.constant:.0%}"),
        ("rank of the covariance", f"{diagnosis.rank}"),
        ("effective rank", _change(diagnosis.effective_rank, diagnosis.effective_rank_after)),
        ("condition number", _change(diagnosis.condition, diagnosis.condition_after)),
        ("residual of each step", ", ".join(f"{value:.2g}" for value in diagnosis.residuals)),
        ("gradient at the pooling", f"{diagnosis.gradient_rms:.1e}"),
    ]
    lines = [f"{name:<24}{value}" for name, value in rows if value]
    said = warnings(diagnosis) or ["no problems found"]
    where = f"on {counted(diagnosis.images, 'image')}; {result.folder}/diagnosis.png"
    return "\n".join([*lines, "", *(f"- {sentence}" for sentence in said), "", where])


def _change(before: float, after: float | None) -> str:
    return f"{before:.3g}" if after is None else f"{before:.3g}, after the pooling {after:.3g}"


explain = Command(
    ExplainArguments,
    "covpool explain runs/birds/bundle photos --out runs/birds/explained",
    run_explain,
    text_of_explain,
)
diagnose = Command(
    DiagnoseArguments,
    "covpool diagnose runs/birds/bundle photos --out runs/birds/diagnosis",
    run_diagnose,
    text_of_diagnose,
)
