"""Fine-tune whole networks on CUB-200-2011 from closed-form heads: accuracy after every epoch (Figure 4).

    python -m lab cub_epochs SETS RUNS

SETS has the folder ``cub`` with train and test by class. Protocol, written down before the first run:

- ``covpool fit`` solves the head, from gap or isqrt_cov. Then ``covpool train`` trains all layers with its
  defaults for a bundle, the same for both, for the same number of epochs.
- The learning rate is chosen per network and pooling: a third of the training images, drawn per class with
  seed 0, is held out; each rate trains for one epoch from a head that is solved without them. The most
  accurate rate wins.
- With this rate, each seed trains on all training images. The accuracy on the test images is measured after
  every epoch, without the flip. The last epoch counts, not the best one.

Networks are EfficientNet-Lite0 with two seeds and, if a file with its weights is given, ResNet-50 with one,
both at 224 pixels. Every run is written when it ends. Rerun the command to resume.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import covpool
from covpool.device import fastest_precision
from covpool.drawing import LIGHT, dress, new_figure
from covpool.storage.files import read_json
from covpool.terminal import counted
from covpool.training.recipe_files import read_recipe
from covpool.training.report.record import read_run
from covpool.training.run import train_recipe
from lab.experiments.fine_grained import LITE, weights_file
from lab.record import new_record, resumable_file, resumed, write_record

NAME = "cub_epochs"
POOLS = ("gap", "isqrt_cov")
RATES = (1e-4, 3e-4)
TRIAL_EPOCHS, EPOCHS = 1, 3
HELD_OUT = 1 / 3


class Network(NamedTuple):
    """A backbone of the experiment."""

    model: str
    title: str
    seeds: int


NETWORKS = {
    "lite0": Network("tf_efficientnet_lite0", "EfficientNet-Lite0", 2),
    "resnet50": Network("resnet50", "ResNet-50", 1),
}


def folder_for_trials(images: Path, runs: Path) -> Path:
    """Return a folder with the training images alone, a third of each class in val."""
    folder = runs / "cub-trials"
    for kind in sorted(path for path in (images / "train").iterdir() if path.is_dir()):
        files = sorted(kind.iterdir())
        held_out = set(random.Random(f"0 {kind.name}").sample(files, round(HELD_OUT * len(files))))
        for file in files:
            _link(file, folder / ("val" if file in held_out else "train") / kind.name / file.name)
    return folder


def folder_for_epochs(images: Path, runs: Path) -> Path:
    """Return a folder with all training images, and the test images as val: they are measured every epoch."""
    folder = runs / "cub-epochs"
    for split, name in (("train", "train"), ("test", "val")):
        for file in sorted((images / split).glob("*/*")):
            _link(file, folder / name / file.parent.name / file.name)
    return folder


def _link(file: Path, new: Path) -> None:
    """Make a second name of a file, or copy it to another file system."""
    if new.exists():
        return
    new.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(file, new)
    except OSError:
        shutil.copyfile(file, new)


class Experiment:
    """The runs of one network.

    Args:
        name: key of ``NETWORKS``.
        images: folder with train and test.
        runs: folder of the runs.
        options: other options of ``covpool fit``: the weights, and how they are read.
    """

    def __init__(self, name: str, images: Path, runs: Path, options: Mapping[str, Any]) -> None:
        self.name, self.images, self.runs, self.options = name, images, runs, options
        self.network = NETWORKS[name]

    def head(self, pool: str, data: Path) -> tuple[Path, float]:
        """Return the bundle of a head that is solved once, and its accuracy on test, or else on val."""
        fitted = self.runs / f"{self.name}-{pool}-{data.name}"
        if not (fitted / "results.json").exists():
            covpool.fit(data, fitted, model=self.network.model, heads=(pool,), **self.options)
        return fitted / "bundle", float(read_json(fitted / "results.json")["top1"])

    def train(
        self, pool: str, solved: Path, data: Path, rate: float, epochs: int, seed: int
    ) -> dict[str, Any]:
        """Train all layers from a solved head, and return the accuracy on val after every epoch."""
        bundle, start = self.head(pool, solved)
        out = self.runs / f"{self.name}-{pool}-{data.name}-{rate:g}-{seed}"
        done = train_recipe(
            read_recipe(
                None,
                {
                    "data.path": str(data),
                    "data.workers": 0,
                    "weights.bundle": str(bundle),
                    "optimizer.lr": rate,
                    "schedule.epochs": epochs,
                    "schedule.head_first": 0.0,
                    "loop.precision": fastest_precision(),
                    "seed": seed,
                    "trackers": [],
                    "out": str(out),
                },
            )
        )
        return {
            "machine": done.summary["machine"],
            "precision": fastest_precision(),
            "seconds": round(done.summary["seconds"], 1),
            "top1": [start, *read_run(out).epoch_column("top1").tolist()],
        }

    def trials(self, done: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the runs that choose the learning rates and are not done, by name."""
        for pool in POOLS:
            for rate in RATES:
                if (name := f"{pool}, rate {rate:g}") not in done["trials"]:
                    data = folder_for_trials(self.images, self.runs)
                    yield (
                        name,
                        {
                            "pool": pool,
                            "rate": rate,
                            **self.train(pool, data, data, rate, TRIAL_EPOCHS, 0),
                        },
                    )

    def finals(self, done: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield the runs on all training images that are not done, by name."""
        for seed in range(self.network.seeds):
            for pool in POOLS:
                if (name := f"{pool}, seed {seed}") not in done["finals"]:
                    rate, data = chosen_rate(done["trials"], pool), folder_for_epochs(self.images, self.runs)
                    # Of the folder with test: with the test images as val, they would decide on the head.
                    run = self.train(pool, self.images, data, rate, EPOCHS, seed)
                    yield name, {"pool": pool, "rate": rate, **run}


def chosen_rate(trials: Mapping[str, Any], pool: str) -> float:
    """Return the learning rate with the best accuracy on held-out images."""
    of_pool = [trial for trial in trials.values() if trial["pool"] == pool]
    return float(max(of_pool, key=lambda trial: trial["top1"][-1])["rate"])


def table(record: Mapping[str, Any]) -> str:
    """Return the accuracies as Markdown."""
    epochs = " | ".join(f"epoch {k}" for k in range(EPOCHS + 1))
    lines = [
        f"Top-1 accuracy in percent on the {record['test_images']:,} test images of CUB-200-2011 at 224 "
        "pixels, without flip. Epoch 0 is the head in closed form on the frozen network. Then all layers "
        f"train for {EPOCHS} epochs. The learning rate was chosen on held-out training images. Hours are "
        "those of one core, for training and tests.",
        "",
        f"| network | pooling | rate | seeds | {epochs} | hours |",
        "|---|---|---" + "|---" * (EPOCHS + 3) + "|",
    ]
    for name, network in record["networks"].items():
        for pool in POOLS:
            runs = [run for run in network["finals"].values() if run["pool"] == pool]
            if runs:
                hours = sum(run["seconds"] for run in runs) / 3600
                cells = [NETWORKS[name].title, f"`{pool}`", f"{runs[0]['rate']:g}", str(len(runs))]
                cells += [f"{100 * value:.1f}" for value in means(runs)] + [f"{hours:.1f}"]
                lines.append(f"| {' | '.join(cells)} |")
    trials = [trial for network in record["networks"].values() for trial in network["trials"].values()]
    spent = sum(trial["seconds"] for trial in trials) / 3600
    left = {
        f"{network.title} with `{pool}`": network.seeds - len(_finals(record, name, pool))
        for name, network in NETWORKS.items()
        for pool in POOLS
    }
    missing = [f"{what} ({counted(count, 'seed')})" for what, count in left.items() if count]
    lines += ["", f"The choice of the learning rates took {spent:.1f} hours on one core: {len(trials)} runs."]
    if missing:
        lines.append(f"Not run: {'; '.join(missing)}.")
    return "\n".join(lines)


def _finals(record: Mapping[str, Any], name: str, pool: str) -> list[Any]:
    finals = record["networks"].get(name, {}).get("finals", {})
    return [run for run in finals.values() if run["pool"] == pool]


def means(runs: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the mean accuracy of runs after every epoch."""
    return [mean(values) for values in zip(*(run["top1"] for run in runs), strict=True)]


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Write the figure: accuracy over the epochs, a line per network and pooling, a thin one per seed."""
    figure = new_figure(LIGHT, 6.4, 3.6)
    axes = figure.subplots()
    dress(axes, LIGHT)
    for name in record["networks"]:
        for pool, color in zip(POOLS, ("#6b7178", "#0b6bb8"), strict=True):
            runs = _finals(record, name, pool)
            if not runs:
                continue
            style = "-" if name == "lite0" else "--"
            label = f"{NETWORKS[name].title}, {pool}"
            axes.plot([100 * value for value in means(runs)], style, color=color, marker="o", label=label)
            for run in runs:
                axes.plot(
                    [100 * value for value in run["top1"]], style, color=color, linewidth=0.6, alpha=0.6
                )
    axes.set_xlabel("epoch; 0 is the closed form")
    axes.set_xticks(range(EPOCHS + 1))
    axes.set_ylabel("test accuracy, %")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def main(sets: Path, runs: Path, networks: tuple[str, ...] = ("lite0",), weights: Path | None = None) -> None:
    """Fine-tune whole networks on CUB-200-2011 from closed-form heads. Rerun the command to resume.

    Args:
        sets: folder with cub, which has train and test by class.
        runs: folder of the runs.
        networks: lite0, resnet50 or both.
        weights: file with the weights of ResNet-50.
    """
    test_images = sum(1 for _ in (sets / "cub" / "test").glob("*/*"))
    record = new_record(NAME, ("functional", "nn", "models", "data", "training", "closed_form"))
    file = resumable_file(record)
    record = resumed(record | {"test_images": test_images, "networks": {}}, file)
    for name in networks:
        options: dict[str, Any] = {"weights": str(weights), "workers": 1}
        if name == "lite0":
            options |= {"weights": str(weights_file("lite0")), "key_map": LITE["key_map"]}
        experiment = Experiment(name, sets / "cub", runs, options)
        parts = record["networks"].setdefault(name, {"trials": {}, "finals": {}})
        for part in ("trials", "finals"):
            left = experiment.trials if part == "trials" else experiment.finals
            for key, run in left(parts):
                parts[part][key] = run
                write_record(file, record, table(record))
                print(f"{name}, {key}: {100 * run['top1'][-1]:.1f} %, {run['seconds']:.0f} s", flush=True)
    if any(network["finals"] for network in record["networks"].values()):
        draw(read_json(file), file.with_suffix(".png"))
