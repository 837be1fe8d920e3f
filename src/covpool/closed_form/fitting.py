"""From a folder of images to a model: pool, solve, compare heads, fine-tune if asked, write a report."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from covpool.closed_form.kept import identity_of, save_sums
from covpool.closed_form.options import PROTOCOL, SUMS, FitOptions, default_folder
from covpool.closed_form.passing import FOLDED, WORK, FrozenPass, Progress
from covpool.closed_form.report import Suspects, write_page
from covpool.closed_form.solve import Solution, solve
from covpool.closed_form.sums import Sums
from covpool.errors import UsageError
from covpool.evaluate.probe.options import AVERAGE
from covpool.evaluate.probe.probing import Probing
from covpool.evaluate.probe.record import PACKAGES, copy_bundle, paired_difference
from covpool.evaluate.results import write_results
from covpool.models.bundle import load_model, read_card
from covpool.models.card import CARD
from covpool.models.model import PooledClassifier
from covpool.models.saving import save_model
from covpool.processes import joined_processes
from covpool.provenance import new_results
from covpool.storage.folders import make_folder, remove_folder
from covpool.terminal import NamedProgress, counted, duration, human
from covpool.training.metrics import Predictions
from covpool.training.recipe_files import read_recipe
from covpool.training.report import PAGE
from covpool.training.report.record import read_predictions
from covpool.training.run import train_recipe
from covpool.training.run_folder import RunFolder, write_predictions
from covpool.training.splits import split_off

VAL_FRACTION = 0.2
# A training step computes the network once forward, and about twice as much backward.
STEP_OVER_FORWARD = 3


@dataclass(frozen=True)
class Fitted:
    """The result of :func:`fit`.

    Attributes:
        folder: folder with ``bundle``, ``report.html``, ``results.json`` and the predictions of every head.
        metrics: contents of ``results.json``: ``top1`` of the model, and ``heads`` that were compared.
    """

    folder: Path
    metrics: dict[str, Any]

    @property
    def model(self) -> PooledClassifier:
        """The model, loaded from the bundle."""
        return load_model(self.folder / "bundle")

    @property
    def report(self) -> Path:
        """The page to open in a browser."""
        return self.folder / PAGE


def fit(
    data: str | Path,
    out: str | Path | None = None,
    options: FitOptions | None = None,
    *,
    log: Callable[[str], None] | None = None,
    progress: Progress | None = None,
    **fields: Any,
) -> Fitted:
    """Fit a model to a folder of images, and compare covariance pooling with average pooling.

    A frozen backbone computes the vectors of all images in one pass, and linear classifiers are solved in
    closed form. Without test and val images, accuracy is measured by cross-validation. Call it again to
    resume after an interruption.

    Args:
        data: a folder of classes, with or without train, val and test, or any other source of images.
        out: folder of the results (default: ``runs/`` and the name of the data).
        options: the network, the heads, and fine-tuning.
        log: called with a line at the start of each stage, instead of printing it.
        progress: called with the name of the counted items, the number done and the total, instead of
            printing them.
        **fields: fields of :class:`FitOptions`, such as ``dim=64``.

    Example:
        >>> covpool.fit("birds").metrics["top1"]  # doctest: +SKIP
        0.699
    """
    options = (options or FitOptions()).changed(**fields)
    data = str(data) if "://" in str(data) else os.path.normpath(data)
    folder = Path(out) if out is not None else default_folder(data)
    with joined_processes(options.device, WAIT) as processes, NamedProgress() as shown, ExitStack() as stack:
        processes.by_first(lambda: str(stack.enter_context(options.hold(folder, data))))
        chosen = options.changed(keep_sums=options.keep_sums or (folder / SUMS).exists())
        watching = (log or shown.log, progress or shown)
        return processes.together(lambda: _Fitting(data, chosen, folder, *watching, processes)).run()


# Minutes that processes wait for the first one, which solves and measures alone.
WAIT = 240.0


class _Fitting(FrozenPass):
    """A call of :func:`fit`."""

    def run(self) -> Fitted:
        self._check()
        splits = ", ".join(f"{split} {len(images):,}" for split, images in self.sets.items())
        total = counted(sum(map(len, self.sets.values())), "image")
        self._stage(1, f"pool {total} of {counted(len(self.classes), 'class')} ({splits})")
        self.started = time.monotonic()
        if self.fixed:
            self.prepare_frozen()
        self.announce_test()
        self.processes.by_first(lambda: self.options.note(self.folder, self.data))
        if not self.fixed:
            return Fitted(self.folder, self._finish({}, {}, {}))
        sums = self.summed()
        self.pass_seconds = None if self.is_resumed else time.monotonic() - self.started
        self._stage(2, f"solve {' and '.join(self.fixed)}")
        solutions = self.processes.by_first(lambda: self._solutions(sums))
        predictions: dict[str, Mapping[str, Predictions]] = {
            split: self.predicted(solutions, split) for split in ("val", "test") if split in self.sets
        }
        self.gather_problems()
        return Fitted(
            self.folder, self.processes.by_first(lambda: self._finish(sums, solutions, predictions))
        )

    def _check(self) -> None:
        """Raise if the options do not suit the images or the processes."""
        options = self.options
        if self.processes.world_size > 1:
            if options.engine == "ray":
                raise UsageError("--engine ray needs one process: leave out torchrun")
            if self.learned or options.finetune:
                what = "--finetune" if options.finetune else f"the head {self.learned[0]}, which is trained,"
                raise UsageError(f"{what} needs one process: leave out torchrun, or use covpool train")
        if options.keep_sums and self.learned:
            self.log(f"--keep-sums saves nothing if a trained head is the best: {', '.join(self.learned)}")
        if not options.finetune:
            return
        if "val" not in self.sets and self.train_images.group_sizes() is not None:
            raise UsageError(
                "--finetune needs validation images, and shards and Parquet files cannot be divided: write "
                "them with a split val"
            )
        begun = RunFolder(self.folder / "finetune")
        if begun.recipe.exists() and (epochs := read_recipe(begun.recipe).schedule.epochs) != options.epochs:
            raise UsageError(
                f"{begun.path} was begun with --epochs {epochs}: use the same number, or another --out"
            )

    def _solutions(self, sums: Mapping[str, Sums]) -> dict[str, Solution]:
        return {head: self._solved(head, of_head) for head, of_head in sums.items()}

    def _solved(self, head: str, sums: Sums) -> Solution:
        progress = partial(self.progress, f"regularization strengths of {head}")
        return solve(sums, balance=self.options.balance, progress=progress)

    def _finish(
        self,
        sums: Mapping[str, Sums],
        solutions: Mapping[str, Solution],
        predictions: Mapping[str, Mapping[str, Predictions]],
    ) -> dict[str, Any]:
        """Compare the heads, save the best one, fine-tune it if asked, and write the report."""
        rows = self._measured(solutions, dict(predictions))
        if self.learned:
            rows += self._trained()
        if not self.fixed:  # the pass and the training of heads are not told apart
            self.pass_seconds = time.monotonic() - self.started
        self._add_differences(rows)
        best = max(rows, key=lambda row: row["held_out"])
        if best["head"] in self.fixed:
            self._save_best(best["head"], solutions[best["head"]], sums[best["head"]], best)
        else:
            copy_bundle(self.folder / "probe" / "heads" / best["head"], self.folder / "bundle")
            if self.options.keep_sums:
                remove_folder(self.folder / SUMS)  # of an earlier fit in this folder
                self.log(f"    no sums are saved: the best head, {best['head']}, is trained")
        return self._report(rows, best, self._suspects(rows, solutions))

    def _suspects(
        self, rows: Sequence[Mapping[str, Any]], solutions: Mapping[str, Solution]
    ) -> Suspects | None:
        """Return the training images that the best solved head assigns to another class."""
        solved = [row for row in rows if row["head"] in solutions]
        if not solved:
            return None
        best = max(solved, key=lambda row: row["held_out"])
        return Suspects(self.train_images, self.folded(solutions[best["head"]]))

    def _measured(
        self, solutions: Mapping[str, Solution], predictions: dict[str, Mapping[str, Predictions]]
    ) -> list[dict[str, Any]]:
        """Write the predictions of every solved head, and return its row."""
        if self.split == FOLDED:
            predictions[FOLDED] = {head: self.folded(solution) for head, solution in solutions.items()}
        rows = []
        for head, solution in solutions.items():
            measured = predictions[self.split][head]
            write_predictions(self._file(head), measured, self.measured)
            chosen = predictions["val"][head] if "val" in predictions else None
            rows.append(
                {
                    "head": head,
                    "solver": solution.kind,
                    "strength": solution.strength,
                    "seeds": None,
                    "vector": int(solution.weight.shape[1]),
                    "held_out": solution.accuracy if chosen is None else _accuracy(chosen),
                    "top1": _accuracy(measured),
                }
            )
        return rows

    def _file(self, head: str) -> Path:
        return make_folder(self.folder / "predictions") / f"{head}.csv"

    def _trained(self) -> list[dict[str, Any]]:
        """Train the heads that have more to learn than a classifier, and return their rows."""
        self._stage(2, f"train {' and '.join(self.learned)}")
        self.probing = Probing(
            self.data,
            self.options.probe(self.learned),
            self.folder / "probe",
            self.folder / "features",
            max_cache=20.0,
            layout="auto",
            log=self.log,
            progress=self.progress,
            device=self.device,
        )
        probed = self.probing.run().record
        key = "test" if self.split == "test" else "val"
        return [
            {
                "head": head["head"],
                "solver": "trained",
                "strength": None,
                "seeds": head["seeds"],
                "vector": head["vector"],
                "held_out": head["val"]["top1"]["mean"],
                "top1": head[key]["top1"]["mean"],
            }
            for head in probed["heads"]
        ]

    def _right(self, row: Mapping[str, Any]) -> dict[str, float]:
        """Return for each image whether a head is right, or the share of its seeds that are."""
        seeds = range(row["seeds"] or 0)
        files = [self.folder / "probe" / "predictions" / f"{row['head']}-{seed}.csv" for seed in seeds]
        runs = [read_predictions(file, self.classes) for file in files or [self._file(row["head"])]]
        return dict(zip(runs[0].names, np.mean([run.right for run in runs], axis=0).tolist(), strict=True))

    def _add_differences(self, rows: Sequence[dict[str, Any]]) -> None:
        baseline = next((self._right(row) for row in rows if row["head"] == AVERAGE), None)
        for row in rows:
            row["over_gap"] = None
            if baseline is not None and row["head"] != AVERAGE:
                ours = self._right(row)
                names = [name for name in ours if name in baseline]
                both = (np.array([right[name] for name in names]) for right in (ours, baseline))
                row["over_gap"] = paired_difference(*both)

    def _save_best(self, head: str, solution: Solution, sums: Sums, row: Mapping[str, Any]) -> None:
        """Save the model of a solved head, and its sums if asked."""
        model = self.solved(head, solution)
        recipe = {"protocol": PROTOCOL, **asdict(self.options)}
        metrics = {"held_out": solution.accuracy, "top1": row["top1"]}
        save_model(model, self.folder / "bundle", metrics=metrics, recipe=recipe)
        if self.options.keep_sums:
            sums.identity = identity_of(model)
            names = ("balance", "batch_size", "compile")
            kept = {"head": head} | {name: getattr(self.options, name) for name in names}
            size = save_sums(self.folder / SUMS, sums, kept)
            self.log(f"    sums of the training images: {human(size, 'B')} in {self.folder / SUMS}")

    def _finetuned(self, head: str) -> dict[str, Any]:
        """Train the whole network from a head, and return whether it became better."""
        start, out = self.folder / "start", self.folder / "finetune"
        options = self.options
        epochs = counted(options.epochs, "epoch")
        self._stage(3, f"fine-tune {self.probe_options.model} from {head}, {epochs}")
        if (seconds := self._estimate()) is not None:
            self.log(f"    about {duration(seconds)}")
        if not (start / CARD).exists():
            self._save_start(head, start)
        before = read_card(start).metrics["val"]["top1"]
        trained = len(self.train_images) * (1 if "val" in self.sets else 1 - VAL_FRACTION)
        run = train_recipe(
            read_recipe(
                None,
                {
                    "data.path": self.data,
                    "data.val_fraction": VAL_FRACTION,
                    "data.workers": options.workers,
                    # At least four steps per epoch.
                    "batch_size": max(1, min(32, int(trained) // 4)),
                    "weights.bundle": str(start),
                    "schedule.epochs": options.epochs,
                    "schedule.head_first": 0.0,
                    "loop.device": options.device,
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

    def _save_start(self, head: str, folder: Path) -> None:
        """Save a bundle to fine-tune from: a head that was solved or trained without validation images."""
        if head in self.learned:
            self.probing.save_start(head, folder)
            return
        aside = np.zeros(0, dtype=np.int64)
        if "val" not in self.sets:
            aside = split_off(self.train_images, VAL_FRACTION)[1].indices
        solution = self._solved(head, self.summed(aside.tolist())[head])
        split = "val" if "val" in self.sets else "train"
        predictions = self.predicted({head: solution}, split)[head]
        chosen = np.isin(predictions.ids, aside) | (split == "val")
        if not chosen.any():
            raise UsageError("no validation image is readable: run 'covpool check'")
        recipe = {"protocol": PROTOCOL, **asdict(self.options)}
        metrics = {"val": {"top1": float((predictions.labels == predictions.predicted)[chosen].mean())}}
        save_model(self.solved(head, solution), folder, metrics=metrics, recipe=recipe)

    def _estimate(self) -> float | None:
        """Return about how long fine-tuning takes, by the pass over the training images if it ran at once."""
        if self.pass_seconds is None:
            return None
        return float(round(self.options.epochs * self.pass_seconds * STEP_OVER_FORWARD))

    def _report(
        self, rows: list[dict[str, Any]], best: Mapping[str, Any], suspects: Suspects | None
    ) -> dict[str, Any]:
        """Fine-tune if asked, and write the report."""
        tuned = self._finetuned(best["head"]) if self.options.finetune else None
        self._stage(self.stages, "write the report")
        is_tuned = bool(tuned and tuned["is_best"])
        split = self.split
        if is_tuned:
            copy_bundle(self.folder / "finetune" / "bundle", self.folder / "bundle")
            split = "val" if split == FOLDED else split  # one network, validated on images set aside
        file = self.folder / "finetune" / "predictions.csv" if is_tuned else self._file(best["head"])
        if best["head"] in self.learned and not is_tuned:
            file = self.folder / "probe" / "predictions" / f"{best['head']}-0.csv"
        predictions = read_predictions(file, self.classes)
        record = {
            "protocol": PROTOCOL,
            **new_results(PACKAGES, asdict(self.options) | {"data": self.data}, self.device.type, seed=0),
            "model": self.probe_options.model,
            "images": {split: len(images) for split, images in self.sets.items()},
            "problems": self.problems.write(self.sets, self.folder / "problems.csv"),
            "split": split,
            "doubtful_labels": None if suspects is None else len(suspects.order),
            "heads": rows,
            "best": best["head"],
            "finetuned": tuned,
            "top1": float(predictions.right.mean()),
            "finetune_seconds": self._estimate(),
        }
        if suspects is not None:
            suspects.write_table(self.sets, self.folder, self.log)
        write_page(self.folder, record, predictions, self.measured, suspects, is_tuned=is_tuned)
        write_results(self.folder, record)
        for name in (WORK, "start"):
            remove_folder(self.folder / name)
        return record

    def _stage(self, number: int, what: str) -> None:
        self.log(f"{number}/{self.stages} {what}")


def _accuracy(predictions: Predictions) -> float:
    if not len(predictions.ids):
        raise UsageError("no image to measure the accuracy on is readable: run 'covpool check'")
    return float((predictions.labels == predictions.predicted).mean())
