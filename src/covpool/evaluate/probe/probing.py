"""Train heads on a frozen backbone, each with several seeds, and save the best of them as a bundle.

The best head is chosen on val, or on images that each seed sets aside, never on test. Without val and test
the heads are compared by cross-validation: each image is predicted by a head that was trained without it.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from covpool.data.image_set import ImageSet
from covpool.data.order import number
from covpool.data.sources import open_splits
from covpool.errors import UsageError
from covpool.evaluate.probe.features import (
    Extractor,
    fit_head,
    fit_svms,
    frozen_config,
    head_outputs,
    svm_scores,
)
from covpool.evaluate.probe.options import ProbeOptions, best_trial, trial_settings
from covpool.evaluate.probe.record import PROTOCOL, ProbeFolder, new_record, summarized
from covpool.evaluate.results import mark_folder, prepare_folder
from covpool.evaluate.svm.classifier import check_every_class
from covpool.inference.forward import Result
from covpool.inference.place import check_room
from covpool.inference.store import CachedFeatures, FeatureStore
from covpool.models.config import ModelConfig, arrays_of, head_config
from covpool.models.create import build_model
from covpool.models.model import PooledClassifier
from covpool.models.saving import save_model
from covpool.processes import joined_processes
from covpool.storage.folders import check_outside, held
from covpool.terminal import human
from covpool.training.metrics import Predictions, join_predictions, predictions_of
from covpool.training.splits import check_classes, fold_numbers, split_off

LOGGER = logging.getLogger("covpool")
GIGABYTE = 1e9
# Folds of cross-validation.
FOLDS = 5

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Probed:
    """The result of :func:`probe`.

    Attributes:
        folder: results folder: ``results.json``, ``table.md``, ``predictions`` of every head and seed, a
            bundle of every head in ``heads``, and the best one in ``bundle``.
        record: contents of ``results.json``.
    """

    folder: Path
    record: dict[str, Any]


def probe(
    data: str | Path,
    options: ProbeOptions,
    *,
    out: str | Path = "probe",
    cache: str | Path = "probe-cache",
    max_cache: float = 20.0,
    layout: str = "auto",
    log: Callable[[str], None] = LOGGER.info,
    progress: Progress = lambda what, done, total: None,
) -> Probed:
    """Train heads on a frozen backbone. If interrupted, call it again to resume.

    Args:
        data: images with train, and with test or val; without both, heads are compared by cross-validation.
        options: the backbone, the heads and their training.
        out: results folder.
        cache: folder of cached features, shared with other calls.
        max_cache: maximum size of the features in gigabytes.
        layout: format of the data, as for :func:`covpool.data.sources.open_images`.
        log: called with the size of the features before they are computed.
        progress: called with the name of the counted items, the number done and the total.

    Raises:
        ValueError: if there are no training images, or the features exceed ``max_cache``.
    """
    with joined_processes(options.device) as processes:
        if processes.world_size > 1:
            raise UsageError("covpool probe uses one process: start it without torchrun")
        return Probing(
            data, options, Path(out), Path(cache), max_cache, layout, log, progress, processes.device
        ).run()


class Probing:
    """A call of :func:`probe`: its images, features and results."""

    def __init__(
        self,
        data: str | Path,
        options: ProbeOptions,
        out: Path,
        cache: Path,
        max_cache: float,
        layout: str,
        log: Callable[[str], None],
        progress: Progress,
        device: torch.device,
    ) -> None:
        self.options, self.device, self.max_cache = options, device, max_cache
        self.log, self.progress = log, progress
        # By head: its options after tuning, and the accuracies of its best trial.
        self.tuned: dict[str, ProbeOptions] = {}
        self.held_out: dict[str, dict[str, float]] = {}
        self.doing = ""
        self.sets: dict[str, ImageSet] = {
            str(name): images for name, images in open_splits(data, layout).items()
        }
        if "train" not in self.sets:
            raise UsageError(f"{data} has no images to train on; it has {', '.join(self.sets)}")
        self.train_images: ImageSet = self.sets["train"]
        check_classes(self.train_images.classes, str(data))
        self._check_val_fraction()
        self.backbone = ModelConfig(
            options.model,
            num_classes=len(self.train_images.classes),
            layers=options.layers,
            fusion=options.fusion,
            image_size=options.image_size,
            preprocessing=options.preprocessing,
        )
        self.folder = ProbeFolder(out)
        self.cache = cache
        self.arguments = dataclasses.asdict(options) | {"data": str(data)}
        check_outside(cache, data, "features", "--cache")
        prepare_folder(out, PROTOCOL, str(data))
        self.folder.check(self.arguments)

    def _check_val_fraction(self) -> None:
        options = self.options
        if "val" in self.sets or not (options.tune or "test" in self.sets):
            return
        if not options.val_fraction:
            if options.tune:
                raise UsageError("--tune needs held-out images: use --val-fraction above 0, or a folder val")
            return
        try:
            split_off(self.train_images, options.val_fraction)
        except ValueError as error:
            without = "" if options.tune else "; --val-fraction 0 chooses no best head"
            raise UsageError(f"{error}{without}") from error

    def run(self) -> Probed:
        """Train the heads that have no results yet."""
        with held(self.folder.path):
            self.folder.check(self.arguments)  # again: another process may have finished meanwhile
            mark_folder(self.folder.path, PROTOCOL)  # features may be written into it first
            return self._run()

    def _run(self) -> Probed:
        features, names = self._features()
        self.features = features
        images = {split: len(some) for split, some in self.sets.items()}
        record = new_record(self.arguments, images, self.device.type)
        record["features"] = names
        record["extraction_seconds"] = {split: round(cached.seconds, 1) for split, cached in features.items()}
        record["images_left_out"] = {
            split: images[split] - len(cached.usable) for split, cached in features.items()
        }
        record |= self.folder.earlier(names)
        self.folder.write(record)  # before any bundle, so that a rerun accepts the folder
        for head in self.options.heads:
            if self.options.tune:
                self._tune(head, record)
            for seed in range(self.options.seeds):
                if not any((row["head"], row["seed"]) == (head, seed) for row in record["rows"]):
                    # Each row stores its commit, because earlier rows may come from older code.
                    commit = record["source"]["commit"]
                    record["rows"].append(self._row(head, seed, commit, features))
                    self.folder.write(record)
        record |= summarized(record)
        self.folder.add_differences(record["heads"], tuple(self.train_images.classes))
        self.folder.write(record)
        if record["best"] is not None:
            self.folder.keep_best(record["best"])
        return Probed(self.folder.path, record)

    def _features(self) -> tuple[dict[str, CachedFeatures], dict[str, str]]:
        """Return the features of every split and the names of their stores, after a check of disk space."""
        model = self._built(frozen_config(self.backbone))
        self.expands = model.expansion is not None
        arrays = set[str]().union(*(arrays_of(self._config(head)) for head in self.options.heads))
        extractor = Extractor(model, self.options, self.cache, arrays, self.device)
        self._check_heads()
        stores = {
            split: extractor.store(images, lambda done, total: self.progress("images hashed", done, total))
            for split, images in self.sets.items()
        }
        names = {split: store.folder.name for split, store in stores.items()}
        self.folder.earlier(names)
        self._check_room(stores)
        features = {
            split: extractor.extract(
                self.sets[split], store, lambda done, total: self.progress("images", done, total)
            )
            for split, store in stores.items()
        }
        if self.options.svm_seeds:
            train = features["train"]
            check_every_class(train.labels[train.usable], self.train_images.classes)
        return features, names

    def _check_heads(self) -> None:
        """Build each head on the meta device, to find errors before hours of feature extraction."""
        for head in self.options.heads:
            with torch.device("meta"):
                build_model(self._config(head))

    def _check_room(self, stores: dict[str, FeatureStore]) -> None:
        size = sum(store.bytes() for store in stores.values())
        if size / GIGABYTE > self.max_cache:
            raise UsageError(
                f"features would take {size / GIGABYTE:.1f} GB, more than --max-cache {self.max_cache:g}: "
                "use a larger --max-cache, a smaller --image-size, or only --heads gap, which needs no maps"
            )
        self.cache.mkdir(parents=True, exist_ok=True)
        missing = sum(store.missing_bytes() for store in stores.values())
        check_room(self.cache, missing, f"features take {human(missing, 'B')}", "--cache")
        shape = "×".join(map(str, max(stores["train"].shapes.values(), key=math.prod)))
        self.log(f"features take {human(size, 'B')} in {self.cache}: {shape} values per image and flip")

    def _tune(self, head: str, record: dict[str, Any]) -> None:
        """Choose the learning rate and the dropout rate of a head, by trials on held-out images."""
        done = [trial for trial in record["trials"] if trial["head"] == head]
        settings = trial_settings(self.options, head)
        for setting in settings[len(done) :]:
            self.doing, started = f"trial {len(done) + 1} of {len(settings)}", time.monotonic()
            self.tuned[head] = dataclasses.replace(self.options, **setting._asdict())
            shares = self._validated(head, 0)[1]
            seconds = round(time.monotonic() - started, 1)
            done.append({"head": head, **setting._asdict(), "val": shares, "seconds": seconds})
            record["trials"].append(done[-1])
            self.folder.write(record)
        best = best_trial(done)
        self.tuned[head] = dataclasses.replace(self.options, lr=best["lr"], drop_rate=best["drop_rate"])
        self.held_out[head] = best["val"]

    def _row(
        self, head: str, seed: int, commit: str | None, features: dict[str, CachedFeatures]
    ) -> dict[str, Any]:
        """Train and evaluate a head with one seed; save the bundle of the first seed."""
        train, val, test = features["train"], features.get("val"), features.get("test")
        row: dict[str, Any] = {"head": head, "seed": seed, "commit": commit, "val": None, "test": None}
        row |= self._options(head).setting(head)._asdict()
        self.doing, started = f"seed {seed}", time.monotonic()
        predictions: Predictions | None = None
        images = self.train_images
        if val is None and test is None:
            row["val"], predictions = self._cross_validated(head, seed, train)
        elif val is None and self.options.val_fraction:
            if not self.options.tune:
                row["val"] = self._validated(head, seed)[1]
            elif seed == 0:  # the best trial has the same seed
                row["val"] = self.held_out[head]
        row["choosing_seconds"], started = round(time.monotonic() - started, 1), time.monotonic()
        model = self._trained(head, seed, train, train.usable)
        row["seconds"] = round(time.monotonic() - started, 1)
        if val is not None:
            row["val"], predictions = _shares(model, val, val.usable)
            images = self.sets["val"]
        if test is not None:
            row["test"], predictions = _shares(model, test, test.usable)
            images = self.sets["test"]
        if predictions is not None:
            self.folder.write_predictions(head, seed, predictions, images)
        row["parameters"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
        row["vector"] = model.head_hidden_size
        if seed < self.options.svm_seeds and test is not None:
            row["svm"] = self._svm(model, train, test)
        if seed == 0:
            self._save(model, self.folder.head(head), head, row)
        return row

    def _validated(self, head: str, seed: int) -> tuple[PooledClassifier, dict[str, float]]:
        """Train without the validation images, and return the head and its accuracies on them."""
        train, val = self.features["train"], self.features.get("val")
        if val is not None:
            model = self._trained(head, seed, train, train.usable)
            return model, _shares(model, val, val.usable)[0]
        rest, aside = split_off(self.train_images, self.options.val_fraction, seed)
        model = self._trained(head, seed, train, np.intersect1d(rest.indices, train.usable))
        return model, _shares(model, train, np.intersect1d(aside.indices, train.usable))[0]

    def _cross_validated(
        self, head: str, seed: int, train: CachedFeatures
    ) -> tuple[dict[str, float], Predictions]:
        """Predict each fold by a head that is trained on the others."""
        fold_of = fold_numbers(self.train_images, FOLDS, seed)[train.usable]
        parts, images, shares = [], 0, {"top1": 0.0, "top1_flip": 0.0}
        for fold in np.unique(fold_of):
            trial = self._trained(head, seed, train, train.usable[fold_of != fold])
            measured, predictions = _shares(trial, train, train.usable[fold_of == fold])
            parts.append(predictions)
            images += len(predictions.ids)
            shares = {name: shares[name] + measured[name] * len(predictions.ids) for name in shares}
        return {name: total / images for name, total in shares.items()}, join_predictions(parts)

    def save_start(self, head: str, folder: Path) -> None:
        """Save a bundle to fine-tune from: a head that was trained without the validation images.

        The features are those of :meth:`run`.
        """
        model, shares = self._validated(head, 0)
        self._save(model, folder, head, {"val": shares})

    def _save(self, model: PooledClassifier, folder: Path, head: str, row: dict[str, Any]) -> None:
        model.classes = tuple(self.train_images.classes)
        options = self._options(head)
        recipe = {"protocol": "probe", **dataclasses.asdict(options), **options.setting(head)._asdict()}
        save_model(model, folder, metrics=row, recipe=recipe)

    def _svm(self, model: PooledClassifier, train: CachedFeatures, test: CachedFeatures) -> dict[str, Any]:
        started = time.monotonic()
        scores = svm_scores(model, fit_svms(model, train, self.folder.path), test)
        shares = right_answers([(scores, test.labels[test.usable])])
        return {**shares, "seconds": round(time.monotonic() - started, 1)}

    def _trained(
        self, head: str, seed: int, cached: CachedFeatures, ids: NDArray[np.int64]
    ) -> PooledClassifier:
        torch.manual_seed(number("weights", seed))
        model = self._built(self._config(head)).to(self.device)

        def log(done: int, total: int) -> None:
            self.progress(f"steps of {head}, {self.doing}", done, total)

        fit_head(model, cached, ids, self._options(head), seed, log)
        return model

    def _options(self, head: str) -> ProbeOptions:
        """Return the options of a head: with ``tune``, those of its current or best trial."""
        return self.tuned.get(head, self.options)

    def _config(self, head: str) -> ModelConfig:
        options = self._options(head)
        drop_rate = options.setting(head).drop_rate
        return head_config(head, self.backbone, options.dim, drop_rate, expands=self.expands)

    def _built(self, config: ModelConfig) -> PooledClassifier:
        options = self.options
        return build_model(
            config, pretrained=options.pretrained, checkpoint_path=options.weights, key_map=options.key_map
        )


def _shares(
    model: PooledClassifier, cached: CachedFeatures, ids: NDArray[np.int64]
) -> tuple[dict[str, float], Predictions]:
    """Return the accuracies, of the image alone and with its flip, and the predictions of the image alone."""
    predicted: list[Predictions] = []

    def parts() -> Iterator[tuple[Tensor, NDArray[np.int64]]]:
        for some, logits in head_outputs(model, cached, ids):
            predicted.append(predictions_of(Result(some, cached.labels[some], {"logits": logits[:1]}, ())))
            yield logits, cached.labels[some]

    shares = right_answers(parts())
    return shares, join_predictions(predicted)


def right_answers(parts: Iterable[tuple[Tensor, NDArray[np.int64]]]) -> dict[str, float]:
    """Return top-1 accuracy of the image alone, and with scores averaged over its horizontal flip.

    Args:
        parts: batches of scores ``(views, images, classes)`` and their labels.
    """
    images, alone, both = 0, 0, 0
    for scores_VBK, labels in parts:
        targets = torch.from_numpy(labels)
        images += len(targets)
        alone += int((scores_VBK[0].argmax(dim=1) == targets).sum())
        both += int((scores_VBK.mean(dim=0).argmax(dim=1) == targets).sum())
    if not images:
        raise UsageError("no image to compare the heads on is readable: run 'covpool check'")
    return {"top1": alone / images, "top1_flip": both / images}
