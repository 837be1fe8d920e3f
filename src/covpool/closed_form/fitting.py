"""From a folder of images to a model: pool, solve, compare heads, fine-tune if asked, write a report."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shlex
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from covpool.closed_form.heads import (
    HeadVectors,
    PooledHeads,
    basis_of,
    fixed_config,
    frozen_model,
    is_fixed,
    principal_directions,
    set_basis,
    solved_model,
)
from covpool.closed_form.kept import basis_of_fit, identity_of, save_sums
from covpool.closed_form.options import FitOptions
from covpool.closed_form.solve import Solution, solve
from covpool.closed_form.sums import Sums
from covpool.closed_form.vectors import Sample, Vectors, compute_vectors
from covpool.data.check import REMEDIES, write_report
from covpool.data.division import split_off
from covpool.data.image_set import ImageSet
from covpool.data.look import Problem
from covpool.data.sources import open_splits
from covpool.errors import UsageError
from covpool.evaluate.probe.options import AVERAGE
from covpool.evaluate.probe.probing import Probing
from covpool.evaluate.probe.record import PACKAGES, copy_bundle, difference, paired_difference
from covpool.evaluate.results import mark_folder, prepare_folder, write_results
from covpool.inference.forward import Result, prepare
from covpool.inference.options import Running
from covpool.models.bundle import load_model, read_card
from covpool.models.card import CARD, versions
from covpool.models.config import ModelConfig
from covpool.models.model import PooledClassifier
from covpool.models.saving import save_model
from covpool.processes import joined_processes
from covpool.provenance.machine import machine_name
from covpool.provenance.origin import new_results
from covpool.storage.files import read_json, replace_file
from covpool.storage.folders import held, make_folder, remove_folder
from covpool.terminal import counted, duration, human
from covpool.training.metrics import Predictions, join_predictions, predictions_of, widest_interval
from covpool.training.recipe_files import read_recipe
from covpool.training.report.pages import PAGE, SPLITS, environment, next_commands, prediction_values
from covpool.training.report.record import read_predictions
from covpool.training.report.rendering import render
from covpool.training.report.thumbnails import looks
from covpool.training.run import train_recipe
from covpool.training.run_folder import write_predictions
from covpool.training.splits import check_classes

LOGGER = logging.getLogger("covpool")
PROTOCOL = "fit"
FOLDED = "cross-validation"
VAL_FRACTION = 0.2
# A training step computes the network once forward, and about twice as much backward.
STEP_OVER_FORWARD = 3
Progress = Callable[[str, int, int], None]


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
    log: Callable[[str], None] = LOGGER.info,
    progress: Progress = lambda what, done, total: None,
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
        log: called with a line at the start of each stage.
        progress: called with the name of the counted items, the number done and the total.
        **fields: fields of :class:`FitOptions`, such as ``dim=64``.

    Example:
        >>> covpool.fit("birds").metrics["top1"]  # doctest: +SKIP
        0.696
    """
    options = dataclasses.replace(options or FitOptions(), **fields)
    folder = Path(out) if out is not None else default_folder(data)
    prepare_folder(folder, PROTOCOL, str(data))
    with held(folder):
        _check_options(folder, asdict(options) | {"data": str(data)})
        mark_folder(folder, PROTOCOL)
        with joined_processes(options.device) as processes:
            return _Fitting(str(data), options, folder, log, progress, processes.device).run()


# Options that may differ when a fit is resumed or repeated in its folder.
FREE = ("finetune", "epochs", "workers", "device", "keep_sums")
OPTIONS = "options.json"


def _check_options(folder: Path, arguments: dict[str, Any]) -> None:
    """Raise if the folder is of a fit with other options; else note them."""
    given = json.loads(json.dumps({name: arguments[name] for name in arguments if name not in FREE}))
    if (folder / OPTIONS).exists():
        before = read_json(folder / OPTIONS)
        for name, value in given.items():
            if before.get(name) != value:
                raise UsageError(f"{folder} has results with {name} {before.get(name)!r}: use another --out")
    else:
        replace_file(folder / OPTIONS, (json.dumps(given, indent=2) + "\n").encode())


def default_folder(data: str | Path) -> Path:
    """Return ``runs/`` and the name of the data."""
    path = Path(os.path.abspath(data))  # not resolved: a link keeps its own name
    return Path("runs") / ((path.stem if path.is_file() else path.name) or "fit")


