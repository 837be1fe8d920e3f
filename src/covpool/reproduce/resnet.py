"""The paper's experiments with ResNets: Tables 4, 5 and 6, and Figure 4."""

from __future__ import annotations

from dataclasses import replace

from matplotlib.figure import Figure

from covpool.reproduce.claims import (
    Claim,
    Experiment,
    Judgement,
    Results,
    Row,
    fails_to_learn,
    less_time,
    lower_error,
    not_run,
)
from covpool.reproduce.figures import COLOURS, curves, level, observed_curves, panel, points
from covpool.reproduce.networks import RESNETS, Configuration

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


def draw_table4(results: Results, figure: Figure) -> None:
    """The error over the epochs, and the gradient at the pooling."""
    left, right = figure.subplots(1, 2)
    shown = (NONE, BATCHNORM, MATCHED)
    curves(left, results, (*shown, "none, rate ×10", "none, rate ×100"))  # the same have the same colours
    observed_curves(right, results, shown, "gradient_rms", "gradient at the pooling, rms")


TABLE4 = Experiment(
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
    draw=draw_table4,
    observed=(NONE, BATCHNORM, MATCHED),
)


FIRST, EXACT, OURS = "ResNet", "MPN-COV", "iSQRT-COV"


def draw_figure4(results: Results, figure: Figure) -> None:
    """Error against epochs, training and validation."""
    left, right = figure.subplots(1, 2, sharey=True)
    curves(left, results, (FIRST, EXACT, OURS), what="train_error")
    curves(right, results, (FIRST, EXACT, OURS))
    left.set_ylabel("top-1 error, %")
    left.set_title("images it learns from", loc="left", fontsize=10)
    right.set_title("images it has not seen", loc="left", fontsize=10)
    right.set_ylabel("")


FIGURE4 = Experiment(
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
    draw=draw_figure4,
)


def label(network: str, pool: str) -> str:
    """Of a row."""
    return f"{network}, {pool}"


def draw_table5(results: Results, figure: Figure) -> None:
    """Error against depth, for both."""
    axes = panel(figure, "layers", "top-1 error, %")
    depths = {network: int(network.removeprefix("resnet")) for network in RESNETS}
    for place, pool in enumerate(("gap", "isqrt_cov")):
        at = {label(network, pool): depth for network, depth in depths.items()}
        points(axes, results, at, pool, line=True, colour=place)
    axes.set_xticks(list(depths.values()))
    axes.legend(frameon=False, fontsize=9)


TABLE5 = Experiment(
    name="table5",
    title="Table 5: second order against first order, ResNets of three depths",
    paper="24.7 against 22.14 with 50 layers, 23.6 against 21.21 with 101; 23.0 for first order with 152",
    at_full_size=(
        "Depths of 50 and 101 in bottleneck blocks, 2048 channels before the reduction, and 14×14 positions."
    ),
    rows=tuple(
        Row(label(network, pool), Configuration(network, pool))
        for network in RESNETS
        for pool in ("gap", "isqrt_cov")
    ),
    claims=(
        lower_error(
            "Second order is better: 10 layers here, 50 there", "resnet10, isqrt_cov", "resnet10, gap", 2.56
        ),
        lower_error(
            "Second order is better: 18 layers here, 101 there", "resnet18, isqrt_cov", "resnet18, gap", 2.39
        ),
        lower_error("Second order is better: 26 layers here", "resnet26, isqrt_cov", "resnet26, gap"),
        lower_error(
            "The shallowest of second order is better than the deepest of first order",
            "resnet10, isqrt_cov",
            "resnet26, gap",
            0.86,
        ),
        lower_error(
            "The middle of second order is better than the deepest of first order",
            "resnet18, isqrt_cov",
            "resnet26, gap",
            1.79,
        ),
        lower_error(
            "The shallowest of second order is better than the middle of first order",
            "resnet10, isqrt_cov",
            "resnet18, gap",
            1.46,
        ),
        lower_error("Of second order, deeper is better", "resnet18, isqrt_cov", "resnet10, isqrt_cov", 0.93),
    ),
    draw=draw_table5,
)


DIMS = (32, 64, 128)


def draw_table6(results: Results, figure: Figure) -> None:
    """The error, and beside it the time, against d."""
    left, right = figure.subplots(1, 2)
    panel(figure, "channels d of the covariance", "top-1 error, %", left)
    points(left, results, {f"d={dim}": dim for dim in DIMS}, "iSQRT-COV", line=True)
    level(left, results, FIRST, 1)
    left.legend(frameon=False, fontsize=9)
    panel(figure, "channels d of the covariance", "time of a step over the ResNet's", right)
    found = {dim: results["times"].get(f"d={dim}") for dim in DIMS}
    ratios = {dim: times["both"]["ratio"] for dim, times in found.items() if times}
    middle = [ratio["median"] for ratio in ratios.values()]
    quartiles = [[abs(ratio["median"] - ratio[end]) for ratio in ratios.values()] for end in ("q1", "q3")]
    right.errorbar(list(ratios), middle, quartiles, fmt="o-", capsize=3, color=COLOURS[0])
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(DIMS, [str(dim) for dim in DIMS])
        axes.minorticks_off()


TABLE6 = Experiment(
    name="table6",
    title="Table 6: a compact covariance, ResNet",
    paper="24.7 for the ResNet; 23.73, 22.78 and 22.14 for d = 64, 128 and 256",
    at_full_size=(
        "d = 64 to 256; the classifier behind it has 1,000 classes, so that its width counts for more."
    ),
    rows=(
        Row(FIRST, Configuration("resnet10", "gap")),
        Row("d=32", Configuration("resnet10", "isqrt_cov", dim=32)),
        Row("d=64", Configuration("resnet10", "isqrt_cov")),
        Row("d=128", Configuration("resnet10", "isqrt_cov", dim=128)),
    ),
    claims=(
        lower_error("d=128 here, 256 there, is better than half of it", "d=128", "d=64", 0.64),
        lower_error("d=64 here, 128 there, is better than half of it", "d=64", "d=32", 0.95),
        lower_error("d=32 here, 64 there, is still better than average pooling", "d=32", FIRST, 0.97),
        less_time("A step takes longer than the ResNet's: d=32 here, 64 there", FIRST, "d=32", 9.86 / 8.08),
        less_time("A step takes longer than the ResNet's: d=64 here, 128 there", FIRST, "d=64", 10.75 / 8.08),
        less_time(
            "A step takes longer than the ResNet's: d=128 here, 256 there", FIRST, "d=128", 11.33 / 8.08
        ),
    ),
    draw=draw_table6,
    reference=FIRST,
)
