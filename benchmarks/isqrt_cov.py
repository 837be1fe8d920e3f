"""Benchmark ``isqrt_cov`` against the alternatives: time, memory, number of products, rounding error.

    python -m benchmarks.isqrt_cov                                  # about half an hour on two cores
    python -m benchmarks.isqrt_cov --resume                         # keep the sizes that are done
    python -m benchmarks.isqrt_cov --render FILE --page README.md   # page, figure and summary from results

It writes ``results/<version>/isqrt_cov--<machine>--<device>.json`` with a page and a figure next to it.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from benchmarks.bare_engine import BARE, recorded_products
from benchmarks.contenders import (
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
from benchmarks.isqrt_cov_plot import draw
from benchmarks.isqrt_cov_table import markdown, summary
from covpool.bench.layers import MEASURES, Problem, Size, bytes_kept_for_backward, chosen_sizes
from covpool.bench.timing import MakeProgress, Schedule, rounded, silence, time_interleaved, timing_figures
from covpool.device import chosen_device
from covpool.durable import replace_file
from covpool.functional import isqrt_cov
from covpool.provenance.origin import Results, check_schema, new_results, results_path
from covpool.terminal import Progress

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
SOURCES = ("functional", "bench", "../../benchmarks")
BEGIN, END = "<!-- benchmark:begin -->", "<!-- benchmark:end -->"

log = logging.getLogger(__name__)


def run_isqrt_cov(
    out: str | Path = "results",
    *,
    sizes: Iterable[str | Size] | None = None,
    batch: int | None = None,
    steps: int = 5,
    contenders: Collection[str] | None = None,
    schedule: Schedule | None = None,
    device: str = "cpu",
    seed: int = 0,
    resume: bool = False,
    progress: MakeProgress = silence,
) -> Path:
    """Measure every size, and write the results after each.

    Args:
        out: results folder; the file is ``<out>/<version>/isqrt_cov--<machine>--<device>.json``.
        sizes: names in :data:`covpool.bench.SIZES`, ``"C:n"``, or sizes; all named ones if None.
        batch: images per batch; the size's own if None.
        steps: number of Newton-Schulz steps.
        contenders: names in :data:`CONTENDERS`; all if None. ``"ours"`` is always measured.
        schedule: rounds and warm-up.
        device: ``"cpu"`` or ``"cuda"``.
        seed: seed of the features, the upstream gradient and the order within rounds.
        resume: keep the sizes that an earlier run finished; raise if its code or arguments differ.
        progress: function that makes a progress listener for each part.

    Returns:
        The path of the JSON file.
    """
    wanted = chosen_sizes(sizes, batch)
    selected = _selected(contenders)
    schedule = schedule or Schedule()
    chosen_device(device)
    arguments = {
        "sizes": [size.name for size in wanted],
        "contenders": [contender.name for contender in selected],
        "steps": steps,
        "dtype": "float32",
        "schedule": asdict(schedule),
    }
    results: Results = {"suite": SUITE, **new_results(SOURCES, arguments, device, seed), "sizes": {}}
    path = results_path(out, SUITE, results)
    if resume and path.exists():
        results["sizes"] = _finished(path, results)
    for size in wanted:
        if _same_shape(results["sizes"].get(size.name), size):
            log.info("%s: already measured", size.name)
            continue
        log.info("%s: %d channels, %d positions", size.name, size.channels, size.positions)
        problem = Problem(size, steps=steps, seed=seed, device=device)
        results["sizes"][size.name] = measure(problem, selected, schedule, progress)
        write_results(path, results)
    return path


def measure(
    problem: Problem, contenders: list[Contender], schedule: Schedule, progress: MakeProgress = silence
) -> dict[str, Any]:
    """Measure all contenders at one size."""
    prepared = {contender.name: contender.prepare(problem) for contender in contenders}
    exact = float64_reference(problem)
    found = {
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
            found[name][what] = timing_figures(timing)
            milliseconds, ratio = timing.seconds.median * 1e3, timing.ratio.median
            log.info("  %s %s: %.1f ms, %.2f times ours", what, name, milliseconds, ratio)
    size = problem.size
    return {
        "channels": size.channels,
        "positions": size.positions,
        "batch": size.batch,
        "contenders": found,
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


def _finished(path: Path, now: Results) -> dict[str, Any]:
    """Return the sizes of an earlier run; the list of sizes may differ, everything else must match."""
    earlier = read_results(path)
    named = ("schema_version", "suite", "seed", "source", "versions", "machine", "device")
    changed = [name for name in named if earlier[name] != now[name]]
    for name in ("contenders", "steps", "dtype", "schedule"):
        if earlier["arguments"][name] != now["arguments"][name]:
            changed.append(name)
    if changed:
        raise ValueError(
            f"cannot resume {path}: {', '.join(changed)} changed since; run without --resume to start again"
        )
    sizes: dict[str, Any] = earlier["sizes"]
    return sizes


def _same_shape(found: dict[str, Any] | None, size: Size) -> bool:
    shape = {"channels": size.channels, "positions": size.positions, "batch": size.batch}
    return found is not None and {name: found[name] for name in shape} == shape


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
    found = value_and_gradient(pool, problem.features, problem.upstream)
    return {
        name: float((result.double() - reference).abs().max() / reference.abs().max())
        for name, result, reference in zip(("value", "gradient"), found, exact, strict=True)
    }


def read_results(path: str | Path) -> Results:
    """Read results, and check them against the schema."""
    results: Results = json.loads(Path(path).read_text(encoding="utf-8"))
    check_schema(results, "benchmarks", SUITE)
    return results


def write_results(path: Path, results: Results) -> None:
    """Check results against the schema, and replace the file in one step."""
    check_schema(results, "benchmarks", SUITE)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, (json.dumps(results, indent=2, ensure_ascii=False) + "\n").encode())


def render(path: str | Path) -> list[Path]:
    """Write the page (``.md``) and the figure (``.png``) next to a results JSON, and return both paths."""
    path = Path(path)
    results = read_results(path)
    page, figure = path.with_suffix(".md"), path.with_suffix(".png")
    draw(results, figure)
    page.write_text(markdown(results, figure.name), encoding="utf-8")
    return [page, figure]


def summary_into(page: str | Path, path: str | Path) -> Path:
    """Write the summary of a results JSON between the two marks of a Markdown page."""
    page = Path(page)
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page} has no lines {BEGIN} and {END} to write between")
    block = f"{BEGIN}\n{summary(read_results(path))}\n{END}"
    page.write_text(before + block + after, encoding="utf-8")
    return page


def main(words: Sequence[str] | None = None) -> list[Path]:
    """Measure and render, or render alone; print and return the files written."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.isqrt_cov")
    add = parser.add_argument
    add("--out", default="results", help="results folder (default: results)")
    add("--sizes", nargs="+", help="feature sizes: 13x13, 14x14, 7x7, vit, 28x28 or C:n (default: all named)")
    add("--batch", type=int, help="images per batch (default: the size's own)")
    add("--rounds", type=int, default=30, help="timed rounds (default: 30)")
    add("--no-compiled", action="store_true", help="leave out torch.compile")
    add("--resume", action="store_true", help="keep the sizes that an earlier run finished")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="device (default: cpu)")
    add("--seed", type=int, default=0, help="random seed (default: 0)")
    add(
        "--render", type=Path, metavar="FILE", help="write page and figure of a results JSON; measure nothing"
    )
    add("--page", type=Path, help="Markdown page with benchmark marks, to write the summary into")
    arguments = parser.parse_args(words)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    written = []
    path = arguments.render
    if path is None:
        path = run_isqrt_cov(
            arguments.out,
            sizes=arguments.sizes,
            batch=arguments.batch,
            contenders=[n for n in CONTENDERS if n != COMPILED.name or not arguments.no_compiled],
            schedule=Schedule(rounds=arguments.rounds),
            device=arguments.device,
            seed=arguments.seed,
            resume=arguments.resume,
            progress=Progress,
        )
        written.append(path)
    written += render(path)
    if arguments.page is not None:
        written.append(summary_into(arguments.page, path))
    print("\n".join(map(str, written)))
    return written


if __name__ == "__main__":
    main()