class _Fitting:
    """A call of :func:`fit`."""

    def __init__(
        self,
        data: str,
        options: FitOptions,
        folder: Path,
        log: Callable[[str], None],
        progress: Progress,
        device: torch.device,
    ) -> None:
        self.data, self.options, self.folder, self.device = data, options, folder, device
        self.log, self.progress = log, progress
        self.probe_options = options.probe()
        self.fixed = tuple(head for head in options.heads if is_fixed(head))
        self.learned = tuple(head for head in options.heads if head not in self.fixed)
        self.running = Running(options.batch_size, options.workers, options.device)
        self.stages = 3 + bool(options.finetune)
        self.sets: dict[str, ImageSet] = {
            str(split): found for split, found in open_splits(data, "auto").items()
        }
        if "train" not in self.sets:
            raise UsageError(f"{data} has no images to train on; it has {', '.join(self.sets)}")
        self.train_images = self.sets["train"]
        self.classes = tuple(self.train_images.classes)
        check_classes(self.classes, data)
        self.split, self.measured = measured_on(self.sets)
        self.backbone = ModelConfig(
            self.probe_options.model, num_classes=len(self.classes), image_size=options.image_size
        )
        self.problems = PassProblems()
        self.task = HeadVectors(self.fixed, options.dim)

    def run(self) -> Fitted:
        splits = ", ".join(f"{split} {len(images):,}" for split, images in self.sets.items())
        total = counted(sum(map(len, self.sets.values())), "image")
        self._stage(1, f"pool {total} of {counted(len(self.classes), 'class')} ({splits})")
        self._announce_test()
        started = time.monotonic()
        rows: list[dict[str, Any]] = []
        if self.fixed:
            self._prepare_frozen()
            sums = self._sums(self.pooled("train"))
            self.pass_seconds = time.monotonic() - started
            self._stage(2, f"solve {' and '.join(self.fixed)}")
            solutions = {head: solve(found, balance=self.options.balance) for head, found in sums.items()}
            rows += self._measured(solutions)
        rows += self._trained() if self.learned else []
        self._add_differences(rows)
        best = max(rows, key=lambda row: row["held_out"])
        if best["head"] in self.fixed:
            self._save_best(best["head"], solutions[best["head"]], sums[best["head"]], best)
        else:
            copy_bundle(self.folder / "probe" / "heads" / best["head"], self.folder / "bundle")
        return self._finish(rows, best)

    def _stage(self, number: int, what: str) -> None:
        self.log(f"{number}/{self.stages} {what}")

    def _announce_test(self) -> None:
        """Print which images measure the accuracy, and how precise it will be."""
        if self.split == FOLDED:
            self.log(
                "    no test images: 5-fold cross-validation; each image is predicted by a classifier that "
                "was solved without it"
            )
        self.log(
            f"    accuracy is measured on {counted(len(self.measured), 'image')}: "
            f"its 95 % interval is up to ±{widest_interval(len(self.measured)):.0f} points"
        )

    def _prepare_frozen(self) -> None:
        """Save a frozen model with a basis, from a sample of the training images or from an earlier fit."""
        frozen = self.folder / "frozen"
        if (frozen / CARD).exists():
            self.model = prepare(load_model(frozen), self.device)
        else:
            model = frozen_model(self.backbone, self.fixed, self.probe_options)
            self.model = prepare(model, self.device)
        self.heads = PooledHeads(self.task, self.model)
        self.sample: Sample | None = None
        if self.options.basis is not None:
            set_basis(self.model, basis_of_fit(Path(self.options.basis), len(basis_of(self.model))))
        elif self.heads.needs_basis:
            self.sample = Sample(
                self.model,
                self.train_images,
                self.running,
                lambda done, total: self.progress("images for the basis", done, total),
            )
            set_basis(self.model, principal_directions(self.sample.positions(), len(basis_of(self.model))))
        if not (frozen / CARD).exists():
            save_model(self.model, frozen)
        self.heads = PooledHeads(self.task, self.model)
        ends = np.cumsum(list(self.heads.widths.values()))
        self.columns = {
            head: slice(int(end) - width, int(end))
            for (head, width), end in zip(self.heads.widths.items(), ends, strict=True)
        }

    def pooled(self, split: str) -> Iterator[Vectors]:
        """Yield the vectors of a split, and note its problems."""
        images, numbers = self.sets[split], None
        if split == "train" and self.sample is not None:
            numbers = np.setdiff1d(np.arange(len(images)), self.sample.numbers)
            yield self.problems.noted(split, self.sample.vectors(self.heads))
        for part in compute_vectors(
            self.folder / "frozen",
            images,
            self.folder / "vectors" / split,
            self.task,
            self.running,
            lambda done, total: self.progress(f"images of {split}", done, total),
            numbers,
        ):
            yield self.problems.noted(split, part)

    def _sums(self, parts: Iterable[Vectors], without: Collection[int] = ()) -> dict[str, Sums]:
        """Return the sums of every head, without some images."""
        found = {head: Sums("", self.classes, width) for head, width in self.heads.widths.items()}
        left_out = np.fromiter(without, dtype=np.int64)
        for part in parts:
            kept = torch.from_numpy(~np.isin(part.ids, left_out))
            for head, sums in found.items():
                sums.add(part.rows(self.train_images, self.columns[head])[kept])
        return found

    def _measured(self, solutions: Mapping[str, Solution]) -> list[dict[str, Any]]:
        """Write the predictions of every head, and return its row."""
        predictions: dict[str, dict[str, Predictions]] = {
            split: self._predicted(solutions, split) for split in ("val", "test") if split in self.sets
        }
        if self.split == FOLDED:
            predictions[FOLDED] = {head: self._folded(found) for head, found in solutions.items()}
        rows = []
        for head, found in solutions.items():
            measured = predictions[self.split][head]
            write_predictions(self._file(head), measured, self.measured)
            chosen = predictions["val"][head] if "val" in predictions else None
            rows.append(
                {
                    "head": head,
                    "solver": found.kind,
                    "strength": found.strength,
                    "seeds": None,
                    "vector": int(found.weight.shape[1]),
                    "held_out": found.accuracy if chosen is None else _accuracy(chosen),
                    "top1": _accuracy(measured),
                }
            )
        return rows

    def _predicted(self, solutions: Mapping[str, Solution], split: str) -> dict[str, Predictions]:
        found: dict[str, list[Predictions]] = {head: [] for head in solutions}
        for part in self.pooled(split):
            for head, one in solutions.items():
                scores = part.values[:, self.columns[head]].double() @ one.weight.T + one.bias
                found[head].append(_predictions(part.ids, self.sets[split], scores))
        return {head: join_predictions(parts) for head, parts in found.items()}

    def _folded(self, found: Solution) -> Predictions:
        """Return the predictions of images by solutions without their fold."""
        ids, content = self.problems.images["train"]
        order = np.argsort(content, kind="stable")
        place = order[np.searchsorted(content[order], found.images.numpy())]
        return join_predictions([_predictions(ids[place], self.train_images, found.held_out)])

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
        found = [read_predictions(file, self.classes) for file in files or [self._file(row["head"])]]
        return dict(zip(found[0].names, np.mean([one.right for one in found], axis=0).tolist(), strict=True))

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
        model = self._solved(head, solution)
        recipe = {"protocol": PROTOCOL, **asdict(self.options)}
        metrics = {"held_out": row["held_out"], "top1": row["top1"]}
        save_model(model, self.folder / "bundle", metrics=metrics, recipe=recipe)
        if self.options.keep_sums:
            sums.identity = identity_of(model)
            size = save_sums(self.folder / "sums", sums, head, balance=self.options.balance)
            self.log(f"    sums of the training images: {human(size, 'B')} in {self.folder / 'sums'}")

    def _solved(self, head: str, solution: Solution) -> PooledClassifier:
        config = fixed_config(head, self.backbone, self.options.dim, expands=self.model.expansion is not None)
        return solved_model(config, basis_of(self.model), solution, self.classes, self.probe_options)

    def _finetuned(self, head: str) -> dict[str, Any]:
        """Train the whole network from a head, and return whether it became better."""
        start, out = self.folder / "start", self.folder / "finetune"
        options = self.options
        epochs = counted(options.epochs, "epoch")
        self._stage(3, f"fine-tune {self.probe_options.model} from {head}, {epochs}")
        self.log(f"    about {duration(self._estimate())}")
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
        sums = self._sums(self.pooled("train"), aside.tolist())[head]
        solution = solve(sums, balance=self.options.balance)
        columns, right, count = self.columns[head], 0, 0
        images = self.sets.get("val", self.train_images)
        for part in self.pooled("val" if "val" in self.sets else "train"):
            chosen = np.isin(part.ids, aside) | ("val" in self.sets)
            scores = part.values[:, columns][torch.from_numpy(chosen)].double() @ solution.weight.T
            found = _predictions(part.ids[chosen], images, scores + solution.bias)
            right, count = right + int((found.labels == found.predicted).sum()), count + len(found.ids)
        recipe = {"protocol": PROTOCOL, **asdict(self.options)}
        metrics = {"val": {"top1": right / max(count, 1)}}
        save_model(self._solved(head, solution), folder, metrics=metrics, recipe=recipe)

    def _estimate(self) -> float:
        """Return about how long fine-tuning takes, from the time of the pass over the training images."""
        return float(round(self.options.epochs * self.pass_seconds * STEP_OVER_FORWARD))

    def _finish(self, rows: list[dict[str, Any]], best: Mapping[str, Any]) -> Fitted:
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
            "heads": rows,
            "best": best["head"],
            "finetuned": tuned,
            "top1": float(predictions.right.mean()),
            "finetune_seconds": self._estimate(),
        }
        write_page(self.folder, record, predictions, self.measured, is_tuned=is_tuned)
        write_results(self.folder, record)
        for name in ("vectors", "frozen", "start"):
            remove_folder(self.folder / name)
        return Fitted(self.folder, record)


