"""Table 4: what takes the place of post-compensation, on a ResNet; and how large gradients are."""

from __future__ import annotations

from matplotlib.figure import Figure

from covpool.reproduce.claims import Claim, Judgement, lower_error
from covpool.reproduce.experiments.experiment import Experiment, Results, Row
from covpool.reproduce.figures import curves, observed_curves
from covpool.reproduce.miniature.configuration import Configuration

NONE, BATCHNORM, MATCHED = "none", "BatchNorm", "trace (matched)"
# The learning rate over its own, with which training without compensation is tried too.
TUNED = (10.0, 100.0, 1000.0)


def _without(lr: float = 1.0) -> Configuration:
    return Configuration("resnet10", "isqrt_cov", {"compensation": "none"}, lr=lr)


def small_gradients(results: Results) -> Judgement:
    """Of one entry of the features at the pooling, before the first step: without compensation over with."""
    first = {label: epochs[0]["gradient_rms"] for label, epochs in results["observations"].items()}
    if NONE not in first or MATCHED not in first:
        return Judgement("", "not run here")
    ours = f"{first[NONE]:.1e} without, {first[MATCHED]:.1e} with it, rms at the pooling"
    return Judgement(ours, "agrees in sign" if first[NONE] < first[MATCHED] else "does not agree")


def draw(results: Results, figure: Figure) -> None:
    """The error over the epochs, and the gradient at the pooling."""
    left, right = figure.subplots(1, 2)
    shown = (NONE, BATCHNORM, MATCHED)
    curves(left, results, (*shown, "none, rate ×10", "none, rate ×100"))  # the same have the same colours
    observed_curves(right, results, shown, "gradient_rms", "gradient at the pooling, rms")


EXPERIMENT = Experiment(
    name="table4",
    title="Table 4: post-compensation, ResNet",
    paper="without it the network fails to converge; BatchNorm gives 23.12, the matched scale 22.14",
    at_full_size=(
        "A ResNet-50 is five times as deep: what is lost in scale at the pooling has to pass through "
        "all of it."
    ),
    rows=(
        Row(NONE, _without()),
        *(Row(f"none, rate ×{lr:g}", _without(lr)) for lr in TUNED),
        Row(BATCHNORM, Configuration("resnet10", "isqrt_cov", {"compensation": "batchnorm"})),
        Row(MATCHED, Configuration("resnet10", "isqrt_cov")),
    ),
    claims=(
        lower_error("Compensation is needed", MATCHED, NONE),
        Claim("Without it gradients are very small", "in the order of 1e-5", small_gradients),
        *(
            lower_error(
                f"Nor does the learning rate help, {lr:g} times as high", MATCHED, f"none, rate ×{lr:g}"
            )
            for lr in TUNED
        ),
        lower_error("The matched scale is better than BatchNorm", MATCHED, BATCHNORM, 0.98),
    ),
    draw=draw,
    observed=(NONE, BATCHNORM, MATCHED),
)
