"""Figure 2: the error against the number of Newton-Schulz steps, on AlexNet."""

from __future__ import annotations

from matplotlib.figure import Figure

from covpool.reproduce.claims import lower_error
from covpool.reproduce.experiments.experiment import Experiment, Results, Row
from covpool.reproduce.figures import level, panel, points
from covpool.reproduce.miniature.configuration import Configuration

STEPS = range(1, 10)
PLAIN, EXACT = "Plain-COV", "MPN-COV (EIG)"


def isqrt_cov(steps: int) -> Configuration:
    """AlexNet with so many steps; five are those of the other experiments."""
    return Configuration("alexnet", "isqrt_cov", {"steps": steps})


def draw(results: Results, figure: Figure) -> None:
    """A curve with a bar of one deviation, and the two that it lies between as lines."""
    axes = panel(figure, "Newton-Schulz steps", "top-1 error, %")
    points(axes, results, {f"N={steps}": steps for steps in STEPS}, "iSQRT-COV", line=True)
    level(axes, results, PLAIN, 1)
    level(axes, results, EXACT, 2)
    axes.set_xticks(list(STEPS))
    axes.legend(frameon=False, fontsize=9)


EXPERIMENT = Experiment(
    name="figure2",
    title="Figure 2: error against the number N of Newton-Schulz steps, AlexNet",
    paper="the error falls from N=1 to N=5, is lowest between 5 and 7, and rises after 7",
    at_full_size=(
        "1,000 classes and 1.3 million images leave room for differences of tenths of a point, which "
        "1,250 test images do not resolve; the covariance has four times the channels, and smaller "
        "eigenvalues to be brought up."
    ),
    rows=(
        Row(PLAIN, Configuration("alexnet", "cov")),
        *(Row(f"N={steps}", isqrt_cov(steps)) for steps in STEPS),
        Row(EXACT, Configuration("alexnet", "mpn_cov")),
    ),
    claims=(
        lower_error("One step is better than no normalisation", "N=1", PLAIN, 1.3),
        lower_error("Five steps are better than no normalisation", "N=5", PLAIN),
        lower_error("Five steps are better than one", "N=5", "N=1"),
        lower_error("The exact root is better than three steps, by little", EXACT, "N=3", 0.3),
        lower_error("Five steps are better than the exact root, marginally", "N=5", EXACT),
        lower_error("Seven steps are better than the exact root, marginally", "N=7", EXACT),
        lower_error("Seven steps are better than eight: more do not help", "N=7", "N=8"),
        lower_error("Seven steps are better than nine", "N=7", "N=9"),
    ),
    draw=draw,
)
