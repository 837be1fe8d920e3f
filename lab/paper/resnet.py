"""Claims and figures of the experiments with ResNets: Tables 4, 5 and 6, and Figure 4."""

from __future__ import annotations

from dataclasses import replace

from matplotlib.figure import Figure

from lab.paper.claims import (
    Claim,
    Comparison,
    Judgment,
    Results,
    fails_to_learn,
    less_time,
    lower_error,
    not_run,
)
from lab.paper.figures import COLOURS, curves, level, observed_curves, panel, points
from lab.reproduce import experiments
from lab.reproduce.experiments import BATCHNORM, DIMS, FIRST, MATCHED, MPN_COV, NONE, OURS, TUNED
from lab.reproduce.networks import RESNETS

# The gradients of one seed are resolved if they differ by more than this factor at every epoch.
FAR = 10.0


def small_gradients(results: Results) -> Judgment:
    """Judge the gradient of one feature entry at the pooling, from before the first step to the end."""
    observed = results["observations"]
    if NONE not in observed or MATCHED not in observed:
        return Judgment("", "not run here")
    without, matched = ([epoch["gradient_rms"] for epoch in observed[label]] for label in (NONE, MATCHED))
    ours = (
        "root mean square of the gradient at the pooling, before training and after it: "
        f"{without[0]:.1e} and {without[-1]:.1e} without compensation, "
        f"{matched[0]:.1e} and {matched[-1]:.1e} with it"
    )
    ratios = [more / less for more, less in zip(matched, without, strict=True)]
    if min(ratios) > FAR:
        return Judgment(ours, "agrees in sign")
    return Judgment(ours, "does not agree" if max(ratios) < 1 / FAR else "not resolved here")


def _tuning(lr: float) -> tuple[Claim, Claim]:
    """Return the claims that another learning rate does not replace compensation."""
    row = f"none, rate ×{lr:g}"
    helps = lower_error(
        f"Without compensation, the usual learning rate is at least as good as one {lr:g} times as high",
        NONE,
        row,
    )
    return (
        replace(helps, paper="another learning rate helps little"),
        lower_error(f"Compensation is better than a learning rate {lr:g} times as high", MATCHED, row),
    )


def draw_table4(results: Results, figure: Figure) -> None:
    """Draw the error over the epochs, and the gradient at the pooling."""
    left, right = figure.subplots(1, 2)
    shown = (NONE, BATCHNORM, MATCHED)
    curves(left, results, (*shown, "none, rate ×10", "none, rate ×100"))  # same rows, same colors
    observed_curves(right, results, shown, "gradient_rms", "gradient at the pooling, rms")


TABLE4 = Comparison(
    experiment=experiments.TABLE4,
    at_full_size=(
        "The paper's ResNet-50 is five times as deep, and the small gradient has to pass through all its "
        "layers. The ten layers here learn without compensation too, but slowly."
    ),
    claims=(
        fails_to_learn("Without compensation the network does not learn", NONE, "fails to converge"),
        lower_error("With compensation the error is lower", MATCHED, NONE),
        Claim("Without compensation gradients are very small", "about 1e-5", small_gradients),
        *(claim for lr in TUNED for claim in _tuning(lr)),
        lower_error("Compensation is better than BatchNorm", MATCHED, BATCHNORM, 0.98),
    ),
    draw=draw_table4,
    heads={
        MATCHED: "isqrt_cov@iteration=paper@steps=5",
        NONE: "isqrt_cov@iteration=paper@steps=5@compensation=none",
        BATCHNORM: "isqrt_cov@iteration=paper@steps=5@compensation=batchnorm",
    },
)


def draw_figure4(results: Results, figure: Figure) -> None:
    """Draw training and validation error against epochs."""
    left, right = figure.subplots(1, 2, sharey=True)
    curves(left, results, (FIRST, MPN_COV, OURS), what="train_error")
    curves(right, results, (FIRST, MPN_COV, OURS))
    left.set_ylabel("top-1 error, %")
    left.set_title("images it learns from", loc="left", fontsize=10)
    right.set_title("images it has not seen", loc="left", fontsize=10)
    right.set_ylabel("")


FIGURE4 = Comparison(
    experiment=experiments.FIGURE4,
    at_full_size=(
        "An epoch of ImageNet has 5,000 steps, an epoch here a few hundred. These runs do not show how many "
        "epochs a lead lasts on ImageNet."
    ),
    claims=(
        lower_error(
            "After a third of the epochs, iSQRT-COV is better than the ResNet", OURS, FIRST, at=1 / 3
        ),
        lower_error("After half of the epochs, iSQRT-COV is better than the ResNet", OURS, FIRST, at=0.5),
        lower_error("After half of the epochs, MPN-COV is better than the ResNet", MPN_COV, FIRST, at=0.5),
        not_run(
            "90 epochs are hardly better than 60",
            "top-5 error of 6.12 % and 6.22 %",
            "all runs here have the same length",
        ),
        lower_error("After the last epoch, iSQRT-COV is better than MPN-COV", OURS, MPN_COV, 0.59),
    ),
    draw=draw_figure4,
    heads={OURS: "isqrt_cov@iteration=paper@steps=5", MPN_COV: "mpn_cov"},
)