def _predictions(ids: np.ndarray, images: ImageSet, scores_BK: Tensor) -> Predictions:
    labels = np.asarray(images.labels, dtype=np.int64)[ids]
    return predictions_of(Result(ids, labels, {"logits": scores_BK.float()[None]}, ()))


def _accuracy(predictions: Predictions) -> float:
    if not len(predictions.ids):
        raise UsageError("no image to measure the accuracy on is readable: run 'covpool check'")
    return float((predictions.labels == predictions.predicted).mean())


def measured_on(sets: Mapping[str, ImageSet]) -> tuple[str, ImageSet]:
    """Return the images on which heads are compared; all of them in cross-validation."""
    for split in ("test", "val"):
        if split in sets:
            return split, sets[split]
    return FOLDED, sets["train"]


class PassProblems:
    """Problems of the images that a pass over them finds: unreadable images, copies and leaks."""

    def __init__(self) -> None:
        self._parts: dict[str, dict[int, Vectors]] = {}

    def noted(self, split: str, part: Vectors) -> Vectors:
        """Note the contents of some images once, and return them."""
        first = int(part.ids[0]) if len(part.ids) else -1 - len(self._parts)
        self._parts.setdefault(split, {})[first] = part._replace(values=torch.empty(0))
        return part

    @property
    def images(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """For each split the numbers and the contents of its readable images."""
        return {
            split: (
                np.concatenate([part.ids for part in parts.values()]),
                np.concatenate([part.content for part in parts.values()]),
            )
            for split, parts in self._parts.items()
        }

    def write(self, sets: Mapping[str, ImageSet], file: Path) -> dict[str, int]:
        """Write the list, and return the number of problems of each kind."""
        problems = [
            Problem(name, "unreadable", error.partition(": ")[2] or error)
            for parts in self._parts.values()
            for part in parts.values()
            for name, error in part.errors
        ]
        first: dict[int, tuple[str, int]] = {}
        for split, (ids, content) in self.images.items():
            order = np.argsort(ids)
            for i, number in zip(ids[order].tolist(), content[order].tolist(), strict=True):
                if number not in first:
                    first[number] = split, i
                    continue
                its_split, other = first[number]
                kind = "duplicate"
                if its_split != split:
                    kind = "leak"
                elif sets[split].label(i) != sets[its_split].label(other):
                    kind = "two labels"
                name, twin = sets[split].name(i), sets[its_split].name(other)
                problems.append(Problem(name, kind, f"it has the bytes of {twin}"))
        write_report(problems, file)
        counts = Counter(problem.problem for problem in problems)
        return {kind: counts[kind] for kind in REMEDIES if counts[kind]}


def write_page(
    folder: Path, record: dict[str, Any], predictions: Any, images: ImageSet, *, is_tuned: bool
) -> None:
    """Write ``report.html``."""
    model = load_model(folder / "bundle")
    data = record["arguments"]["data"]
    name = Path(data.rstrip("/")).name or data
    page = render(
        "fit.html.jinja",
        title=f"{name} · {record['model']} · {record['best']}{', fine-tuned' if is_tuned else ''}",
        record=record,
        split=SPLITS.get(record["split"], ""),
        found=prediction_values(folder, predictions, images),
        table=table_cells(record),
        over=next((head["over_gap"] for head in record["heads"] if head["head"] == record["best"]), None),
        # In cross-validation other classifiers made the predictions.
        looks=looks(predictions, images, model) if record["split"] in SPLITS else [],
        commands=commands(data, folder, record),
        facts=[
            ("Network", record["model"]),
            ("Images", ", ".join(f"{SPLITS[split]} {n:,}" for split, n in record["images"].items())),
            ("Classes", f"{len(images.classes):,}"),
            *environment({**record, "machine": machine_name(record["machine"]), "versions": versions()}),
        ],
    )
    replace_file(folder / PAGE, page)


def table_cells(record: dict[str, Any]) -> list[list[str]]:
    """Return titles, and a row for each head and for fine-tuning."""
    rows = [["head", "classifier", "top-1 in %", "over gap (95 % interval)"]]
    for head in record["heads"]:
        solver = head["solver"] if head["seeds"] is None else f"trained, {counted(head['seeds'], 'seed')}"
        rows.append([head["head"], solver, f"{100 * head['top1']:.1f}", difference(head["over_gap"])])
    if tuned := record["finetuned"]:
        rows.append([f"{tuned['head']}, fine-tuned", "trained", f"{100 * tuned['top1']:.1f}", ""])
    return rows


def commands(data: str, folder: Path, record: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the commands to type next, each with its purpose."""
    found = next_commands(folder, data)
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
