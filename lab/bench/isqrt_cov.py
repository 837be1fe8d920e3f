"""Benchmark ``isqrt_cov`` against the alternatives: time, memory, number of products, rounding error.

    python -m lab isqrt_cov            # about half an hour on two cores; rerun it to resume
    python -m lab figures isqrt_cov    # page, figure and summary from results

It writes ``results/<version>/isqrt_cov--<machine>--<device>.json`` with a page and a figure next to it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor

from covpool.device import chosen_device
from covpool.functional import isqrt_cov
from covpool.terminal import Progress
from lab.bench.bare_engine import BARE, recorded_products
from lab.bench.contenders import (
    BFLOAT16,
    COMPILED,
    EIGH,
    FITTED_3,
    FITTED_4,
    FLOAT16,
    OURS,
    PLAIN,
    RECOMPUTE,
    SVD,
    Contender,
    Prepared,
    value_and_gradient,
)
from lab.bench.isqrt_cov_plot import draw
from lab.bench.isqrt_cov_table import markdown, summary
from lab.bench.layers import MEASURES, Problem, Size, bytes_kept_for_backward, chosen_sizes
from lab.bench.timing import MakeProgress, Schedule, rounded, silence, time_interleaved, timing_figures
from lab.record import (
    RESULTS,
    ROOT,
    SAME,
    committed_file,
    new_record,
    read_record,
    record_file,
    resumed,
    with_block,
    write_record,
)

SUITE = "isqrt_cov"
CONTENDERS = {
    contender.name: contender
    for contender in (
        OURS,
        FITTED_3,
        FITTED_4,
        COMPILED,
        RECOMPUTE,
        BFLOAT16,
        FLOAT16,
        PLAIN,
        EIGH,
        SVD,
        BARE,
    )
}
# Code that a result depends on, relative to the package. A resumed run must have the same code.
SOURCES = ("functional", "lab/bench")

log = logging.getLogger(__name__)


def run_isqrt_cov(
    out: str | Path = RESULTS,
    *,
    sizes: Iterable[str | Size] | None = None,
    batch: int | None = None,
    steps: int = 5,
    contenders: Collection[str] | None = None,
    schedule: Schedule | None = None,
    device: str = "cpu",
    seed: int = 0,
    again: bool = False,
    progress: MakeProgress = silence,
) -> Path:
    """Measure every size, and write the results after each.

    Args:
        out: results folder; the file is ``<out>/<version>/isqrt_cov--<machine>--<device>.json``.
        sizes: names in :data:`lab.bench.SIZES`, ``"C:n"``, or sizes; all named ones if None.
        batch: images per batch; the size's own if None.
        steps: number of Newton-Schulz steps.
        contenders: names in :data:`CONTENDERS`; all if None. ``"ours"`` is always measured.
        schedule: rounds and warm-up.
        device: ``"cpu"`` or ``"cuda"``.
        seed: seed of the features, the upstream gradient and the order within rounds.
        again: measure all sizes; otherwise those that an earlier run finished are kept. Raise if its code or
            arguments differ.
        progress: function that makes a progress listener for each part.

    Returns:
        The path of the JSON file.
    """
    chosen = chosen_sizes(sizes, batch)
    selected = _selected(contenders)
    schedule = schedule or Schedule()
    chosen_device(device)
    arguments = {
        "sizes": [size.name for size in chosen],
        "contenders": [contender.name for contender in selected],
        "steps": steps,
        "dtype": "float32",
        "schedule": asdict(schedule),
    }
    results = new_record(SUITE, SOURCES, arguments, device=device, seed=seed) | {"sizes": {}}
    path = record_file(results, out)
    # The list of sizes may differ from that of an earlier run.
    same = (*SAME, "contenders", "steps", "dtype", "schedule")
    results = resumed(results, path, same=same, again=again)
    for size in chosen:
        if size.is_that_of(results["sizes"].get(size.name)):
            log.info("%s: already measured", size.name)
            continue
        log.info("%s: %d channels, %d positions", size.name, size.channels, size.positions)
        problem = Problem(size, steps=steps, seed=seed, device=device)
        results["sizes"][size.name] = measure(problem, selected, schedule, progress)
        write_record(path, results)
    return path


def measure(
    problem: Problem, contenders: list[Contender], schedule: Schedule, progress: MakeProgress = silence
) -> dict[str, Any]:
    """Measure all contenders at one size."""
    prepared = {contender.name: contender.prepare(problem) for contender in contenders}
    exact = float64_reference(problem)
    measured = {
        contender.name: _untimed(contender, prepared[contender.name], problem, exact)
        for contender in contenders
    }
    for what in MEASURES:
        runs = {name: getattr(ready, what) for name, ready in prepared.items()}
        with progress(f"rounds at {problem.size.name}, {what.replace('_', ' ')}") as show:
            timings = time_interleaved(
                runs,
                reference=OURS.name,
                schedule=schedule,
                seed=problem.seed,
                device=problem.device,
                log=show,
            )
        for name, timing in timings.items():
            measured[name][what] = timing_figures(timing)
            milliseconds, ratio = timing.seconds.median * 1e3, timing.ratio.median
            log.info("  %s %s: %.1f ms, %.2f times ours", what, name, milliseconds, ratio)
    size = problem.size
    return {
        "channels": size.channels,
        "positions": size.positions,
        "batch": size.batch,
        "contenders": measured,
    }


def _selected(names: Collection[str] | None) -> list[Contender]:
    unknown = set(names or ()) - set(CONTENDERS)
    if unknown:
        listed = ", ".join(CONTENDERS)
        raise ValueError(f"contenders must be among {listed}; got {', '.join(sorted(unknown))}")
    return [
        contender
        for name, contender in CONTENDERS.items()
        if names is None or name in names or contender is OURS
    ]


def _untimed(contender: Contender, ready: Prepared, problem: Problem, exact: Reference) -> dict[str, Any]:
    """Measure products, memory and error, without timing."""
    products = kept = error = None
    if contender.dispatches_products:
        products = {what: len(recorded_products(getattr(ready, what))) for what in MEASURES}
    if ready.pool is not None:
        kept = bytes_kept_for_backward(ready.pool, problem.features) / problem.size.batch
        if contender.same_iteration:
            error = relative_errors(ready.pool, problem, exact)
            error = {name: rounded(value) for name, value in error.items()}
    return {
        "summary": contender.summary,
        "products": products,
        "bytes_kept_per_image": kept,
        "error": error,
    }


class Reference(NamedTuple):
    """Value and gradient of ``isqrt_cov`` in float64 on the same features."""

    value: Tensor
    gradient: Tensor


def float64_reference(problem: Problem) -> Reference:
    """Return the value and gradient that errors are measured against."""
    pool = partial(isqrt_cov, iteration="paper", steps=problem.steps)
    return Reference(*value_and_gradient(pool, problem.features.double(), problem.upstream.double()))


def relative_errors(pool: Callable[[Tensor], Tensor], problem: Problem, exact: Reference) -> dict[str, float]:
    """Return the largest difference in the batch, relative to the largest entry, of value and gradient."""
    results = value_and_gradient(pool, problem.features, problem.upstream)
    return {
        name: float((result.double() - reference).abs().max() / reference.abs().max())
        for name, result, reference in zip(("value", "gradient"), results, exact, strict=True)
    }


def render(path: str | Path) -> list[Path]:
    """Write the page (``.md``) and the figure (``.png``) next to a results JSON, and return both paths."""
    path = Path(path)
    results = read_record(path, SUITE)
    page, figure = path.with_suffix(".md"), path.with_suffix(".png")
    draw(results, figure)
    page.write_text(markdown(results, figure.name), encoding="utf-8")
    return [page, figure]


def summary_into(page: str | Path, path: str | Path) -> Path:
    """Write the summary of a results JSON between the two marks of a Markdown page."""
    page = Path(page)
    text = with_block(page.read_text(encoding="utf-8"), "benchmark", summary(read_record(path)))
    page.write_text(text, encoding="utf-8")
    return page


def main(
    out: Path = RESULTS,
    sizes: tuple[str, ...] | None = None,
    batch: int | None = None,
    rounds: int = 30,
    compiled: bool = True,
    device: Literal["cpu", "cuda"] = "cpu",
    seed: int = 0,
    again: bool = False,
) -> list[Path]:
    """Compare isqrt_cov with eigh, svd, the paper's equations and bare products: time, memory, error.

    It takes about half an hour on two cores. Rerun the command to resume. It also writes a page and a figure.

    Args:
        out: results folder.
        sizes: feature sizes: 13x13, 14x14, 7x7, vit, 28x28, or channels and positions, as 64:49; all named
            ones if not given.
        batch: images per batch; the size's own if not given.
        rounds: timed rounds.
        compiled: measure torch.compile too.
        device: device.
        seed: random seed.
        again: measure again what an earlier run has measured.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    path = run_isqrt_cov(
        out,
        sizes=sizes,
        batch=batch,
        contenders=[name for name in CONTENDERS if name != COMPILED.name or compiled],
        schedule=Schedule(rounds=rounds),
        device=device,
        seed=seed,
        again=again,
        progress=Progress,
    )
    written = [path, *render(path)]
    print(*written, sep="\n")
    return written


def write_pages(file: Path | None = None, page: Path = ROOT / "docs" / "benchmarks.md") -> list[Path]:
    """Write the page and the figure of results, and their summary in another page.

    Args:
        file: results of ``python -m lab isqrt_cov``; the committed ones if not given.
        page: Markdown page with benchmark marks.
    """
    file = file or committed_file(SUITE)
    return [*render(file), summary_into(page, file)]
