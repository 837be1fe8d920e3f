"""Why an approximate root performs better: what N steps make of eigenvalues while a network learns."""

from __future__ import annotations

from matplotlib.figure import Figure

from covpool.reproduce.claims import Claim, Judgement
from covpool.reproduce.experiments.experiment import Experiment, Results, Row
from covpool.reproduce.experiments.figure2 import EXACT, isqrt_cov
from covpool.reproduce.figures import eigenvalue_maps, observed_curves
from covpool.reproduce.miniature.configuration import Configuration

STEPS = (3, 5, 7)
LABELS = (*(f"N={steps}" for steps in STEPS), EXACT)


def as_it_is(results: Results) -> Judgement:
    """Condition numbers in the end, to look at: that fewer steps leave a larger one is mathematics."""
    last = {label: epochs[-1]["after"]["condition"] for label, epochs in results["observations"].items()}
    known = [f"{label}: {last[label]:.0f}" for label in LABELS if last.get(label) is not None]
    if not known:
        return Judgement("", "not run here")
    return Judgement(f"condition numbers after the pooling are {', '.join(known)}", "not resolved here")


def draw(results: Results, figure: Figure) -> None:
    """Eigenvalues out against in at the end, and condition numbers over the epochs."""
    left, right = figure.subplots(1, 2)
    eigenvalue_maps(left, results, LABELS)
    observed_curves(right, results, LABELS, "before.condition", "condition number of the covariance")


EXPERIMENT = Experiment(
    name="approximation",
    title="Why approximate roots perform better: eigenvalues while AlexNet learns",
    paper="a conjecture: the approximate root may be the more robust estimate of the covariance",
    at_full_size=("More positions than here, 169 against 49, leave fewer eigenvalues at zero."),
    rows=(
        *(Row(f"N={steps}", isqrt_cov(steps), seeds=1) for steps in STEPS),
        Row(EXACT, Configuration("alexnet", "mpn_cov"), seeds=1),
    ),
    claims=(
        Claim("The approximate root is the more robust estimate of the covariance", "conjectured", as_it_is),
    ),
    draw=draw,
    observed=LABELS,
)
