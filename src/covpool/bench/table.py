"""The page of the benchmark as Markdown: our measurements next to the paper's, and conclusions."""

from __future__ import annotations

from typing import Any

from covpool.bench.layers import MIB
from covpool.bench.verdicts import (
    DECOMPOSITIONS,
    FIGURE_3,
    LAYERS,
    PAPER_SIZE,
    number,
    times_isqrt_cov,
    verdicts,
    with_quartiles,
)
from covpool.provenance.origin import Results

HOW_TO_READ = (
    "The times are those of a machine that others may share: what to read are the ratios. They are taken "
    "within rounds, in which everything runs once in shuffled order, and are given as medians, with "
    "quartiles in brackets. `isqrt_cov` is that with 5 steps. The paper's times are of a Titan Xp, with "
    "CUDA 8 and Matlab 2015b."
)
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
ONE_DECOMPOSITION = (
    "All decompositions within methods are by `eigh`, that of a symmetric matrix, where the paper's rows of "
    "improved B-CNN and G²DeNet are by SVD. Of improved B-CNN the two rows with a forward pass by SVD are "
    "one computation here: the eigenvalues of the value serve either gradient."
)
DECOMPOSITIONS_ALONE = (
    "With gradient, the decomposition is differentiated by torch; of covariances with as many zero "
    "eigenvalues as these its numbers are meaningless, its time is not."
)
FIGURE_3_SETUP = (
    "Forward, loss, backward and SGD with momentum, on random images. One process takes the whole batch "
    "while the other waits; two take half each, joined by gloo and DistributedDataParallel. Every process "
    "has one thread, so that two columns differ in the number of processes alone. `gap` is the network "
    "without second-order pooling: its hidden layer reads 256 numbers and not 32,896, and it is much "
    "smaller for it."
)


def markdown(results: Results, plot: str | None = None) -> str:
    """The whole report."""
    parts = [f"# Pooling methods on {machine_words(results)}", _origin(results), HOW_TO_READ]
    if plot is not None:
        parts.append(f"![Time and memory of every method over isqrt_cov, and speed of training]({plot})")
    parts += ["## What follows", "\n".join(f"- {sentence}" for sentence in verdicts(results))]
    if results["device"] == "cpu":
        parts += ["## Why a GPU differs", WHY_A_GPU_DIFFERS]
    for name, size in results["layers"].items():
        parts += [f"## Table 2(a): single layers at {_size_words(name, size)}", _layers(name, size)]
    if results["layers"]:
        parts.append(ONE_DECOMPOSITION)
        parts += ["## Table 2(b): decompositions alone", _decompositions(results["layers"])]
        parts.append(DECOMPOSITIONS_ALONE)
    if results["training"] is not None:
        parts += ["## Figure 3: steps of training", _training(results["training"])]
    parts += ["## Methods", _methods(results)]
    return "\n\n".join(parts) + "\n"


def _origin(results: Results) -> str:
    dtype = results["arguments"]["dtype"]
    return f"{source_words(results)}, {dtype}, seed {results['seed']}, {results['date'][:10]}."


def _layers(name: str, size: dict[str, Any]) -> str:
    """Quickest first. The paper's figures are for one size."""
    batch, with_paper = size["batch"], name == PAPER_SIZE
    titles = ["method", "ms an image, with gradient (value alone)", "times `isqrt_cov`", "MiB kept an image"]
    paper_titles = ["paper: ms (forward)", "paper: times iSQRT-COV", "paper: MB"]
    rows = []
    for label, found in sorted(size["entries"].items(), key=lambda item: _seconds(item[1])):
        row = [
            f"`{label}`",
            _milliseconds(found, batch),
            with_quartiles(**found["value_and_gradient"]["ratio"]),
            f"{found['bytes_kept_per_image'] / MIB:.2f}",
        ]
        rows.append(row + _paper_cells(label) if with_paper else row)
    kept = "Kept: what autograd holds for the gradient, besides the features and a layer's own parameters."
    return f"{kept}\n\n{table(titles + paper_titles if with_paper else titles, rows)}"


def _paper_cells(label: str) -> list[str]:
    theirs, times = LAYERS.get(label), times_isqrt_cov(label)
    if theirs is None or times is None:
        return ["", "", ""]
    memory = "" if theirs.memory is None else f"{theirs.memory:g}"
    return [f"{theirs.both:g} ({theirs.forward:g})", number(times), memory]


