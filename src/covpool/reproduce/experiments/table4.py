"""Table 4: what takes the place of post-compensation, on a ResNet; and how large gradients are."""

from __future__ import annotations

from dataclasses import replace

from matplotlib.figure import Figure

from covpool.reproduce.claims import Claim, Judgement, fails_to_learn, lower_error
from covpool.reproduce.experiments.experiment import Experiment, Results, Row
from covpool.reproduce.figures import curves, observed_curves
from covpool.reproduce.miniature.configuration import Configuration

NONE, BATCHNORM, MATCHED = "none", "BatchNorm", "trace (matched)"
# The learning rate over its own, with which training without compensation is tried too.
TUNED = (10.0, 100.0, 1000.0)
# Gradients of one seed that differ by less, at any epoch, are not told apart.
FAR = 10.0


def _without(lr: float = 1.0) -> Configuration:
    return Configuration("resnet10", "isqrt_cov", {"compensation": "none"}, lr=lr)


def small_gradients(results: Results) -> Judgement:
    """Of one entry of the features at the pooling, from before the first step to the end."""
    found = results["observations"]
    if NONE not in found or MATCHED not in found:
        return Judgement("", "not run here")
    without, matched = ([epoch["gradient_rms"] for epoch in found[label]] for label in (NONE, MATCHED))
    ours = (
        f"from {without[0]:.1e} to {without[-1]:.1e} without, from {matched[0]:.1e} to {matched[-1]:.1e} "
        "with it, rms at the pooling"
    )
    ratios = [more / less for more, less in zip(matched, without, strict=True)]
    if min(ratios) > FAR:
        return Judgement(ours, "agrees in sign")
    return Judgement(ours, "does not agree" if max(ratios) < 1 / FAR else "not resolved here")


def _tuning(lr: float) -> tuple[Claim, Claim]:
    """Another rate does not mend what is missing: it is no better, or not as good as compensation."""
    row = f"none, rate ×{lr:g}"
    helps = lower_error(f"Without it the usual rate is as good as one {lr:g} times as high", NONE, row)
    return (
        replace(helps, paper="tuning helps little"),
        lower_error(f"It is better than a rate {lr:g} times as high", MATCHED, row),
    )


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
        "all of it. The ten layers here learn without compensation too, only slowly."
    ),
    rows=(
        Row(NONE, _without()),
        *(Row(f"none, rate ×{lr:g}", _without(lr)) for lr in TUNED),
        Row(BATCHNORM, Configuration("resnet10", "isqrt_cov", {"compensation": "batchnorm"})),
        Row(MATCHED, Configuration("resnet10", "isqrt_cov")),
    ),
    claims=(
        fails_to_learn("Without compensation the network does not learn", NONE, "fails to converge"),
        lower_error("With it the error is lower", MATCHED, NONE),
        Claim("Without it gradients are very small", "in the order of 1e-5", small_gradients),
        *(claim for lr in TUNED for claim in _tuning(lr)),
        lower_error("The matched scale is better than BatchNorm", MATCHED, BATCHNORM, 0.98),
    ),
    draw=draw,
    observed=(NONE, BATCHNORM, MATCHED),
)
