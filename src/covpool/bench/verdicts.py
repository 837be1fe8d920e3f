"""The paper's Table 2 and Figure 3, and sentences that compare measurements with them."""

from __future__ import annotations

from typing import Any, NamedTuple

from covpool.bench.layers import REFERENCE
from covpool.provenance.origin import Results


class PaperLayer(NamedTuple):
    """A row of Table 2(a): milliseconds an image forward and backward, forward alone, megabytes."""

    both: float
    forward: float
    memory: float | None = None


# The size of ours that the table is of: AlexNet's features.
PAPER_SIZE = "13x13"

# Table 2(a), by the label of our entry. The two of improved B-CNN without memory stand in the text.
LAYERS = {
    "isqrt_cov steps=3": PaperLayer(0.81, 0.26, 0.627),
    "isqrt_cov": PaperLayer(1.41, 0.41, 1.129),
    "mpn_cov": PaperLayer(2.58, 2.41, 0.377),
    "improved_bcnn forward=svd backward=svd": PaperLayer(13.51, 11.19, 0.501),
    "improved_bcnn forward=newton_schulz backward=lyapunov": PaperLayer(13.91, 2.09, 0.501),
    "improved_bcnn forward=newton_schulz backward=svd": PaperLayer(15.31, 2.09),
    "improved_bcnn forward=svd backward=lyapunov": PaperLayer(12.21, 11.19),
    "g2denet root=svd": PaperLayer(8.56, 4.76, 0.505),
}

# Table 2(b): milliseconds a matrix of 256×256, on what.
DECOMPOSITIONS = {
    "eigh": {"cuSOLVER": 21.3, "Matlab on the CPU": 1.8, "Matlab on the GPU": 9.8},
    "svd": {"cuSOLVER": 52.2, "Matlab on the CPU": 4.1, "Matlab on the GPU": 11.9},
}

# Figure 3 is a picture without figures. What the text says it shows:
FIGURE_3 = (
    "with one GPU, the gap between the speeds of iSQRT-COV and MPN-COV is nearly the same at every batch "
    "size; with two, it grows with the batch: iSQRT-COV's speed grows all the way, while MPN-COV's tends to "
    "saturate above 512 images"
)


def times_isqrt_cov(label: str) -> float | None:
    """The paper's time of an entry over that of iSQRT-COV with five steps; None where it has none."""
    layer = LAYERS.get(label)
    return None if layer is None else layer.both / LAYERS["isqrt_cov"].both


RIVAL = "mpn_cov"


def verdicts(results: Results) -> list[str]:
    """Every sentence that the results allow."""
    said = []
    for name, size in results["layers"].items():
        said += _standing(name, size)
        if name == PAPER_SIZE:
            said += _beside_the_paper(size)
            said += _decompositions(size)
    if results["training"] is not None and results["training"]["steps"]:
        said += _training(results["training"]["steps"])
    return said


def _standing(name: str, size: dict[str, Any]) -> list[str]:
    """Which other methods are quicker, level and slower; level where quartiles are on both sides of 1."""
    ratios = {
        label: found["value_and_gradient"]["ratio"]
        for label, found in size["entries"].items()
        if label.partition(" ")[0] != REFERENCE
    }
    ordered = sorted(ratios, key=lambda label: ratios[label]["median"])
    quicker = [label for label in ordered if ratios[label]["q3"] < 1]
    slower = [label for label in ordered if ratios[label]["q1"] > 1]
    level = [label for label in ordered if label not in quicker and label not in slower]

    def listed(labels: list[str]) -> str:
        return ", ".join(f"`{label}` ({number(ratios[label]['median'])})" for label in labels) or "none"

    return [
        f"At {name}, with gradient, `isqrt_cov` is slower than: {listed(quicker)}. In brackets, their time "
        "over its own.",
        f"At {name} it is level with: {listed(level)}; and faster than: {listed(slower)}.",
    ]


