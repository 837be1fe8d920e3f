"""From a folder of images to a model: check the images, compare heads, fine-tune if asked, write a report."""

from __future__ import annotations

import json
import logging
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from covpool.data.check import check, write_report
from covpool.data.image_set import ImageSet
from covpool.evaluate.probe.options import FitOptions
from covpool.evaluate.probe.probing import FOLDS, Probed, Probing
from covpool.evaluate.probe.record import PACKAGES, copy_bundle, difference, percent
from covpool.evaluate.results import mark_folder, prepare_folder, write_results
from covpool.models.bundle import load_model, read_card
from covpool.models.card import CARD, versions
from covpool.processes import joined_processes
from covpool.provenance.machine import machine_name
from covpool.provenance.origin import new_results
from covpool.storage.files import replace_file
from covpool.storage.folders import held
from covpool.terminal import counted, duration
from covpool.train.fitting import fit
from covpool.train.metrics import widest_interval
from covpool.train.recipe_files import read_recipe
from covpool.train.report.pages import PAGE, SPLITS, environment, next_commands, prediction_values
from covpool.train.report.record import Predictions, read_predictions
from covpool.train.report.rendering import render
from covpool.train.report.thumbnails import looks

LOGGER = logging.getLogger("covpool")
PROTOCOL = "fit"
FOLDED = "cross-validation"
# A training step computes the network once forward, and about twice as much backward.
STEP_OVER_FORWARD = 3
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Fitted:
    """The folder, with ``bundle``, ``report.html`` and ``results.json``, and the contents of the last."""

    folder: Path
    record: dict[str, Any]


def fit_images(
    data: str | Path,
    options: FitOptions | None = None,
    *,
    out: str | Path,
    log: Callable[[str], None] = LOGGER.info,
    progress: Progress = lambda what, done, total: None,
) -> Fitted:
    """Train a model on a folder of images, and compare it with average pooling.

    Images without test and val are used by cross-validation. Call it again to resume after an interruption.

    Args:
        data: a folder of classes, with or without train, val and test, or any other source of images.
        options: the network, the heads, and fine-tuning.
        out: folder of the results.
        log: called with a line at the start of each stage.
        progress: called with the name of the counted items, the number done and the total.

    Example:
        >>> from covpool.evaluate.fit import fit_images
        >>> fit_images("birds", out="runs/birds").record["top1"]  # doctest: +SKIP
        0.699
    """
    options, folder = options or FitOptions(), Path(out)
    prepare_folder(folder, PROTOCOL, str(data))
    with held(folder):
        mark_folder(folder, PROTOCOL)
        return _Fitting(str(data), options, folder, log, progress).run()


