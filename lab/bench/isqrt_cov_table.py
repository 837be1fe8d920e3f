"""Targets of ``isqrt_cov`` (value and gradient, 2 CPU cores, float32, 5 steps), and its results as Markdown.

The tables compare these targets with the measurements, and the slow tests assert them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from covpool.provenance import Results
from lab.bench.layers import MEASURES, MIB
from lab.bench.table import machine_words, number, source_words, table, with_quartiles

Quantity = Literal["speedup", "overhead", "cost", "memory"]


@dataclass(frozen=True)
class Target:
    """A bound on one figure at one size.

    Attributes:
        size: name of the size.
        quantity: ``"speedup"``: the contender's time over ours, at least the bound; ``"overhead"``: our time
            over the contender's, at most the bound; ``"cost"``: the contender's time over ours, at most the
            bound; ``"memory"``: MiB per image that the contender saves for backward, at most the bound.
        contender: name of the contender.
        bound: value to reach.
        limit: reason why the target is not reached, if it is not.
    """

    size: str
    quantity: Quantity
    contender: str
    bound: float
    limit: str = ""

    @property
    def label(self) -> str:
        """Return the quantity in words."""
        return {
            "speedup": f"speed over {self.contender}",
            "overhead": f"time over {self.contender}",
            "cost": f"{self.contender}: time over ours",
            "memory": f"{self.contender}: MiB per image kept for the gradient",
        }[self.quantity]

    @property
    def bound_text(self) -> str:
        """Return the bound as text for a table."""
        unit = " MiB" if self.quantity == "memory" else "x"
        return f"{'≥' if self.quantity == 'speedup' else '≤'} {self.bound:g}{unit}"

    def measured(self, size: dict[str, Any]) -> tuple[float, float, float] | None:
        """Return median and quartiles in the results of a size; None if the contender was not measured."""
        figures = size["contenders"].get(self.contender)
        if figures is None:
            return None
        if self.quantity == "memory":
            kept = figures["bytes_kept_per_image"] / MIB
            return kept, kept, kept
        ratio = figures["value_and_gradient"]["ratio"]
        if self.quantity == "overhead":
            return 1 / ratio["median"], 1 / ratio["q3"], 1 / ratio["q1"]
        return ratio["median"], ratio["q1"], ratio["q3"]

    def met(self, figure: float, margin: float = 0.0) -> bool:
        """Return whether a value reaches the bound within a relative margin (0.05 is 5 %)."""
        if self.quantity == "speedup":
            return figure >= self.bound * (1 - margin)
        return figure <= self.bound * (1 + margin)


_SIZES = ("14x14", "13x13", "7x7", "vit", "28x28")

_PRODUCTS = "the products alone take four fifths of the time; transposed sums between them take the rest"
_CALLS = "half the time is the cost of some 150 small calls, not of arithmetic"
_SUMS = "nine transposed sums of 256×256, whose stride of a power of two defeats the cache"

TARGETS = (
    Target("14x14", "speedup", "plain", 3.2, _PRODUCTS),
    Target("13x13", "speedup", "plain", 4.0, _PRODUCTS),
    Target("7x7", "speedup", "plain", 22.0, _CALLS),
    Target("vit", "speedup", "plain", 22.0),
    Target("28x28", "speedup", "plain", 1.9),
    Target("14x14", "overhead", "bare", 1.25),
    Target("28x28", "overhead", "bare", 1.25, _SUMS),
    *(Target(size, "speedup", "eigh", 1.0, _SUMS if size == "28x28" else "") for size in _SIZES),
    *(Target(size, "cost", "compiled", 1.0) for size in _SIZES),
    Target("14x14", "memory", "ours", 1.9),
    Target("14x14", "memory", "recompute", 0.5),
)


# The contender with the default steps, which the summary compares with the others.
DEFAULT = "fitted 3"
_MEASURE_TITLES = {"value_and_gradient": "Value and gradient", "value": "Value alone (no gradient kept)"}
_EXPLANATION = (
    "Times ours: the contender's time over that of `ours`, taken within each round, so that above 1 ours is "
    "faster and below 1 slower. Medians, with quartiles in brackets."
)


def markdown(results: Results, plot: str | None = None) -> str:
    """Return the whole report: origin, plot, targets, times, products, memory and error."""
    parts = [f"# {results['experiment']} on {machine_words(results)}", _origin(results)]
    if plot is not None:
        parts.append(f"![Time of each contender as a multiple of ours]({plot})")
    parts += ["## Targets", _targets(results)]
    for measure in reversed(MEASURES):
        parts += [f"## {_MEASURE_TITLES[measure]}", _EXPLANATION, _ratios(results, measure)]
    parts += ["## Products, memory, error", _untimed(results)]
    parts += ["## Times in full", _times(results), "## Contenders", _contenders(results)]
    return "\n\n".join(parts) + "\n"


def summary(results: Results) -> str:
    """Return a short table for a front page: speed of the default over each rival, value and gradient."""
    absent = {DEFAULT, "plain", "eigh", "svd", "bare"} - set(results["arguments"]["contenders"])
    if absent:
        raise ValueError(f"the summary needs contenders that these results do not have: {sorted(absent)}")
    rows = []
    for name, size in results["sizes"].items():
        ratios = {
            contender: figures["value_and_gradient"]["ratio"]["median"]
            for contender, figures in size["contenders"].items()
        }
        speeds = [f"{number(ratios[rival] / ratios[DEFAULT])}x" for rival in ("plain", "eigh", "svd", "ours")]
        rows.append([_size_words(name, size), *speeds, f"{number(1 / ratios['bare'])}x"])
    titles = [
        "features (channels × positions)",
        "the paper's equations, written out",
        "`eigh` and its gradient",
        "`svd` and its gradient",
        "covpool with the paper's 5 steps",
        "those 5 steps: time divided by the time of their matrix products alone (1 is the best possible)",
    ]
    words = (
        "Columns 2 to 5 show how many times faster a forward and backward pass of `isqrt_cov` is than other "
        "code. By default it has 3 steps with fitted coefficients; the paper has 5 steps. "
        f"{machine_words(results)}. {_origin(results)}"
    )
    return f"{words}\n\n{table(titles, rows)}"


def _origin(results: Results) -> str:
    arguments = results["arguments"]
    return f"{source_words(results)}, {arguments['dtype']}, seed {results['seed']}, {results['date'][:10]}."


def _targets(results: Results) -> str:
    rows = []
    for target in TARGETS:
        measured = target.measured(results["sizes"][target.size]) if target.size in results["sizes"] else None
        if measured is None:
            rows.append([target.size, target.label, target.bound_text, "", "not measured"])
            continue
        verdict = (
            "met" if target.met(measured[0]) else f"**not met**{': ' if target.limit else ''}{target.limit}"
        )
        rows.append([target.size, target.label, target.bound_text, with_quartiles(*measured), verdict])
    stated = "Stated for value and gradient on 2 CPU cores in float32 with 5 steps; judged by the median."
    return f"{stated}\n\n{table(['size', 'figure', 'target', 'measured', ''], rows)}"


def _ratios(results: Results, measure: str) -> str:
    """Return a table with a row per size and a column per contender."""
    rivals = [name for name in results["arguments"]["contenders"] if name != "ours"]
    rows = []
    for name, size in results["sizes"].items():
        timings = {contender: figures[measure] for contender, figures in size["contenders"].items()}
        milliseconds = {key: value * 1e3 for key, value in timings["ours"]["seconds"].items()}
        ratios = [
            with_quartiles(**timings[contender]["ratio"]) if contender in timings else ""
            for contender in rivals
        ]
        rows.append([_size_words(name, size), with_quartiles(**milliseconds), *ratios])
    return table(["size", "ours, ms per batch", *rivals], rows)


def _times(results: Results) -> str:
    """Return a table of all times in milliseconds, with the number of rounds."""
    rows = []
    for name, size in results["sizes"].items():
        for contender, figures in size["contenders"].items():
            cells = []
            for measure in MEASURES:
                milliseconds = {key: value * 1e3 for key, value in figures[measure]["seconds"].items()}
                cells += [with_quartiles(**milliseconds), str(figures[measure]["rounds"])]
            rows.append([_size_words(name, size), contender, *cells])
    titles = ["size", "contender", "value, ms per batch", "rounds", "with gradient, ms per batch", "rounds"]
    return table(titles, _without_repeats(rows))


def _untimed(results: Results) -> str:
    rows = []
    for name, size in results["sizes"].items():
        for contender, figures in size["contenders"].items():
            products, kept, error = figures["products"], figures["bytes_kept_per_image"], figures["error"]
            rows.append(
                [
                    _size_words(name, size),
                    contender,
                    f"{products['value']} / {products['value_and_gradient']}" if products else "",
                    "" if kept is None else f"{kept / MIB:.2f}",
                    f"{error['value']:.1e}" if error else "",
                    f"{error['gradient']:.1e}" if error else "",
                ]
            )
    titles = [
        "size",
        "contender",
        "products (value / with gradient)",
        "MiB kept per image",
        "error of value",
        "error of gradient",
    ]
    return (
        "Error is the largest difference from `isqrt_cov` in float64, relative to the largest entry.\n\n"
        + table(titles, _without_repeats(rows))
    )


def _contenders(results: Results) -> str:
    summaries = {
        name: figures["summary"]
        for size in results["sizes"].values()
        for name, figures in size["contenders"].items()
    }
    return "\n".join(f"- `{name}`: {summary}" for name, summary in summaries.items())


def _size_words(name: str, size: dict[str, Any]) -> str:
    return f"{name} ({size['channels']}×{size['positions']}, batch {size['batch']})"


def _without_repeats(rows: list[list[str]]) -> list[list[str]]:
    """Return the rows with the size only in the first row of each size."""
    before = [None, *(row[0] for row in rows)]
    return [["", *row[1:]] if row[0] == last else row for row, last in zip(rows, before, strict=False)]
