"""Runs that results hold already: to add seeds to them where the folders of the runs are gone."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from covpool.provenance import results as origin
from covpool.provenance.results_files import results_path
from covpool.reproduce import record
from covpool.reproduce.experiments.experiment import Experiment
from covpool.reproduce.miniature.configuration import Scale


def known_runs(experiments: Iterable[Experiment], out: Path, scale: Scale) -> dict[str, dict[str, Any]]:
    """By the names of their configurations, from the results of machines of this kind, at this scale.

    Experiments share runs, so a run of one is known to all. Each tells of its own origin: the results then
    name every commit that they come from.
    """
    known = {}
    for experiment in experiments:
        head = record.new_results(experiment, scale)
        try:
            results = json.loads(results_path(out, experiment.name, head).read_bytes())
        except FileNotFoundError:
            continue
        origin.check_schema(results, record.PACKAGE, record.SCHEMA)
        if results["arguments"] != head["arguments"]:
            continue
        seeds = 1 + max((run["seed"] for run in results["runs"]), default=0)
        names = {(label, one.seed): one.name for label, one in experiment.configurations(seeds)}
        for run in results["runs"]:
            if (name := names.get((run["label"], run["seed"]))) is not None:
                known[name] = {key: value for key, value in run.items() if key != "label"}
    return known
