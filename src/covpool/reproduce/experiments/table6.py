"""Table 6: a smaller covariance, its error and its time."""

from __future__ import annotations

from matplotlib.figure import Figure

from covpool.reproduce.claims import less_time, lower_error
from covpool.reproduce.experiments.experiment import Experiment, Results, Row
from covpool.reproduce.figures import COLOURS, level, panel, points
from covpool.reproduce.miniature.configuration import Configuration

DIMS = (32, 64, 128)
FIRST = "ResNet"


def draw(results: Results, figure: Figure) -> None:
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


EXPERIMENT = Experiment(
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
    draw=draw,
    reference=FIRST,
)