def draw_table5(results: Results, figure: Figure) -> None:
    """Draw the error against depth, for both poolings."""
    axes = panel(figure, "layers", "top-1 error, %")
    depths = {network: int(network.removeprefix("resnet")) for network in RESNETS}
    for place, pool in enumerate(("gap", "isqrt_cov")):
        at = {f"{network}, {pool}": depth for network, depth in depths.items()}
        points(axes, results, at, pool, line=True, colour=place)
    axes.set_xticks(list(depths.values()))
    axes.legend(frameon=False, fontsize=9)


TABLE5 = Comparison(
    experiment=experiments.TABLE5,
    at_full_size=(
        "The paper's second-order networks have 50 and 101 layers in bottleneck blocks, 2048 channels before "
        "the reduction, and 14×14 positions."
    ),
    claims=(
        lower_error(
            "Second order is better than first order (10 layers here, 50 in the paper)",
            "resnet10, isqrt_cov",
            "resnet10, gap",
            2.56,
        ),
        lower_error(
            "Second order is better than first order (18 layers here, 101 in the paper)",
            "resnet18, isqrt_cov",
            "resnet18, gap",
            2.39,
        ),
        lower_error(
            "Second order is better than first order (26 layers here)", "resnet26, isqrt_cov", "resnet26, gap"
        ),
        lower_error(
            "The shallowest second-order network is better than the deepest first-order one",
            "resnet10, isqrt_cov",
            "resnet26, gap",
            0.86,
        ),
        lower_error(
            "The middle second-order network is better than the deepest first-order one",
            "resnet18, isqrt_cov",
            "resnet26, gap",
            1.79,
        ),
        lower_error(
            "The shallowest second-order network is better than the middle first-order one",
            "resnet10, isqrt_cov",
            "resnet18, gap",
            1.46,
        ),
        lower_error(
            "The middle second-order network is better than the shallowest one",
            "resnet18, isqrt_cov",
            "resnet10, isqrt_cov",
            0.93,
        ),
    ),
    draw=draw_table5,
)


def draw_table6(results: Results, figure: Figure) -> None:
    """Draw the error and the time against d."""
    left, right = figure.subplots(1, 2)
    panel(figure, "channels d of the covariance", "top-1 error, %", left)
    points(left, results, {f"d={dim}": dim for dim in DIMS}, "iSQRT-COV", line=True)
    level(left, results, FIRST, 1)
    left.legend(frameon=False, fontsize=9)
    panel(figure, "channels d of the covariance", "time of a step over the ResNet's", right)
    times_of = {dim: results["times"].get(f"d={dim}") for dim in DIMS}
    ratios = {dim: times["both"]["ratio"] for dim, times in times_of.items() if times}
    middle = [ratio["median"] for ratio in ratios.values()]
    quartiles = [[abs(ratio["median"] - ratio[end]) for ratio in ratios.values()] for end in ("q1", "q3")]
    right.errorbar(list(ratios), middle, quartiles, fmt="o-", capsize=3, color=COLOURS[0])
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(DIMS, [str(dim) for dim in DIMS])
        axes.minorticks_off()


TABLE6 = Comparison(
    experiment=experiments.TABLE6,
    at_full_size="The paper's d is 64 to 256, and its classifier has 1,000 classes.",
    claims=(
        lower_error("d=128 is better than d=64 (256 and 128 in the paper)", "d=128", "d=64", 0.64),
        lower_error("d=64 is better than d=32 (128 and 64 in the paper)", "d=64", "d=32", 0.95),
        lower_error("d=32 is better than average pooling (64 in the paper)", "d=32", FIRST, 0.97),
        less_time(
            "A training step takes longer than the ResNet's, d=32 (64 in the paper)",
            FIRST,
            "d=32",
            9.86 / 8.08,
        ),
        less_time(
            "A training step takes longer than the ResNet's, d=64 (128 in the paper)",
            FIRST,
            "d=64",
            10.75 / 8.08,
        ),
        less_time(
            "A training step takes longer than the ResNet's, d=128 (256 in the paper)",
            FIRST,
            "d=128",
            11.33 / 8.08,
        ),
    ),
    draw=draw_table6,
    heads={
        FIRST: "gap",
        "d=32": "isqrt_cov@iteration=paper@steps=5@dim=32",
        "d=64": "isqrt_cov@iteration=paper@steps=5@dim=64",
        "d=128": "isqrt_cov@iteration=paper@steps=5",
    },
)