def _decompositions(sizes: dict[str, Any]) -> str:
    columns = list(DECOMPOSITIONS["eigh"])
    titles = [
        "of the covariances at",
        "algorithm",
        "ms a matrix, with gradient (value alone)",
        "times the layer `isqrt_cov`, with gradient",
        "value alone",
        "MiB kept a matrix",
        *(f"paper: {column}, ms" for column in columns),
    ]
    rows = []
    for name, size in sizes.items():
        for algorithm, found in size["decompositions"].items():
            rows.append(
                [
                    _size_words(name, size),
                    f"`{algorithm}`",
                    _milliseconds(found, size["batch"]),
                    with_quartiles(**found["value_and_gradient"]["ratio"]),
                    with_quartiles(**found["value"]["ratio"]),
                    f"{found['bytes_kept_per_image'] / MIB:.2f}",
                    *(
                        f"{DECOMPOSITIONS[algorithm][column]:g}" if name == PAPER_SIZE else ""
                        for column in columns
                    ),
                ]
            )
    return table(titles, rows)


def _training(training: dict[str, Any]) -> str:
    titles = ["batch", "pooling"]
    for words in ("one process", "two processes"):
        titles += [f"{words}: images/s", "step over that of `isqrt_cov`"]
    titles.append("speed of two over one")
    rows = []
    for steps in training["steps"]:
        for pool, two_over_one in steps["two_over_one"].items():
            cells = [str(steps["batch"]), f"`{pool}`"]
            for count in ("one", "two"):
                timing = steps[count][pool]
                cells += [_images_per_second(steps["batch"], timing), with_quartiles(**timing["ratio"])]
            rows.append([*cells, with_quartiles(**two_over_one)])
    network = (
        f"{training['network']} at {training['image_size']} pixels with {training['classes']} classes. "
        f"{FIGURE_3_SETUP}"
    )
    said = f"The paper's figure is a picture without numbers; its text says: {FIGURE_3}."
    return f"{network}\n\n{said}\n\n{table(titles, rows)}"


def _images_per_second(batch: int, timing: dict[str, Any]) -> str:
    seconds = timing["seconds"]
    # The quickest step is the highest speed.
    return with_quartiles(batch / seconds["median"], batch / seconds["q3"], batch / seconds["q1"])


def _methods(results: Results) -> str:
    entries = results["arguments"]["entries"].values()
    summaries = {entry["method"]: entry["summary"] for entry in entries}
    return "\n".join(f"- `{name}`: {summary}" for name, summary in summaries.items())


def _size_words(name: str, size: dict[str, Any]) -> str:
    return f"{name} ({size['channels']}×{size['positions']}, batch {size['batch']})"


def _seconds(found: dict[str, Any]) -> float:
    median: float = found["value_and_gradient"]["seconds"]["median"]
    return median


def _milliseconds(found: dict[str, Any], batch: int) -> str:
    """Of an image: with gradient, and the value alone in brackets."""
    both, value = (
        found[measure]["seconds"]["median"] / batch * 1e3 for measure in ("value_and_gradient", "value")
    )
    return f"{_fine(both)} ({_fine(value)})"


def _fine(value: float) -> str:
    return f"{value:.3f}" if value < 0.1 else number(value)


def machine_words(results: Results) -> str:
    """The machine in a few words."""
    machine = results["machine"]
    if machine["gpu"] is not None:
        return str(machine["gpu"])
    amx = " with AMX" if "amx_tile" in machine["flags"] else ""
    return f"{machine['cores']} core{'s' if machine['cores'] > 1 else ''} of {machine['cpu']}{amx}"


def source_words(results: Results) -> str:
    """The code that was measured, and what it ran on."""
    source, versions = results["source"], results["versions"]
    commit = source["commit"][:12] if source["commit"] else "none"
    changed = " with uncommitted changes" if source["dirty"] else ""
    return (
        f"covpool {versions['covpool']} (commit {commit}{changed}), torch {versions['torch']}, "
        f"{results['machine']['threads']} threads"
    )


def table(titles: list[str], rows: list[list[str]]) -> str:
    """A table of Markdown."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def aligned(markdown: str) -> str:
    """The same page with the columns of its tables one below the other, for a terminal."""
    lines: list[str] = []
    rows: list[list[str]] = []
    for line in [*markdown.splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
            continue
        lines += _padded(rows)
        rows = []
        lines.append(line)
    return "\n".join(lines[:-1])


def _padded(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    made = []
    for row in rows:
        ruled = set(row) == {"---"}
        cells = ["-" * width if ruled else cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        made.append(f"| {' | '.join(cells)} |")
    return made
