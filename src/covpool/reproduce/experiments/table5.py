"""Table 5: second order against first order, at three depths."""

from __future__ import annotations

from matplotlib.figure import Figure

from covpool.reproduce.claims import lower_error
from covpool.reproduce.experiments.experiment import Experiment, Results, Row
from covpool.reproduce.figures import panel, points
from covpool.reproduce.miniature.configuration import Configuration
from covpool.reproduce.miniature.networks import RESNETS


def label(network: str, pool: str) -> str:
    """Of a row."""
    return f"{network}, {pool}"


def draw(results: Results, figure: Figure) -> None:
    """Error against depth, for both."""
    axes = panel(figure, "layers", "top-1 error, %")
    depths = {network: int(network.removeprefix("resnet")) for network in RESNETS}
    for place, pool in enumerate(("gap", "isqrt_cov")):
        at = {label(network, pool): depth for network, depth in depths.items()}
        points(axes, results, at, pool, line=True, colour=place)
    axes.set_xticks(list(depths.values()))
    axes.legend(frameon=False, fontsize=9)


EXPERIMENT = Experiment(
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
    draw=draw,
)
