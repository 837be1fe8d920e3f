"""Write the page and figure of results of ``python -m lab bench``: ``python -m lab figures methods FILE``.

The page has the tables that ``python -m lab bench`` prints, and sentences that compare them with the paper.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from covpool.nn.pooling import METHODS
from covpool.provenance import Results
from lab.bench.layers import REFERENCE
from lab.bench.methods import SUITE
from lab.bench.methods_plot import draw
from lab.bench.table import (
    DECOMPOSITIONS,
    LAYERS,
    PAPER_SIZE,
    number,
    sections,
    times_isqrt_cov,
    with_quartiles,
)
from lab.record import committed_file, read_record

WHY_A_GPU_DIFFERS = (
    "A Newton-Schulz step is a few matrix products. A GPU computes the products of a complete batch at its "
    "full rate. A symmetric eigensolver or an SVD is a long sequence of small steps, and each depends on the "
    "one before. Half of the reduction to tridiagonal form is limited by memory, not by arithmetic. The QR "
    "or divide-and-conquer iterations after it are serial. A GPU is mostly idle in these steps: in the "
    "paper's table, Matlab's CPU function is faster than both GPU functions.\n\n"
    "On a CPU, LAPACK decomposes a 256×256 matrix at a good fraction of the speed of matrix products. A "
    "method with an eigendecomposition can therefore be nearly as fast as `isqrt_cov`, or faster. One thing "
    "makes `isqrt_cov` faster here: with fewer positions than channels (169 in 13x13 and 196 in 14x14, with "
    "256 channels), it iterates on the smaller positions × positions matrix. The paper's code does not."
)


def markdown(results: Results, plot: str) -> str:
    """Return the page."""
    title, origin, how_to_read, *tables = sections(results)
    figure = f"![Time and memory of every method over isqrt_cov, and speed of training]({plot})"
    parts = [title, origin, how_to_read, figure]
    parts += ["## In sentences", "\n".join(f"- {sentence}" for sentence in verdicts(results))]
    if results["device"] == "cpu":
        parts += ["## Why a GPU differs", WHY_A_GPU_DIFFERS]
    return "\n\n".join([*parts, *tables, "## Methods", _methods(results)]) + "\n"


def _methods(results: Results) -> str:
    entries = results["arguments"]["entries"].values()
    summaries = {entry["method"]: entry["summary"] for entry in entries}
    summaries |= {name: METHODS[name].summary for name in summaries if name in METHODS}
    return "\n".join(f"- `{name}`: {summary}" for name, summary in summaries.items())


RIVAL = "mpn_cov"


def verdicts(results: Results) -> list[str]:
    """Return the sentences that follow from the results."""
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
    """List faster, equal and slower methods; a method is equal if its quartiles are on both sides of 1."""
    ratios = {
        label: figures["value_and_gradient"]["ratio"]
        for label, figures in size["entries"].items()
        if label.partition(" ")[0] != REFERENCE
    }
    ordered = sorted(ratios, key=lambda label: ratios[label]["median"])
    quicker = [label for label in ordered if ratios[label]["q3"] < 1]
    slower = [label for label in ordered if ratios[label]["q1"] > 1]
    level = [label for label in ordered if label not in quicker and label not in slower]

    def listed(labels: list[str]) -> str:
        return ", ".join(f"`{label}` ({number(ratios[label]['median'])})" for label in labels) or "none"

    return [
        f"At {name}, forward and backward, `isqrt_cov` is slower than: {listed(quicker)}. In brackets: time "
        "of the method / time of `isqrt_cov`.",
        f"At {name}, `isqrt_cov` is as fast as: {listed(level)}; and faster than: {listed(slower)}.",
    ]


def _beside_the_paper(size: dict[str, Any]) -> list[str]:
    said = []
    for label, figures in size["entries"].items():
        theirs = times_isqrt_cov(label)
        if theirs is None or label == REFERENCE:
            continue
        ratio = figures["value_and_gradient"]["ratio"]
        sentence = (
            f"`{label}` takes {with_quartiles(**ratio)} times as long as `isqrt_cov`; the paper's ratio is "
            f"{number(theirs)}"
        )
        if (ratio["median"] < 1) != (theirs < 1):
            who = "slower here and faster" if theirs > 1 else "faster here and slower"
            sentence += f": `isqrt_cov` is {who} there"
        said.append(f"{sentence}.")
    return said


def _decompositions(size: dict[str, Any]) -> list[str]:
    said = []
    for name, figures in size["decompositions"].items():
        theirs = ", ".join(
            f"{number(milliseconds / LAYERS[REFERENCE].forward)} by {column}"
            for column, milliseconds in DECOMPOSITIONS[name].items()
        )
        said.append(
            f"`{name}` alone takes {with_quartiles(**figures['value']['ratio'])} times as long as the "
            f"forward pass of `isqrt_cov`; in the paper: {theirs}."
        )
    return said


def _training(steps: list[dict[str, Any]]) -> list[str]:
    said = []
    for count, words in (("one", "With one process"), ("two", "With two processes")):
        said.append(f"{words}, {_growth(steps, count)}")
        if RIVAL in steps[0][count]:
            said.append(f"{words}, {_gap(steps, count)}")
    said.append(f"Images/s of two processes divided by images/s of one: {_scaling(steps)}.")
    return said


def _growth(steps: list[dict[str, Any]], count: str) -> str:
    speeds = [_speed(step, count, REFERENCE) for step in steps]
    falls = [
        str(later["batch"])
        for later, speed, before in zip(steps[1:], speeds[1:], speeds[:-1], strict=True)
        if speed <= before
    ]
    grows = f"does not grow at batch size {', '.join(falls)}" if falls else "grows with every batch size"
    return f"the speed of `isqrt_cov` {grows}: {_from_to(steps, speeds, 'images/s')}."


def _gap(steps: list[dict[str, Any]], count: str) -> str:
    ratios = [step[count][RIVAL]["ratio"]["median"] for step in steps]
    gaps = [_speed(step, count, REFERENCE) - _speed(step, count, RIVAL) for step in steps]
    return (
        f"a training step with `{RIVAL}` takes {_range(ratios)} times as long as with `isqrt_cov`. The speed "
        f"of `isqrt_cov` minus that of `{RIVAL}` is {_from_to(steps, gaps, 'images/s')}. In the paper, it "
        f"{'is nearly the same at every batch size' if count == 'one' else 'grows with the batch size'}."
    )


def _scaling(steps: list[dict[str, Any]]) -> str:
    pools = steps[0]["two_over_one"]
    return ", ".join(
        f"`{pool}` {_range([step['two_over_one'][pool]['median'] for step in steps])}" for pool in pools
    )


def _speed(step: dict[str, Any], count: str, pool: str) -> float:
    speed: float = step["batch"] / step[count][pool]["seconds"]["median"]
    return speed


def _from_to(steps: list[dict[str, Any]], values: list[float], unit: str) -> str:
    first, last = steps[0]["batch"], steps[-1]["batch"]
    if first == last:
        return f"{values[0]:z.1f} {unit} at batch size {first}"
    return f"{values[0]:z.1f} {unit} at batch size {first} and {values[-1]:z.1f} at {last}"


def _range(values: list[float]) -> str:
    low, high = number(min(values)), number(max(values))
    return low if low == high else f"{low} to {high}"


def render(path: Path) -> list[Path]:
    """Write the page (``.md``) and the figure (``.png``) next to a results JSON, and return both paths."""
    results = read_record(path, SUITE)
    page, figure = path.with_suffix(".md"), path.with_suffix(".png")
    draw(results, figure)
    page.write_text(markdown(results, figure.name), encoding="utf-8")
    return [page, figure]


def write_pages(file: Path | None = None) -> list[Path]:
    """Write the page and the figure of results.

    Args:
        file: results of ``python -m lab bench``; the committed ones if not given.
    """
    return render(file or committed_file(SUITE))
