"""The report of the benchmark: our measurements next to the paper's Table 2 and Figure 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from covpool.provenance import Results
from lab.bench.layers import MIB


class PaperLayer(NamedTuple):
    """A row of Table 2(a): milliseconds per image, forward and backward, and forward alone; megabytes."""

    both: float
    forward: float
    memory: float | None = None


# The size that the paper's table uses: AlexNet's features.
PAPER_SIZE = "13x13"

# Table 2(a), by the label of our entry. The two rows of improved B-CNN without memory are from the text.
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

# Table 2(b): milliseconds per matrix of 256×256, by platform.
DECOMPOSITIONS = {
    "eigh": {"cuSOLVER": 21.3, "Matlab on the CPU": 1.8, "Matlab on the GPU": 9.8},
    "svd": {"cuSOLVER": 52.2, "Matlab on the CPU": 4.1, "Matlab on the GPU": 11.9},
}

# Figure 3 shows no values. The text describes it as follows:
FIGURE_3 = (
    "with one GPU, the difference in speed of iSQRT-COV and MPN-COV is nearly the same at every batch size. "
    "With two GPUs, it grows with the batch size: the speed of iSQRT-COV keeps growing, while that of "
    "MPN-COV tends to saturate above 512 images"
)


def times_isqrt_cov(label: str) -> float | None:
    """Return the paper's time of an entry relative to iSQRT-COV with five steps; ``None`` if it has none."""
    layer = LAYERS.get(label)
    return None if layer is None else layer.both / LAYERS["isqrt_cov"].both


HOW_TO_READ = (
    "Compare the ratios, not the times: other programs may have used the machine. A round runs every method "
    "once, in shuffled order, and ratios are taken within a round. Values are medians over rounds, with "
    "quartiles in brackets. `isqrt_cov` has 5 steps here. The paper's times are from a Titan Xp GPU, with "
    "CUDA 8 and Matlab 2015b."
)
ONE_DECOMPOSITION = (
    "All methods here decompose matrices by `eigh`, for symmetric matrices. The paper uses SVD for improved "
    "B-CNN and G²DeNet. The two rows of improved B-CNN with a forward pass by SVD are the same computation "
    "here, because both gradients use the eigenvalues of the forward pass."
)
DECOMPOSITIONS_ALONE = (
    "The gradient of the decomposition is that of torch. These covariances have many zero eigenvalues, so "
    "the values of this gradient are meaningless, but its time is valid."
)
FIGURE_3_SETUP = (
    "A training step has a forward pass, the loss, a backward pass and SGD with momentum, on random images. "
    "With one process, it computes the complete batch. With two, each computes half of it, with "
    "DistributedDataParallel and gloo. Every process has one thread, so the columns differ only in the "
    "number of processes. `gap` is the network with average pooling. Its hidden layer has 256 inputs "
    "instead of 32,896, so the network is much smaller."
)


def sections(results: Results) -> list[str]:
    """Return the report in parts: machine and code, how to read it, then a heading and a table each."""
    parts = [f"# Pooling methods on {machine_words(results)}", _origin(results), HOW_TO_READ]
    for name, size in results["layers"].items():
        parts += [f"## Table 2(a): single layers at {_size_words(name, size)}", _layers(name, size)]
    if results["layers"]:
        parts.append(ONE_DECOMPOSITION)
        parts += ["## Table 2(b): decompositions alone", _decompositions(results["layers"])]
        parts.append(DECOMPOSITIONS_ALONE)
    if results["training"] is not None:
        parts += ["## Figure 3: steps of training", _training(results["training"])]
    return parts


def report(results: Results) -> str:
    """Return the report for a terminal: the columns of its tables are aligned."""
    return aligned("\n\n".join(sections(results)))


def _origin(results: Results) -> str:
    dtype = results["arguments"]["dtype"]
    return f"{source_words(results)}, {dtype}, seed {results['seed']}, {results['date'][:10]}."


