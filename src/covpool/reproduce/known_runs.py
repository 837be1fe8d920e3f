"""Runs that results hold already: to add seeds to them where the folders of the runs are gone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from covpool.reproduce import record
from covpool.reproduce.experiments.experiment import Experiment
from covpool.reproduce.miniature.configuration import Scale

Runs = dict[str, dict[str, Any]]


def known_runs(experiments: Iterable[Experiment], out: Path, scale: Scale) -> dict[str, Runs]:
    """Of each experiment by its name: runs by the names of their configurations, at this scale.

    Those of other machines too: but for the precision, what a network learns is no matter of the machine, and
    each run tells of its own, of its precision and of its commit. Experiments share runs, so a run of one is
    known to all; where one has a run of its own, it keeps it.
    """
    own = {experiment.name: held_runs(experiment, out, scale) for experiment in experiments}
    # Of several experiments that hold one, the first lends its own to those that hold none.
    shared = {name: run for runs in reversed(own.values()) for name, run in runs.items()}
    return {experiment: shared | runs for experiment, runs in own.items()}


def held_runs(experiment: Experiment, out: Path, scale: Scale) -> Runs:
    """An experiment's own, by the names of their configurations."""
    held = {}
    for results in record.earlier(experiment, scale, out).values():
        seeds = 1 + max((run["seed"] for run in results["runs"]), default=0)
        names = {(label, one.seed): one.name for label, one in experiment.configurations(seeds)}
        for run in results["runs"]:
            if (name := names.get((run["label"], run["seed"]))) is not None:
                held[name] = {key: value for key, value in run.items() if key != "label"}
    return held
