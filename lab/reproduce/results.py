"""The results of an experiment: a JSON and a CSV of all runs, and a table generated from the JSON."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from covpool.models.card import plain_json, versions
from covpool.provenance import Results
from covpool.storage.files import replace_file
from covpool.training.run_folder import csv_bytes
from lab.record import new_record, read_record, record_file, write_record
from lab.reproduce.experiments import Experiment
from lab.reproduce.networks import Scale

# The packages that results depend on.
PACKAGES = ("functional", "nn", "models", "data", "inference", "training", "lab/reproduce")
# Columns of the CSV, after the label.
COLUMNS = ("seed", "top1_error", "top5_error", "train_error", "epochs", "parameters", "seconds", "failed")


def empty_results(experiment: Experiment, scale: Scale) -> Results:
    """Return results without runs."""
    head = new_record(experiment.name, PACKAGES, {"scale": asdict(scale)})
    head["versions"] |= versions()
    return {
        **head,
        "runs": [],
        "times": {},
        "timed_at": None,
        "observations": {},
    }


def earlier(experiment: Experiment, scale: Scale, out: Path) -> dict[Path, Results]:
    """Return earlier results at this scale by file; those of this kind of machine come last.

    Raises:
        ValueError: if a file does not match its schema.
    """
    head = empty_results(experiment, scale)
    newest = record_file(head, out)
    results_of = {}
    for path in sorted(
        newest.parent.glob(f"{experiment.name}--*.json"), key=lambda path: (path == newest, path)
    ):
        results = read_record(path)
        if results["arguments"] == head["arguments"]:
            results_of[path] = results
    return results_of


def write(results: Results, out: Path) -> Path:
    """Check and write the JSON, and a CSV next to it."""
    plain = plain_json("results", results)
    path = record_file(plain, out)
    write_record(path, plain)
    replace_file(path.with_suffix(".csv"), table_of_runs(plain))
    return path


def table(experiment: Experiment, results: Results) -> str:
    """Return the table as Markdown."""
    trained = {run["label"] for run in results["runs"]}
    labels = [row.label for row in experiment.rows if row.label in trained]
    timed = [label for label in labels if label in results["times"]]
    head = ["", "top-1 error, %", "top-5 error, %", "seeds", "seconds per run"]
    head += (
        [f"training step: ms per image (forward pass alone), ratio to {experiment.reference}"]
        if timed
        else []
    )
    lines = [f"# {experiment.title}", "", f"In the paper: {experiment.paper}.", "", *_setting(results), ""]
    lines += [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for label in labels:
        cells = _cells(results, label) + ([_time(results["times"].get(label))] if timed else [])
        lines.append(f"| {' | '.join([label, *cells])} |")
    return "\n".join(lines)


def _setting(results: Results) -> list[str]:
    scale, machine = results["arguments"]["scale"], results["machine"]
    learned = [run for run in results["runs"] if not run["failed"]]
    epochs = f"{len(learned[0]['epochs'])} epochs, " if learned else ""
    where = Counter(f"in {run['precision']} on {run['machine']}" for run in learned)
    runs = ", ".join(f"{count} {place}" for place, count in where.items())
    torch = sorted({run["versions"]["torch"] for run in learned})
    commits = sorted({(run["source"]["commit"] or "unknown")[:12] for run in results["runs"]})
    return [
        f"Here: {scale['classes']} classes of Tiny-ImageNet, {epochs}errors of the last epoch, mean ± "
        f"standard deviation over seeds. Runs: {runs}; torch {', '.join(torch)}, commit "
        f"{', '.join(commits)}. Seconds per run include delays by other programs on the machine. Times of "
        f"steps, if any, are from {machine['threads']} of {machine['cores']} cores of {machine['cpu']}."
    ]


def _cells(results: Results, label: str) -> list[str]:
    runs = [run for run in results["runs"] if run["label"] == label]
    learned = [run for run in runs if not run["failed"]]
    seeds = str(len(runs)) if learned == runs else f"{len(runs)}, {len(runs) - len(learned)} failed"
    if not learned:
        return ["failed to learn", "", seeds, ""]
    last = [run["epochs"][-1] for run in learned]
    return [
        _spread([epoch["top1_error"] for epoch in last]),
        _spread([epoch["top5_error"] for epoch in last]),
        seeds,
        f"{statistics.median(run['seconds'] for run in learned):.0f}",
    ]


def _spread(values: list[float]) -> str:
    mean = f"{statistics.mean(values):.1f}"
    return f"{mean} ± {statistics.stdev(values):.1f}" if len(values) > 1 else mean


def _time(timed: dict[str, Any] | None) -> str:
    if timed is None:
        return ""
    both, forward = (timed[what]["milliseconds"]["median"] for what in ("both", "forward"))
    return f"{both:.2f} ({forward:.2f}), {timed['both']['ratio']['median']:.2f}"


def table_of_runs(results: Results) -> bytes:
    """Return a CSV with a line per run."""
    rows = []
    for run in results["runs"]:
        last = run["epochs"][-1] if run["epochs"] else {}
        values = {**run, **last, "epochs": len(run["epochs"])}
        rows.append([run["label"], *(values.get(column) for column in COLUMNS)])
    return csv_bytes(("row", *COLUMNS), rows)


Runs = dict[str, dict[str, Any]]


def known_runs(experiments: Iterable[Experiment], out: Path, scale: Scale) -> dict[str, Runs]:
    """Return the known runs at this scale, by experiment and configuration name.

    Runs from other machines count too: except for the precision, accuracy does not depend on the machine, and
    each run records its machine, precision and commit. Experiments share runs; an experiment's own run has
    priority.
    """
    held = {experiment.name: held_runs(experiment, out, scale) for experiment in experiments}
    # If several experiments hold a run, the first one's is shared.
    shared = {name: run for runs in reversed(held.values()) for name, run in runs.items()}
    return {experiment: shared | runs for experiment, runs in held.items()}


def held_runs(experiment: Experiment, out: Path, scale: Scale) -> Runs:
    """Return the runs in an experiment's own results, by configuration name."""
    held = {}
    for results in earlier(experiment, scale, out).values():
        seeds = 1 + max((run["seed"] for run in results["runs"]), default=0)
        names = {
            (label, configuration.seed): configuration.name
            for label, configuration in experiment.configurations(seeds)
        }
        for run in results["runs"]:
            if (name := names.get((run["label"], run["seed"]))) is not None:
                held[name] = {key: value for key, value in run.items() if key != "label"}
    return held
