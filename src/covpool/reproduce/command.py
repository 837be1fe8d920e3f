"""Experiments by name: what ``covpool reproduce`` does."""

from __future__ import annotations

import os
from pathlib import Path

from covpool.bench.timing import MakeProgress, silence
from covpool.durable import replace_file
from covpool.errors import UsageError
from covpool.functional.arguments import check_choice, check_whole
from covpool.provenance.machine import release
from covpool.reproduce import record
from covpool.reproduce.budget import seconds_of
from covpool.reproduce.experiments import EXPERIMENTS, TRAINED
from covpool.reproduce.experiments.experiment import Experiment
from covpool.reproduce.experiments.measurement import Measurement
from covpool.reproduce.known_runs import known_runs
from covpool.reproduce.miniature.configuration import MINIATURE, Scale
from covpool.reproduce.page import page
from covpool.reproduce.runner import Place, Tell, run_experiments

ALL = "all"


def run_all(
    name: str,
    *,
    data: Path | None = None,
    sets: Path | None = None,
    runs: Path = Path("runs/reproduce"),
    out: Path = Path("results"),
    seeds: int = 3,
    budget: str | None = None,
    add: bool = False,
    scale: Scale = MINIATURE,
    tell: Tell = print,
    progress: MakeProgress = silence,
) -> list[Path]:
    """Run an experiment, or all; the files of results.

    Those by training come first and share the budget; what is only measured has none. Of ``all``, those whose
    images are not given are left out, and it is told.

    Args:
        name: of :data:`covpool.reproduce.experiments.EXPERIMENTS`, or ``all``.
        data: the folder tiny-imagenet-200.
        sets: for ``table7``, the folder of image sets.
        runs: a folder for training runs.
        out: the folder of results.
        seeds: of every row that a claim rests on.
        budget: of the time of training, as ``8h``.
        add: to the results in ``out``: runs that they hold are not trained again.
        scale: how large the training runs are.
        tell: is told what is done, a line at a time.
        progress: makes a listener for what is timed.
    """
    check_choice("experiment", name, (*EXPERIMENTS, ALL))
    check_whole("seeds", seeds)
    chosen = list(EXPERIMENTS.values()) if name == ALL else [EXPERIMENTS[name]]
    training = [one for one in chosen if isinstance(one, Experiment)]
    files: list[Path] = []
    if training:
        if data is None:
            raise UsageError("give --data the folder tiny-imagenet-200, which has train, val and wnids.txt")
        limit = None if budget is None else seconds_of(budget)
        known = known_runs(TRAINED, out, scale) if add else {}
        place = Place(data, runs, out, scale, known)
        files += run_experiments(training, place, seeds=seeds, budget=limit, tell=tell, progress=progress)
    for one in chosen:
        if isinstance(one, Measurement):
            if name == ALL and one.needs_sets and sets is None:
                tell(f"{one.name} is left out: it needs --sets")
                continue
            one.run(sets, runs, out)
            files += one.read(out / release())[1]
    return files


def draw(out: Path) -> list[Path]:
    """Tables and figures of the experiments by training, anew, from the files of results of this version."""
    return [
        file
        for experiment in TRAINED
        for path in sorted((out / release()).glob(f"{experiment.name}--*.json"))
        for file in record.render(experiment, path)
    ]


def write_page(out: Path, file: Path) -> Path:
    """The page of results of this version."""
    folder = out / release()
    link = Path(os.path.relpath(folder, file.parent)).as_posix()
    replace_file(file, page(folder, link).encode())
    return file
