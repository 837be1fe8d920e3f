"""Figure 4: how fast networks converge, with average pooling, the exact root and the iteration."""

from __future__ import annotations

from matplotlib.figure import Figure

from covpool.reproduce.claims import lower_error, not_run
from covpool.reproduce.experiments.experiment import Experiment, Results, Row
from covpool.reproduce.figures import curves
from covpool.reproduce.miniature.configuration import Configuration

FIRST, EXACT, OURS = "ResNet", "MPN-COV", "iSQRT-COV"


def draw(results: Results, figure: Figure) -> None:
    """Error against epochs, training and validation."""
    left, right = figure.subplots(1, 2, sharey=True)
    curves(left, results, (FIRST, EXACT, OURS), what="train_error")
    curves(right, results, (FIRST, EXACT, OURS))
    left.set_ylabel("top-1 error, %")
    left.set_title("images it learns from", loc="left", fontsize=10)
    right.set_title("images it has not seen", loc="left", fontsize=10)
    right.set_ylabel("")


EXPERIMENT = Experiment(
    name="figure4",
    title="Figure 4: convergence, ResNet",
    paper="iSQRT-COV and MPN-COV converge much faster than the ResNet; 60 epochs give 22.14, 90 hardly less",
    at_full_size=(
        "60 epochs of 5,000 steps each, where here they are a few hundred: convergence there is about "
        "epochs, here about steps."
    ),
    rows=(
        Row(FIRST, Configuration("resnet10", "gap")),
        Row(EXACT, Configuration("resnet10", "mpn_cov")),
        Row(OURS, Configuration("resnet10", "isqrt_cov")),
    ),
    claims=(
        lower_error("After a third of the epochs, iSQRT-COV is ahead of the ResNet", OURS, FIRST, at=1 / 3),
        lower_error("After half of the epochs too", OURS, FIRST, at=0.5),
        lower_error("MPN-COV is ahead of the ResNet after half of the epochs", EXACT, FIRST, at=0.5),
        not_run(
            "90 epochs are hardly better than 60",
            "top-5 error of 6.12 against 6.22",
            "runs here have one length",
        ),
        lower_error("In the end iSQRT-COV is better than MPN-COV", OURS, EXACT, 0.59),
    ),
    draw=draw,
)