def _layers(name: str, size: dict[str, Any]) -> str:
    """Return the table of one size, fastest first. The paper has values for one size."""
    batch, with_paper = size["batch"], name == PAPER_SIZE
    titles = [
        "method",
        "ms per image, forward and backward (forward alone)",
        "time / time of `isqrt_cov`",
        "MiB per image saved for backward",
    ]
    paper_titles = ["paper: ms (forward alone)", "paper: time / time of iSQRT-COV", "paper: MB"]
    rows = []
    for label, figures in sorted(size["entries"].items(), key=lambda item: _seconds(item[1])):
        row = [
            f"`{label}`",
            _milliseconds(figures, batch),
            with_quartiles(**figures["value_and_gradient"]["ratio"]),
            f"{figures['bytes_kept_per_image'] / MIB:.2f}",
        ]
        rows.append(row + _paper_cells(label) if with_paper else row)
    kept = "Memory saved for backward excludes the features and the parameters of the layer."
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
        "covariances of features",
        "algorithm",
        "ms per matrix, forward and backward (forward alone)",
        "time / time of the layer `isqrt_cov`, forward and backward",
        "the same, forward alone",
        "MiB per matrix saved for backward",
        *(f"paper: {column}, ms" for column in columns),
    ]
    rows = []
    for name, size in sizes.items():
        for algorithm, figures in size["decompositions"].items():
            rows.append(
                [
                    _size_words(name, size),
                    f"`{algorithm}`",
                    _milliseconds(figures, size["batch"]),
                    with_quartiles(**figures["value_and_gradient"]["ratio"]),
                    with_quartiles(**figures["value"]["ratio"]),
                    f"{figures['bytes_kept_per_image'] / MIB:.2f}",
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
        titles += [f"{words}: images/s", f"{words}: time of a step / time with `isqrt_cov`"]
    titles.append("images/s of two processes / images/s of one")
    rows = []
    for steps in training["steps"]:
        for pool, two_over_one in steps["two_over_one"].items():
            cells = [str(steps["batch"]), f"`{pool}`"]
            for count in ("one", "two"):
                timing = steps[count][pool]
                cells += [_images_per_second(steps["batch"], timing), with_quartiles(**timing["ratio"])]
            rows.append([*cells, with_quartiles(**two_over_one)])
    network = (
        f"{training['network']} at {training['image_size']} px with {training['classes']:,} classes. "
        f"{FIGURE_3_SETUP}"
    )
    said = f"The paper's figure shows no numbers. Its text says: {FIGURE_3}."
    return f"{network}\n\n{said}\n\n{table(titles, rows)}"


def _images_per_second(batch: int, timing: dict[str, Any]) -> str:
    seconds = timing["seconds"]
    # The fastest step gives the highest speed, so the quartiles swap.
    return with_quartiles(batch / seconds["median"], batch / seconds["q3"], batch / seconds["q1"])


def _size_words(name: str, size: dict[str, Any]) -> str:
    return f"{name} ({size['channels']}×{size['positions']}, batch {size['batch']})"


def _seconds(figures: dict[str, Any]) -> float:
    median: float = figures["value_and_gradient"]["seconds"]["median"]
    return median


def _milliseconds(figures: dict[str, Any], batch: int) -> str:
    """Format the milliseconds per image with gradient, and of the value alone in brackets."""
    both, value = (
        figures[measure]["seconds"]["median"] / batch * 1e3 for measure in ("value_and_gradient", "value")
    )
    return f"{_fine(both)} ({_fine(value)})"


def _fine(value: float) -> str:
    return f"{value:.3f}" if value < 0.1 else number(value)


def machine_words(results: Mapping[str, Any]) -> str:
    """Return a short description of the machine."""
    machine = results["machine"]
    if machine["gpu"] is not None:
        return str(machine["gpu"])
    amx = " with AMX" if "amx_tile" in machine["flags"] else ""
    return f"{machine['cores']} core{'s' if machine['cores'] > 1 else ''} of {machine['cpu']}{amx}"


def source_words(results: Results) -> str:
    """Return a short description of the code version, torch and the threads."""
    source, versions = results["source"], results["versions"]
    commit = source["commit"][:12] if source["commit"] else "none"
    changed = " with uncommitted changes" if source["dirty"] else ""
    return (
        f"covpool {versions['covpool']} (commit {commit}{changed}), torch {versions['torch']}, "
        f"{results['machine']['threads']} threads"
    )


def table(titles: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def aligned(markdown: str) -> str:
    """Return the page with aligned table columns, for a terminal."""
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
    lines = []
    for row in rows:
        ruled = set(row) == {"---"}
        cells = ["-" * width if ruled else cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def with_quartiles(median: float, q1: float, q3: float) -> str:
    """Format a median, with its quartiles in brackets."""
    if q1 == q3:
        return number(median)
    return f"{number(median)} [{number(q1)}, {number(q3)}]"


def number(value: float) -> str:
    """Format a value with three significant digits, without an exponent."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