def _beside_the_paper(size: dict[str, Any]) -> list[str]:
    said = []
    for label, found in size["entries"].items():
        theirs = times_isqrt_cov(label)
        if theirs is None or label == REFERENCE:
            continue
        ratio = found["value_and_gradient"]["ratio"]
        sentence = (
            f"`{label}` takes {with_quartiles(**ratio)} times the time of `isqrt_cov`; the paper's ratio is "
            f"{number(theirs)}"
        )
        if (ratio["median"] < 1) != (theirs < 1):
            who = "`isqrt_cov` loses here and wins" if theirs > 1 else "`isqrt_cov` wins here and loses"
            sentence += f": {who} there"
        said.append(f"{sentence}.")
    return said


def _decompositions(size: dict[str, Any]) -> list[str]:
    said = []
    for name, found in size["decompositions"].items():
        theirs = ", ".join(
            f"{number(milliseconds / LAYERS[REFERENCE].forward)} by {column}"
            for column, milliseconds in DECOMPOSITIONS[name].items()
        )
        said.append(
            f"`{name}` alone takes {with_quartiles(**found['value']['ratio'])} times as long as the value of "
            f"`isqrt_cov`; in the paper: {theirs}."
        )
    return said


def _training(steps: list[dict[str, Any]]) -> list[str]:
    said = []
    for count, words in (("one", "On one process"), ("two", "On two processes")):
        said.append(f"{words} {_growth(steps, count)}")
        if RIVAL in steps[0][count]:
            said.append(f"{words} {_gap(steps, count)}")
    said.append(f"Two processes over one, images a second: {_scaling(steps)}.")
    return said


def _growth(steps: list[dict[str, Any]], count: str) -> str:
    speeds = [_speed(found, count, REFERENCE) for found in steps]
    falls = [
        str(later["batch"])
        for later, speed, before in zip(steps[1:], speeds[1:], speeds[:-1], strict=True)
        if speed <= before
    ]
    grows = f"does not grow at a batch of {', '.join(falls)}" if falls else "grows with every batch size"
    return f"the speed of `isqrt_cov` {grows}: {_from_to(steps, speeds, 'images a second')}."


def _gap(steps: list[dict[str, Any]], count: str) -> str:
    ratios = [found[count][RIVAL]["ratio"]["median"] for found in steps]
    gaps = [_speed(found, count, REFERENCE) - _speed(found, count, RIVAL) for found in steps]
    return (
        f"a step with `{RIVAL}` takes {_range(ratios)} times that with `isqrt_cov`; the gap between their "
        f"speeds (positive where `isqrt_cov` leads) is {_from_to(steps, gaps, 'images a second')}; in the "
        f"paper it {'is nearly the same at every batch size' if count == 'one' else 'grows with the batch'}."
    )


def _scaling(steps: list[dict[str, Any]]) -> str:
    pools = steps[0]["two_over_one"]
    return ", ".join(
        f"`{pool}` {_range([found['two_over_one'][pool]['median'] for found in steps])}" for pool in pools
    )


def _speed(found: dict[str, Any], count: str, pool: str) -> float:
    speed: float = found["batch"] / found[count][pool]["seconds"]["median"]
    return speed


def _from_to(steps: list[dict[str, Any]], values: list[float], unit: str) -> str:
    first, last = steps[0]["batch"], steps[-1]["batch"]
    if first == last:
        return f"{values[0]:.1f} {unit} at a batch of {first}"
    return f"{values[0]:.1f} {unit} at a batch of {first}, {values[-1]:.1f} at {last}"


def _range(values: list[float]) -> str:
    low, high = number(min(values)), number(max(values))
    return low if low == high else f"{low} to {high}"


def with_quartiles(median: float, q1: float, q3: float) -> str:
    """A median, with its quartiles in brackets."""
    if q1 == q3:
        return number(median)
    return f"{number(median)} [{number(q1)}, {number(q3)}]"


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