class _Fitting:
    """A call of :func:`fit_images`."""

    def __init__(
        self, data: str, options: FitOptions, folder: Path, log: Callable[[str], None], progress: Progress
    ) -> None:
        self.data, self.options, self.folder = data, options, folder
        self.log, self.progress = log, progress
        self.probe_options = options.probe()
        self.stages = 4 if options.finetune else 3

    def run(self) -> Fitted:
        self._stage(1, "check the images")
        problems = self._check()
        heads = " and ".join(self.options.heads)
        self._stage(2, f"compare {heads} on frozen {self.probe_options.model}")
        with joined_processes(self.options.device) as processes:
            probing = Probing(
                self.data,
                self.probe_options,
                self.folder / "probe",
                self.folder / "features",
                max_cache=20.0,
                layout="auto",
                log=self.log,
                progress=self.progress,
                device=processes.device,
            )
            self._announce_test(probing.sets)
            probed = probing.run()
            best = probed.record["best"]
            assert best is not None
            tuned = self._finetuned(probing, probed, best) if self.options.finetune else None
            device = processes.device.type
        self._stage(self.stages, "write the report")
        is_tuned = bool(tuned and tuned["is_best"])
        copy_bundle(self.folder / ("finetune" if is_tuned else "probe") / "bundle", self.folder / "bundle")
        split, images = measured_on(probing.sets)
        if is_tuned and split == FOLDED:
            split = "val"  # one network, validated on the images that were set aside
        source = "finetune/predictions.csv" if is_tuned else f"probe/predictions/{best}-0.csv"
        predictions = read_predictions(self.folder / source, tuple(images.classes))
        record = {
            "protocol": PROTOCOL,
            **new_results(PACKAGES, asdict(self.options) | {"data": self.data}, device, seed=0),
            "model": self.probe_options.model,
            "images": probed.record["images"],
            "problems": problems,
            "split": split,
            "heads": probed.record["heads"],
            "best": best,
            "finetuned": tuned,
            "top1": float(predictions.right.mean()),
            "finetune_seconds": self._estimate(probed),
        }
        self._report(record, predictions, images, is_tuned=is_tuned)
        write_results(self.folder, record)
        return Fitted(self.folder, record)

    def _stage(self, number: int, what: str) -> None:
        self.log(f"{number}/{self.stages} {what}")

    def _check(self) -> dict[str, int]:
        started = time.monotonic()
        report = check(self.data, progress=lambda done, total: self.progress("images", done, total))
        write_report(report.problems, self.folder / "problems.csv")
        splits = ", ".join(f"{split} {count:,}" for split, count in report.images.items())
        total = counted(sum(report.images.values()), "image")
        self.log(
            f"    {total} of {counted(report.classes, 'class')} ({splits}), "
            f"checked in {duration(time.monotonic() - started)}"
        )
        if report.counts:
            listed = ", ".join(f"{count:,} {problem}" for problem, count in report.counts.items())
            self.log(f"    problems: {listed}; see {self.folder / 'problems.csv'}")
        return report.counts

    def _announce_test(self, sets: Mapping[str, ImageSet]) -> None:
        """Print which images measure the accuracy, and how precise it will be."""
        split, images = measured_on(sets)
        if split == FOLDED:
            self.log(
                f"    no test images: {FOLDS}-fold cross-validation; "
                "each image is predicted by a head that was trained without it"
            )
        self.log(
            f"    accuracy is measured on {counted(len(images), 'image')}: "
            f"its 95 % interval is up to ±{widest_interval(len(images)):.0f} points"
        )

    def _estimate(self, probed: Probed) -> float:
        """Return about how long fine-tuning takes, from the time of the features."""
        images, seconds = probed.record["images"], probed.record["extraction_seconds"]
        one = sum(seconds.values()) / (2 * sum(images.values()))
        trained = self.options.epochs * images["train"] * one
        return float(round(trained * STEP_OVER_FORWARD))

    def _finetuned(self, probing: Probing, probed: Probed, head: str) -> dict[str, Any]:
        """Train the whole network from a head, and say whether it became better."""
        start, out = self.folder / "start", self.folder / "finetune"
        self._stage(
            3, f"fine-tune {self.probe_options.model} from {head}, {counted(self.options.epochs, 'epoch')}"
        )
        self.log(f"    about {duration(self._estimate(probed))}")
        if not (start / CARD).exists():
            probing.save_start(head, start)
        before = read_card(start).metrics["val"]["top1"]
        run = fit(
            read_recipe(
                None,
                {
                    "data.path": self.data,
                    "data.val_fraction": self.probe_options.val_fraction,
                    "data.workers": self.options.workers,
                    "batch_size": self._batch_size(probed),
                    "weights.bundle": str(start),
                    "schedule.epochs": self.options.epochs,
                    "schedule.head_first": 0.0,
                    "loop.device": self.options.device,
                    "out": str(out),
                },
            )
        )
        after = run.summary["validation"]["top1"]
        self.log(f"    validation accuracy: {before:.1%} before, {after:.1%} after fine-tuning")
        return {
            "head": head,
            "validation_before": before,
            "validation_after": after,
            "top1": run.summary["metrics"]["top1"],
            "seconds": run.summary["seconds"],
            "is_best": after >= before,
        }

    def _batch_size(self, probed: Probed) -> int:
        """Return 32, or less if there would be fewer than four steps per epoch."""
        images = probed.record["images"]
        trained = images["train"] * (1 if "val" in images else 1 - self.probe_options.val_fraction)
        return max(1, min(32, int(trained) // 4))

    def _report(
        self, record: dict[str, Any], predictions: Predictions, images: ImageSet, *, is_tuned: bool
    ) -> None:
        model = load_model(self.folder / "bundle")
        name = Path(self.data.rstrip("/")).name or self.data
        page = render(
            "fit.html.jinja",
            title=f"{name} · {record['model']} · {record['best']}{', fine-tuned' if is_tuned else ''}",
            record=record,
            split=SPLITS.get(record["split"], ""),
            found=prediction_values(self.folder, predictions, images),
            table=table_cells(record),
            over=next((head["over_gap"] for head in record["heads"] if head["head"] == record["best"]), None),
            # In cross-validation other heads made the predictions.
            looks=looks(predictions, images, model) if record["split"] in SPLITS else [],
            commands=commands(self.data, self.folder, record),
            facts=[
                ("Network", record["model"]),
                ("Images", ", ".join(f"{SPLITS[split]} {n:,}" for split, n in record["images"].items())),
                ("Classes", f"{len(images.classes):,}"),
                *environment({**record, "machine": machine_name(record["machine"]), "versions": versions()}),
            ],
        )
        replace_file(self.folder / PAGE, page)


def measured_on(sets: Mapping[str, ImageSet]) -> tuple[str, ImageSet]:
    """Return the images on which heads are compared; all of them in cross-validation."""
    for split in ("test", "val"):
        if split in sets:
            return split, sets[split]
    return FOLDED, sets["train"]


def table_cells(record: dict[str, Any]) -> list[list[str]]:
    """Return titles, and a row for each head and for fine-tuning."""
    key = "test" if record["split"] == "test" else "val"
    rows = [["head", "seeds", "top-1 in %", "over gap (95 % interval)"]]
    for head in record["heads"]:
        rows.append(
            [head["head"], str(head["seeds"]), percent(head[key], "top1"), difference(head["over_gap"])]
        )
    if tuned := record["finetuned"]:
        rows.append([f"{tuned['head']}, fine-tuned", "1", f"{100 * tuned['top1']:.1f}", ""])
    return rows


def commands(data: str, folder: Path, record: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the commands to type next, each with its purpose."""
    found = next_commands(folder, f" --data {data}")
    if record["finetuned"] is None:
        purpose = f"fine-tune the whole network, about {duration(record['finetune_seconds'])} on this machine"
        words = ["covpool", "fit", data, "--out", str(folder), *_given(record["arguments"]), "--finetune"]
        found.append((purpose, shlex.join(words)))
    return found


def _given(arguments: dict[str, Any]) -> list[str]:
    """Return the options that differ from their defaults, as words of a command line."""
    words = []
    for name, default in asdict(FitOptions()).items():
        value = tuple(arguments[name]) if name == "heads" else arguments[name]  # a list in results.json
        if value != default and name not in ("finetune", "device", "workers"):
            words += [f"--{name.replace('_', '-')}", value if isinstance(value, str) else _word(value)]
    return words


def _word(value: Any) -> str:
    return ",".join(value) if isinstance(value, list | tuple) else json.dumps(value)
