"""Why an approximate root performs better: what N steps make of eigenvalues while a network learns."""

from __future__ import annotations

from itertools import pairwise

from matplotlib.figure import Figure

from covpool.reproduce.claims import Claim, Judgement
from covpool.reproduce.experiments.experiment import Experiment, Results, Row
from covpool.reproduce.experiments.figure2 import EXACT, isqrt_cov
from covpool.reproduce.figures import eigenvalue_maps, observed_curves
from covpool.reproduce.miniature.configuration import Configuration

STEPS = (3, 5, 7)
LABELS = (*(f"N={steps}" for steps in STEPS), EXACT)


def shrinks_small_ones(results: Results) -> Judgement:
    """Whether, in the end, fewer steps leave a larger spread between eigenvalues than the exact root."""
    last = {label: epochs[-1]["after"]["condition"] for label, epochs in results["observations"].items()}
    known = [(label, last[label]) for label in LABELS if last.get(label) is not None]
    if len(known) < len(LABELS):
        return Judgement("", "not run here")
    ours = ", ".join(f"{label}: {condition:.0f}" for label, condition in known)
    falls = all(one[1] >= other[1] for one, other in pairwise(known))
    return Judgement(f"condition numbers after pooling: {ours}", "agrees" if falls else "does not agree")


def draw(results: Results, figure: Figure) -> None:
    """Eigenvalues out against in at the end, and condition numbers over the epochs."""
    left, right = figure.subplots(1, 2)
    eigenvalue_maps(left, results, LABELS)
    observed_curves(right, results, LABELS, "before.condition", "condition number of the covariance")


EXPERIMENT = Experiment(
    name="approximation",
    title="Why approximate roots perform better: eigenvalues while AlexNet learns",
    paper="a conjecture: the approximate root may be the more robust estimate of the covariance",
    at_full_size=("More positions than here, 196 against 49, leave fewer eigenvalues at zero."),
    rows=(
        *(Row(f"N={steps}", isqrt_cov(steps), seeds=1) for steps in STEPS),
        Row(EXACT, Configuration("alexnet", "mpn_cov"), seeds=1),
    ),
    claims=(
        Claim(
            "Fewer steps shrink small eigenvalues more, as a robust estimate of few samples would",
            "conjectured",
            shrinks_small_ones,
        ),
    ),
    draw=draw,
    observed=LABELS,
)
