"""Results as Markdown."""

from __future__ import annotations

from typing import Any

from covpool.bench.cells import machine_words, number, source_words, table, with_quartiles
from covpool.bench.contenders import MEASURES
from covpool.bench.results import Results
from covpool.bench.targets import MIB, TARGETS
from covpool.errors import UsageError

_MEASURE_TITLES = {"value_and_gradient": "Value and gradient", "value": "Value alone (no gradient kept)"}
_EXPLANATION = (
    "Times ours: the contender's time over that of `ours`, taken within each round, so that above 1 ours is "
    "faster and below 1 slower. Medians, with quartiles in brackets."
)


def markdown(results: Results, plot: str | None = None) -> str:
    """The whole report: where it comes from, the plot, targets, times, products, memory, error."""
    parts = [f"# {results['suite']} on {machine_words(results)}", _origin(results)]
    if plot is not None:
        parts.append(f"![Time of each contender as a multiple of ours]({plot})")
    parts += ["## Targets", _targets(results)]
    for measure in reversed(MEASURES):
        parts += [f"## {_MEASURE_TITLES[measure]}", _EXPLANATION, _ratios(results, measure)]
    parts += ["## Products, memory, error", _untimed(results)]
    parts += ["## Times in full", _times(results), "## Contenders", _contenders(results)]
    return "\n\n".join(parts) + "\n"


def summary(results: Results) -> str:
    """The few figures for a front page: value and gradient, our speed over each rival."""
    absent = {"plain", "eigh", "svd", "bare"} - set(results["arguments"]["contenders"])
    if absent:
        raise UsageError(f"the summary needs contenders that these results do not have: {sorted(absent)}")
    rows = []
    for name, size in results["sizes"].items():
        ratios = {
            contender: found["value_and_gradient"]["ratio"] for contender, found in size["contenders"].items()
        }
        speeds = [f"{number(ratios[rival]['median'])}x" for rival in ("plain", "eigh", "svd")]
        overhead = f"{number(1 / ratios['bare']['median'])}x"
        rows.append([_size_words(name, size), *speeds, overhead])
    titles = [
        "features (channels × positions)",
        "the paper's equations, written out",
        "`eigh` and its gradient",
        "`svd` and its gradient",
        "our time over its bare products",
    ]
    return (
        "Value and gradient of `isqrt_cov`: how many times faster than the same by other means, and how far "
        f"above the matrix products it cannot do without. {machine_words(results)}. {_origin(results)}\n\n"
        + table(titles, rows)
    )


def _origin(results: Results) -> str:
    arguments = results["arguments"]
    return (
        f"{source_words(results)}, {arguments['dtype']}, {arguments['steps']} steps, seed {results['seed']}, "
        f"{results['date'][:10]}."
    )


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
    """A row a size, a column a contender."""
    rivals = [name for name in results["arguments"]["contenders"] if name != "ours"]
    rows = []
    for name, size in results["sizes"].items():
        timings = {contender: found[measure] for contender, found in size["contenders"].items()}
        milliseconds = {key: value * 1e3 for key, value in timings["ours"]["seconds"].items()}
        ratios = [
            with_quartiles(**timings[contender]["ratio"]) if contender in timings else ""
            for contender in rivals
        ]
        rows.append([_size_words(name, size), with_quartiles(**milliseconds), *ratios])
    return table(["size", "ours, ms a batch", *rivals], rows)


def _times(results: Results) -> str:
    """Milliseconds of everything, and from how many rounds."""
    rows = []
    for name, size in results["sizes"].items():
        for contender, found in size["contenders"].items():
            cells = []
            for measure in MEASURES:
                milliseconds = {key: value * 1e3 for key, value in found[measure]["seconds"].items()}
                cells += [with_quartiles(**milliseconds), str(found[measure]["rounds"])]
            rows.append([_size_words(name, size), contender, *cells])
    titles = ["size", "contender", "value, ms a batch", "rounds", "with gradient, ms a batch", "rounds"]
    return table(titles, _without_repeats(rows))


def _untimed(results: Results) -> str:
    rows = []
    for name, size in results["sizes"].items():
        for contender, found in size["contenders"].items():
            products, kept, error = found["products"], found["bytes_kept_per_image"], found["error"]
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
        "MiB kept an image",
        "error of value",
        "error of gradient",
    ]
    return (
        "Error is the largest difference from `isqrt_cov` in float64, relative to the largest entry.\n\n"
        + table(titles, _without_repeats(rows))
    )


def _contenders(results: Results) -> str:
    summaries = {
        name: found["summary"]
        for size in results["sizes"].values()
        for name, found in size["contenders"].items()
    }
    return "\n".join(f"- `{name}`: {summary}" for name, summary in summaries.items())


def _size_words(name: str, size: dict[str, Any]) -> str:
    return f"{name} ({size['channels']}×{size['positions']}, batch {size['batch']})"


def _without_repeats(rows: list[list[str]]) -> list[list[str]]:
    """The size only in the first of its rows."""
    before = [None, *(row[0] for row in rows)]
    return [["", *row[1:]] if row[0] == last else row for row, last in zip(rows, before, strict=False)]
