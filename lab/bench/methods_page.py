"""Write the page and figure of results of ``python -m lab bench``: ``python -m lab figures methods FILE``.

The page has the tables that ``python -m lab bench`` prints, and sentences that compare them with the paper.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    "An iteration of Newton-Schulz is a few products of matrices. A GPU runs the products of a whole "
    "batch at its full rate. A symmetric eigensolver or an SVD is a long sequence of small steps, each "
    "waiting for the one before: half the work of reducing a matrix to tridiagonal form is limited by "
    "memory and not by arithmetic, and the QR or divide-and-conquer iterations after it are serial. There "
    "a GPU idles, and the paper's table shows Matlab's function for CPUs ahead of both for GPUs. On a "
    "CPU, LAPACK works on a matrix of 256×256 at a good fraction of the speed of products, so that a "
    "method by eigendecomposition is close, and may win. In favour of `isqrt_cov` here is the side it "
    "works on: where there are fewer positions than channels, as the 169 of 13x13 and the 196 of 14x14 are "
    "fewer than 256, it iterates on the smaller matrix of positions, which the paper's does not."
)


def markdown(results: Results, plot: str) -> str:
    """Return the page."""
    title, origin, how_to_read, *tables = sections(results)
    figure = f"![Time and memory of every method over isqrt_cov, and speed of training]({plot})"
    parts = [title, origin, how_to_read, figure]
    parts += ["## What follows", "\n".join(f"- {sentence}" for sentence in verdicts(results))]
    if results["device"] == "cpu":
        parts += ["## Why a GPU differs", WHY_A_GPU_DIFFERS]
    return "\n\n".join([*parts, *tables, "## Methods", _methods(results)]) + "\n"


def _methods(results: Results) -> str:
    entries = results["arguments"]["entries"].values()
    summaries = {entry["method"]: entry["summary"] for entry in entries}
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
    """List faster, level and slower methods; a method is level if its quartiles are on both sides of 1."""
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
        f"At {name}, with gradient, `isqrt_cov` is slower than: {listed(quicker)}. In brackets, their time "
        "over its own.",
        f"At {name} it is level with: {listed(level)}; and faster than: {listed(slower)}.",
    ]


def _beside_the_paper(size: dict[str, Any]) -> list[str]:
    said = []
    for label, figures in size["entries"].items():
        theirs = times_isqrt_cov(label)
        if theirs is None or label == REFERENCE:
            continue
        ratio = figures["value_and_gradient"]["ratio"]
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
    for name, figures in size["decompositions"].items():
        theirs = ", ".join(
            f"{number(milliseconds / LAYERS[REFERENCE].forward)} by {column}"
            for column, milliseconds in DECOMPOSITIONS[name].items()
        )
        said.append(
            f"`{name}` alone takes {with_quartiles(**figures['value']['ratio'])} times as long as the value "
            f"of `isqrt_cov`; in the paper: {theirs}."
        )
    return said


def _training(steps: list[dict[str, Any]]) -> list[str]:
    said = []
    for count, words in (("one", "On one process"), ("two", "On two processes")):
        said.append(f"{words} {_growth(steps, count)}")
        if RIVAL in steps[0][count]:
            said.append(f"{words} {_gap(steps, count)}")
    said.append(f"Two processes over one, images per second: {_scaling(steps)}.")
    return said


def _growth(steps: list[dict[str, Any]], count: str) -> str:
    speeds = [_speed(step, count, REFERENCE) for step in steps]
    falls = [
        str(later["batch"])
        for later, speed, before in zip(steps[1:], speeds[1:], speeds[:-1], strict=True)
        if speed <= before
    ]
    grows = f"does not grow at a batch of {', '.join(falls)}" if falls else "grows with every batch size"
    return f"the speed of `isqrt_cov` {grows}: {_from_to(steps, speeds, 'images per second')}."


def _gap(steps: list[dict[str, Any]], count: str) -> str:
    ratios = [step[count][RIVAL]["ratio"]["median"] for step in steps]
    gaps = [_speed(step, count, REFERENCE) - _speed(step, count, RIVAL) for step in steps]
    return (
        f"a step with `{RIVAL}` takes {_range(ratios)} times that with `isqrt_cov`; the gap between their "
        f"speeds (positive where `isqrt_cov` leads) is {_from_to(steps, gaps, 'images per second')}; in the "
        f"paper it {'is nearly the same at every batch size' if count == 'one' else 'grows with the batch'}."
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
        return f"{values[0]:.1f} {unit} at a batch of {first}"
    return f"{values[0]:.1f} {unit} at a batch of {first}, {values[-1]:.1f} at {last}"


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
