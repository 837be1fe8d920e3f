"""Linear SVMs on a trained network's features, as in the fine-grained protocol."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from covpool.data.image_set import ImageSet, class_counts
from covpool.data.look import read_content
from covpool.data.sources import open_images, split_names, splits
from covpool.data.transforms import Preprocessing
from covpool.errors import UsageError
from covpool.evaluate.svm.classifier import (
    Accuracy,
    Features,
    Passing,
    calibrated,
    check_every_class,
    make_features,
    measure,
    with_svm,
)
from covpool.evaluate.svm.solvers import (
    LinearScores,
    Problem,
    bytes_in_memory,
    check_c,
    solve_in_memory,
    solve_streaming,
)
from covpool.inference.forward import open_split
from covpool.models.bundle import load_model, read_card
from covpool.models.card import Card
from covpool.models.model import PooledClassifier
from covpool.models.saving import check_replaceable, save_model
from covpool.processes import Processes, joined_processes
from covpool.storage.folders import check_outside, held
from covpool.terminal import Progresses, counted, human, silent

LOGGER = logging.getLogger("covpool")
MAX_MEMORY = 8.0  # GB


@dataclass(frozen=True)
class SVMReport:
    """The result of :func:`fit_svm`.

    Attributes:
        bundle: the new bundle.
        features: folder of the cached features, for another fit; you can delete it.
        solver: ``"LinearSVC"`` or ``"streaming"``.
        samples: number of training rows, two per image: the image and its horizontal flip.
        columns: length of a row.
        classes: number of classes.
        left_out: number of unreadable training images.
        seconds: duration of the fit alone.
        accuracy: top-1 accuracy on the test images, as fractions: ``own`` and ``own_flip`` of the network's
            own classifier, ``svm`` and ``svm_flip`` of the SVMs. With ``_flip``, scores are averaged over an
            image and its flip. ``None`` if there are no test images.
    """

    bundle: str
    features: str
    solver: str
    samples: int
    columns: int
    classes: int
    left_out: int
    seconds: float
    accuracy: Accuracy | None


def fit_svm(
    bundle: str | Path,
    data: str | Path,
    out: str | Path,
    *,
    split: str = "train",
    layout: str = "auto",
    features: str | Path | None = None,
    c: float = 1.0,
    calibrate: bool = False,
    max_memory: float = MAX_MEMORY,
    passing: Passing | None = None,
    log: Callable[[str], None] = LOGGER.info,
    progress: Progresses = silent,
) -> SVMReport:
    """Fit one linear SVM per class on a bundle's features, and save them as a new bundle's classifier.

    The features are the input of the network's classifier, scaled to unit length: the pooled vector for a
    linear head, else the output of the last layer before the classifier (with ``rank`` or hidden layers of
    :func:`covpool.create_model`). The SVMs are trained on all
    training images and their horizontal flips. Their weights become the classifier of the new bundle.

    Args:
        bundle: a trained bundle, with or without a classifier.
        data: the images, as for :func:`covpool.data.sources.open_images`.
        out: the new bundle.
        split: training split, ``"train"`` or ``"train+val"``.
        layout: format of the data, as for :func:`covpool.data.sources.open_images`.
        features: folder for cached features, which later fits reuse (default: next to ``out``).
        c: C of the SVMs.
        calibrate: scale and shift the scores of each SVM. On the training images, their median is then +1 for
            images of its class and -1 for all others. An SVM that does not separate its class stays as it is.
        max_memory: in GB; if LinearSVC needs more, the features are streamed from disk.
        passing: batch size, workers, precision and device of the network.
        log: called with messages.
        progress: called with the name of what is counted, such as ``"test images"``; returns a context
            manager that gives a function of the number done and the total.

    Raises:
        ValueError: if bundle, data and options do not match.
    """
    passing = passing or Passing()
    folder = Path(f"{Path(out)}.features" if features is None else features)
    check_c(c)
    with joined_processes(passing.device) as processes:
        if processes.world_size > 1:
            processes.fail(UsageError("covpool svm uses one process: start it without torchrun"))
        _check_out(bundle, out, folder)
        if "test" in split_names(split):
            raise UsageError(f"--split {split} would train on the test images: use train or train+val")
        check_outside(out, data, "files of the new bundle")
        check_outside(folder, data, "features", "--features")
        card, model = read_card(bundle), load_model(bundle).float()
        train = _images(model, data, split, layout)
        _check_classes(train, data, split)
        with held(folder):  # the solver reads and writes files there
            extracted = _features(folder, card, model, train, passing, processes, log, progress)
            check_every_class(extracted.labels[extracted.labels >= 0], train.classes)
            problem = Problem(extracted.rows, *extracted.samples(), len(train.classes), c)
            started = time.monotonic()
            solver, scores = _solve(problem, folder, max_memory, log)
            if calibrate:
                scores = calibrated(scores, problem)
            seconds = time.monotonic() - started
        classifier = with_svm(model, scores, train.classes)
        recipe: dict[str, Any] = {
            "protocol": "svm",
            "C": c,
            "solver": solver,
            "calibrated": calibrate,
            "split": split,
            "precision": passing.precision,
            "network": {"sha256": card.sha256, "recipe": card.recipe},
        }
        save_model(classifier, out, recipe=recipe)  # save it before testing, which may fail
        accuracy = None
        if "test" in splits(data, layout):
            test = _images(model, data, "test", layout)
            with progress("test images") as bar:
                accuracy = measure(model, scores, test, passing.as_pass(bar), processes)
            save_model(classifier, out, recipe=recipe, metrics={"test": dataclasses.asdict(accuracy)})
    return SVMReport(
        bundle=str(out),
        features=str(folder),
        solver=solver,
        samples=len(problem),
        columns=problem.rows.columns,
        classes=problem.classes,
        left_out=len(extracted.bad),
        seconds=seconds,
        accuracy=accuracy,
    )


def _features(
    folder: Path,
    card: Card,
    model: PooledClassifier,
    images: ImageSet,
    passing: Passing,
    processes: Processes,
    log: Callable[[str], None],
    progress: Progresses,
) -> Features:
    """Return the cached features if weights, images and settings are the same, else new ones."""
    with progress("images hashed") as bar:
        content = read_content(images, bar)
    key = {
        "weights": card.sha256,
        "model": card.config.to_dict(),
        "images": content.digest,
        "preprocessing": dataclasses.asdict(Preprocessing.of(model.pretrained_cfg)),
        "precision": passing.precision,
        "shape": [len(images), model.head_hidden_size],
    }
    with progress("training images") as bar:
        features = make_features(
            folder, key, model, images, content, passing.as_pass(), processes, log=log, progress=bar
        )
    if features.bad:
        first = features.bad[0]
        log(
            f"{len(features.bad)} training images are unreadable, first {first.name}: {first.sentence} "
            "('covpool check' lists all)"
        )
    return features


def _images(model: PooledClassifier, data: str | Path, split: str, layout: str) -> ImageSet:
    return (
        open_split(model, str(data), split, layout) if model.num_classes else open_images(data, split, layout)
    )


def _check_classes(train: ImageSet, data: str | Path, split: str) -> None:
    """Raise, before images are read, if a class has no training images."""
    lacking = [train.classes[i] for i in np.flatnonzero(class_counts(train) == 0)]
    if lacking:
        raise UsageError(
            f"{data} has no {split} images for {counted(len(lacking), 'class')} of the bundle, first "
            f"{lacking[0]!r}: add training images"
        )


def _check_out(bundle: str | Path, out: str | Path, features: Path) -> None:
    """Raise if the new bundle cannot be written, before hours of reading images."""
    if Path(out).resolve() == Path(bundle).resolve():
        raise UsageError(f"{out} is the input bundle: use another --out")
    if Path(out).resolve() in (features.resolve(), *features.resolve().parents):
        raise UsageError(f"{features} is inside the bundle {out}: use another --features")
    check_replaceable(out)


def _solve(
    problem: Problem, folder: Path, max_memory: float, log: Callable[[str], None]
) -> tuple[str, LinearScores]:
    size = bytes_in_memory(len(problem), problem.rows.columns)
    what = f"{problem.classes} SVMs on {len(problem):,} rows of {problem.rows.columns:,} values"
    if size / 1e9 <= max_memory:
        log(f"{what}, with LinearSVC in {human(size, 'B')} of memory")
        return "LinearSVC", solve_in_memory(problem)
    log(f"{what}, streamed from disk: LinearSVC would need {human(size, 'B')} of memory")

    def report_pass(done: int, violation: float) -> None:
        log(f"pass {done}: the largest violation is {violation:.1e}")

    return "streaming", solve_streaming(problem, folder, passes=report_pass)


__all__ = ["Passing", "SVMReport", "fit_svm"]
