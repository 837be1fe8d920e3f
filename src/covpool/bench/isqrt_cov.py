"""The suite ``isqrt_cov``: the operator against everything one would use in its place."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from covpool.bench.accuracy import Reference, float64_reference, relative_errors
from covpool.bench.contenders import CONTENDERS, MEASURES, OURS, Contender, Prepared
from covpool.bench.figures import rounded, timing_figures
from covpool.bench.memory import bytes_kept_for_backward
from covpool.bench.problem import Problem, Size, chosen_sizes
from covpool.bench.products import recorded_products
from covpool.bench.results import (
    Results,
    check_device,
    differences,
    new_results,
    read_results,
    write_results,
)
from covpool.bench.timing import MakeProgress, Schedule, silence, time_interleaved
from covpool.errors import UsageError
from covpool.provenance.origin import results_path

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
    """Measure, and write the results size by size as they come.

    Args:
        out: folder of results; the file is ``<out>/<version>/isqrt_cov--<machine>--<device>.json``.
        sizes: names of :data:`covpool.bench.SIZES`, ``"C:n"``, or sizes themselves; all the named
            ones if None.
        batch: images in a batch; each size's own if None.
        steps: Newton-Schulz steps.
        contenders: names of :data:`covpool.bench.CONTENDERS`; all if None. ``"ours"`` is always there.
        schedule: rounds, warm-up and what counts as slow.
        device: ``"cpu"`` or ``"cuda"``.
        seed: of the features, the upstream gradient and the order within rounds.
        resume: keep the sizes that an earlier run has finished, if it measured the same code with the
            same arguments; raise if it did not.
        progress: makes a listener for each part.

    Returns:
        The path of the JSON file.
    """
    wanted = chosen_sizes(sizes, batch)
    schedule = schedule or Schedule()
    selected = _selected(contenders)
    check_device(device)
    results = _header(wanted, steps, selected, schedule, device, seed)
    path = results_path(out, results["suite"], results)
    if resume and path.exists():
        results["sizes"] = _finished(path, results)
    for size in wanted:
        if _same_shape(results["sizes"].get(size.name), size):
            log.info("%s: already there", size.name)
            continue
        log.info("%s: %d channels, %d positions", size.name, size.channels, size.positions)
        problem = Problem(size, steps=steps, seed=seed, device=device)
        results["sizes"][size.name] = measure(problem, selected, schedule, progress)
        write_results(path, results)
    return path


def measure(
    problem: Problem, contenders: list[Contender], schedule: Schedule, progress: MakeProgress = silence
) -> dict[str, Any]:
    """Everything about one size."""
    prepared = {contender.name: contender.prepare(problem) for contender in contenders}
    exact = float64_reference(problem)
    found = {
        contender.name: _untimed(contender, prepared[contender.name], problem, exact)
        for contender in contenders
    }
    for what in MEASURES:
        runs = {name: getattr(ready, what) for name, ready in prepared.items()}
        with progress(f"rounds at {problem.size.name}, {what.replace('_', ' ')}") as tell:
            timings = time_interleaved(
                runs,
                reference=OURS.name,
                schedule=schedule,
                seed=problem.seed,
                device=problem.device,
                tell=tell,
            )
        for name, timing in timings.items():
            found[name][what] = timing_figures(timing)
            log.info(
                "  %s %s: %.1f ms, %.2f times ours",
                what,
                name,
                timing.seconds.median * 1e3,
                timing.ratio.median,
            )
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
        raise UsageError(f"contenders must be among {listed}; got {', '.join(sorted(unknown))}")
    return [
        contender
        for name, contender in CONTENDERS.items()
        if names is None or name in names or contender is OURS
    ]


def _header(
    sizes: list[Size], steps: int, contenders: list[Contender], schedule: Schedule, device: str, seed: int
) -> Results:
    arguments = {
        "sizes": [size.name for size in sizes],
        "contenders": [contender.name for contender in contenders],
        "steps": steps,
        "dtype": "float32",
        "schedule": asdict(schedule),
    }
    # The rest of the package cannot change a result.
    return {**new_results("isqrt_cov", ("functional", "bench"), arguments, device, seed), "sizes": {}}


def _finished(path: Path, now: Results) -> dict[str, Any]:
    earlier = read_results(path)
    changed = differences(earlier, now)
    if changed:
        raise UsageError(
            f"cannot resume {path}: {', '.join(changed)} changed since; run without resume to start again"
        )
    sizes: dict[str, Any] = earlier["sizes"]
    return sizes


def _same_shape(found: dict[str, Any] | None, size: Size) -> bool:
    shape = {"channels": size.channels, "positions": size.positions, "batch": size.batch}
    return found is not None and {name: found[name] for name in shape} == shape


def _untimed(contender: Contender, ready: Prepared, problem: Problem, exact: Reference) -> dict[str, Any]:
    """What needs no clock: products, memory, error."""
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
