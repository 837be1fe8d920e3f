"""Run experiments: train the missing runs one after the other, and write results after each."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from covpool.arguments import check_choice, check_whole
from covpool.errors import UsageError
from covpool.terminal import Progress, duration
from lab.bench.methods import run_methods
from lab.bench.table import aligned
from lab.bench.table import report as bench_report
from lab.bench.timing import MakeProgress, silence
from lab.record import RESULTS, read_record, record_file
from lab.reproduce.experiments import EXPERIMENTS, Experiment
from lab.reproduce.networks import MINIATURE, Configuration, Scale
from lab.reproduce.observation import observed, timed
from lab.reproduce.results import Runs, earlier, empty_results, known_runs, table, write
from lab.reproduce.training import (
    affordable_seeds,
    estimated_seconds,
    is_done,
    seconds_of,
    trained,
    write_subset,
)

Log = Callable[[str], object]
# Seeds to look for among finished runs: there may be more than this call requests.
MOST_SEEDS = 20


@dataclass(frozen=True)
class Place:
    """Folders and scale of the experiments.

    Attributes:
        data: the folder tiny-imagenet-200.
        runs: folder of training runs; finished runs are not repeated.
        out: folder of results.
        scale: size of the experiments.
        known: further runs that count as done; see :func:`lab.reproduce.results.known_runs`.
    """

    data: Path
    runs: Path
    out: Path
    scale: Scale = MINIATURE
    known: Mapping[str, Runs] = field(default_factory=dict)

    @property
    def images(self) -> Path:
        """CSV of the images."""
        return self.runs / f"tiny-imagenet-{self.scale.classes}.csv"


def run_experiments(
    experiments: Sequence[Experiment],
    place: Place,
    *,
    seeds: int = 3,
    budget: float | None = None,
    log: Log = print,
    progress: MakeProgress = silence,
) -> list[Path]:
    """Train the runs of some experiments and write the results. If interrupted, call it again to resume.

    Args:
        experiments: from :data:`lab.reproduce.experiments.EXPERIMENTS`.
        place: folders and scale.
        seeds: number of seeds for rows that test a claim.
        budget: training time in seconds; a small budget reduces the number of seeds.
        log: called with each line of progress.
        progress: returns a progress callback for timing.

    Returns:
        The result files.
    """
    started = time.monotonic()
    write_subset(place.data, place.scale.classes, place.images)
    seconds = _estimates(place)
    if budget is not None:
        seeds = affordable_seeds(
            lambda count: left(experiments, count, place),
            seconds,
            seeds,
            budget,
        )
    planned, to_train = plan(experiments, seeds), left(experiments, seeds, place)
    log(f"{len(planned)} runs, {seeds} seed{'s' if seeds > 1 else ''}")
    for number, configuration in enumerate(planned, 1):
        if configuration not in to_train:
            continue
        spent = time.monotonic() - started
        # The first seed is always trained: the budget reduces seeds, never rows.
        if budget is not None and configuration.seed and spent + seconds(configuration) > budget:
            log(f"the budget is spent after {duration(spent)}: {number - 1} of {len(planned)} runs are done")
            break
        log(f"run {number} of {len(planned)}: {configuration.name}")
        trained(configuration, place.scale, place.images, place.runs)
        for experiment in experiments:
            if configuration in [each for _, each in experiment.configurations(seeds)]:
                write(collected(experiment, place), place.out)
    return [finished(experiment, place, progress) for experiment in experiments]


def plan(experiments: Sequence[Experiment], seeds: int) -> list[Configuration]:
    """Return every run once, sorted by seed: an interrupted run then has all rows, with fewer seeds."""
    chosen = {
        configuration.name: configuration
        for experiment in experiments
        for _, configuration in experiment.configurations(seeds)
    }
    return sorted(chosen.values(), key=lambda configuration: configuration.seed)


def left(experiments: Sequence[Experiment], seeds: int, place: Place) -> list[Configuration]:
    """Return the planned runs to train: missing ones, and known ones whose checkpoints must be observed."""
    to_observe = {name for experiment in experiments for name in _unobserved(experiment, place)}
    known = {name for experiment in experiments for name in place.known.get(experiment.name, {})} - to_observe
    planned = plan(experiments, seeds)
    return [
        configuration
        for configuration in planned
        if configuration.name not in known and not is_done(configuration, place.runs)
    ]


def _unobserved(experiment: Experiment, place: Place) -> list[str]:
    """Return the names of runs that must still be observed, which needs their run folders."""
    if not experiment.observed:
        return []
    missing = set(experiment.observed) - collected(experiment, place)["observations"].keys()
    return [row.configuration.name for row in experiment.rows if row.label in missing]


def collected(experiment: Experiment, place: Place) -> dict[str, Any]:
    """Return the results so far: finished runs, and earlier times and observations."""
    results = empty_results(experiment, place.scale)
    results["runs"] = [
        {"label": label, **run}
        for label, configuration in experiment.configurations(MOST_SEEDS)
        if (run := _done(experiment, configuration, place)) is not None
    ]
    file = record_file(results, place.out)
    for path, before in earlier(experiment, place.scale, place.out).items():
        # Times are comparable only on the same machine.
        if path == file and set(before["times"]) == {row.label for row in experiment.rows}:
            results["times"], results["timed_at"] = before["times"], before["timed_at"]
        same = {run["label"] for run in results["runs"] if run["seed"] == 0 and run in before["runs"]}
        known = before["observations"].items()
        results["observations"] |= {label: observation for label, observation in known if label in same}
    return results


def _done(experiment: Experiment, configuration: Configuration, place: Place) -> dict[str, Any] | None:
    """Return the result of a run; ``None`` if it is not finished."""
    if is_done(configuration, place.runs):
        return trained(configuration, place.scale, place.images, place.runs)
    return place.known.get(experiment.name, {}).get(configuration.name)


def finished(experiment: Experiment, place: Place, progress: MakeProgress) -> Path:
    """Add the missing times and observations, and write the results."""
    results = collected(experiment, place)
    rows = {row.label: row.configuration for row in experiment.rows}
    if experiment.reference is not None and not results["times"]:
        results["times"] = timed(rows, place.scale, experiment.reference, progress)
        results["timed_at"] = results["source"]["commit"]
    for label in experiment.observed:
        if label not in results["observations"] and is_done(rows[label], place.runs):
            observation = observed(rows[label], place.scale, place.images, place.runs)
            results["observations"][label] = observation
    return write(results, place.out)


def _estimates(place: Place) -> Callable[[Configuration], float]:
    """Return a function that estimates the seconds of a configuration, equal for all seeds."""
    known: dict[str, float] = {}

    def seconds(configuration: Configuration) -> float:
        first = replace(configuration, seed=0)
        if first.name not in known:
            known[first.name] = estimated_seconds(first, place.scale, place.images)
        return known[first.name]

    return seconds


# Measured by python -m lab bench with its default settings.
TABLE2 = "table2"
ALL = "all"


def run_all(
    name: str,
    *,
    data: Path | None = None,
    runs: Path = Path("runs/reproduce"),
    out: Path = RESULTS,
    seeds: int = 3,
    budget: str | None = None,
    again: bool = False,
    scale: Scale = MINIATURE,
    log: Log = print,
    progress: MakeProgress = silence,
) -> list[Path]:
    """Run one experiment or all, and return the result files.

    Experiments with training come first and share the budget; ``table2`` is timing only and has no budget.

    Args:
        name: a key of :data:`lab.reproduce.experiments.EXPERIMENTS`, ``table2`` or ``all``.
        data: the folder tiny-imagenet-200.
        runs: folder of training runs.
        out: folder of results.
        seeds: number of seeds for rows that test a claim.
        budget: training time, such as ``8h``.
        again: train again the runs that the results in ``out`` hold.
        scale: size of the experiments.
        log: called with each line of progress.
        progress: returns a progress callback for timing.
    """
    check_choice("experiment", name, (*EXPERIMENTS, TABLE2, ALL))
    check_whole("seeds", seeds)
    files: list[Path] = []
    if training := [experiment for experiment in EXPERIMENTS.values() if name in (experiment.name, ALL)]:
        if data is None:
            raise UsageError("give --data the folder tiny-imagenet-200, which has train, val and wnids.txt")
        limit = None if budget is None else seconds_of(budget)
        known = {} if again else known_runs(EXPERIMENTS.values(), out, scale)
        place = Place(data, runs, out, scale, known)
        files += run_experiments(training, place, seeds=seeds, budget=limit, log=log, progress=progress)
    if name in (TABLE2, ALL):
        files.append(run_methods(out, again=again, progress=progress))
    return files


def report(file: Path) -> str:
    """Return the tables of a result file, for a terminal."""
    results = read_record(file)
    experiment = EXPERIMENTS.get(results["experiment"])
    return bench_report(results) if experiment is None else aligned(table(experiment, results))


def main(
    experiment: str,
    data: Path | None = None,
    runs: Path = Path("runs/reproduce"),
    out: Path = RESULTS,
    seeds: int = 3,
    budget: str | None = None,
    again: bool = False,
) -> None:
    """Reproduce a table or a figure of the paper in miniature.

    Small networks train on a part of Tiny-ImageNet, each in minutes. Rerun the command to resume. Runs that
    the results folder holds are not trained. It writes a JSON and a CSV of all runs, and prints the table.

    Args:
        experiment: figure2, table2, table3, table4, figure4, table5, table6 or approximation; or all of them.
        data: folder tiny-imagenet-200, as shipped.
        runs: folder of the training runs.
        out: results folder.
        seeds: number of random seeds per row.
        budget: time limit, as 8h; fewer seeds are trained if the time is too short for all.
        again: train again the runs that the results hold.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    log = partial(print, file=sys.stderr, flush=True)
    files = run_all(
        experiment,
        data=data,
        runs=runs,
        out=out,
        seeds=seeds,
        budget=budget,
        again=again,
        log=log,
        progress=Progress,
    )
    print("\n\n".join(map(report, files)), "", *files, sep="\n")
