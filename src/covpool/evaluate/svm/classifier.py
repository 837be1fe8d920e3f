"""The features that SVMs learn from, and the classifier that they become."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from covpool.arguments import DEVICES, check_choice
from covpool.data.image_set import ImageSet
from covpool.data.loader import BadImage
from covpool.data.look import Content, Progress
from covpool.errors import UsageError
from covpool.evaluate.svm.solvers import LinearScores, Problem, left_behind
from covpool.inference.forward import Outputs, Pass, prepare
from covpool.inference.place import check_room
from covpool.inference.store import MANIFEST, VIEWS, FeatureStore, RowFile
from covpool.models.config import unit
from covpool.models.create import build_model
from covpool.models.model import PooledClassifier
from covpool.processes import Processes
from covpool.storage.folders import LOCK, remove_folder
from covpool.terminal import counted, human

Precision = Literal["float32", "bfloat16"]
FEATURES = "features"


@dataclass(frozen=True)
class Passing:
    """How images go through the network.

    Attributes:
        batch_size: images per batch.
        workers: processes that load images.
        precision: autocast precision: ``"float32"`` or ``"bfloat16"``.
        device: one of :data:`covpool.device.DEVICES`; ``"auto"`` is a GPU if there is one.
    """

    batch_size: int = 32
    workers: int = 0
    precision: Precision = "float32"
    device: str = "auto"

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, ("float32", "bfloat16"))
        check_choice("device", self.device, DEVICES)
        self.as_pass()

    def as_pass(self, progress: Progress | None = None) -> Pass:
        """Return the options of the loop over the images."""
        return Pass(self.batch_size, self.workers, self.precision, progress)


def outputs_of(model: PooledClassifier) -> Callable[[Tensor], Outputs]:
    """Return the function from images to ``features`` and, if the model has a classifier, ``logits``."""

    def outputs(images: Tensor) -> Outputs:
        maps = model.forward_features(images)
        vector, first = model.forward_pool(maps), model.forward_first_order(maps)
        result = {FEATURES: unit_parts(model, model.classify(vector, first, pre_logits=True))}
        return result | {"logits": model.classify(vector, first)} if model.num_classes else result

    return outputs


def unit_parts(model: PooledClassifier, received: Tensor) -> Tensor:
    """Scale the input of the second-order and of the first-order classifier, if any, to unit length each."""
    second = model.head.hidden_size
    parts = [received[:, :second], received[:, second:]]
    return torch.cat([unit(part.float()) for part in parts if part.shape[1]], dim=1)


@dataclass(frozen=True, eq=False)
class Features:
    """The features of a set.

    Attributes:
        rows: two for each image.
        labels: the class of each image, -1 for unreadable images.
        bad: the unreadable images.
    """

    rows: RowFile
    labels: NDArray[np.int64]
    bad: list[BadImage]

    def samples(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the numbers of the rows that have features, and their classes."""
        labels = np.repeat(self.labels, VIEWS)
        numbers = np.flatnonzero(labels >= 0)
        return numbers, labels[numbers]


def make_features(
    folder: Path,
    key: dict[str, Any],
    model: PooledClassifier,
    images: ImageSet,
    content: Content,
    passing: Pass,
    processes: Processes,
    *,
    log: Callable[[str], None],
    progress: Progress,
) -> Features:
    """Return the features of all images: those in the folder if the key is the same, else new ones.

    Raises:
        ValueError: if room is short, the folder has other files in it, or features are not finite.
    """
    store = FeatureStore(folder, key, len(images), {FEATURES: (model.head_hidden_size,)}, np.float32)
    if not store.is_begun():
        _make_room(store, len(images.classes), log)
    store.check()
    model, outputs = prepare(model, processes.device), outputs_of(model)
    store.fill(
        images, content, lambda part: passing.run(model, part, processes, outputs, views="flip"), progress
    )
    bad = store.state().bad
    labels = np.array(images.labels, dtype=np.int64)
    labels[list(bad)] = -1
    return Features(RowFile(store.path(FEATURES), leading=2), labels, list(bad.values()))


def _make_room(store: FeatureStore, classes: int, log: Callable[[str], None]) -> None:
    """Empty the folder, and check that the disk has room for the features and for the files of a solver.

    Raises:
        ValueError: if there is too little room, or the folder has other files in it.
    """
    folder = store.folder
    folder.mkdir(parents=True, exist_ok=True)
    ours = [folder / MANIFEST, store.path(FEATURES)]
    left = left_behind(folder)
    known = {LOCK, *(path.name for path in [*ours, *left])}
    if others := sorted(path.name for path in folder.iterdir() if path.name not in known):
        raise UsageError(f"{folder} holds other files, such as {others[0]!r}: use a new folder")
    for path in ours:  # the manifest first: it must not outlive the array
        path.unlink(missing_ok=True)
    for path in left:
        remove_folder(path)
    size, beside = store.bytes(), VIEWS * store.images * classes * 4  # the streaming solver's floats
    log(f"features take {human(size, 'B')} in {folder}")
    what = f"features take {human(size, 'B')} and their SVMs up to {human(beside, 'B')}"
    check_room(folder, size + beside, what, "folder")


def check_every_class(labels: NDArray[np.integer], classes: Sequence[str]) -> None:
    """Raise unless every class has a readable image.

    Example:
        >>> check_every_class(np.array([0, 0, 2]), ["auk", "bee", "cat"])
        Traceback (most recent call last):
        covpool.errors.UsageError: 1 class has no readable training image, first 'bee': it has no SVM
    """
    lacking = np.flatnonzero(np.bincount(labels, minlength=len(classes)) == 0)
    if len(lacking):
        has = "has" if len(lacking) == 1 else "have"
        raise UsageError(
            f"{counted(len(lacking), 'class')} {has} no readable training image, first "
            f"{classes[lacking[0]]!r}: it has no SVM"
        )


# The median of the other classes is taken over at most this many samples, so that memory stays bounded.
OTHERS = 50_000


def calibrated(scores: LinearScores, problem: Problem) -> LinearScores:
    """Scale the scores of each SVM to medians of +1 and -1; an SVM that does not separate its class stays."""
    everyone = np.arange(len(problem))
    of_label = np.empty(len(problem), dtype=np.float32)
    for some, rows in scores.of_samples(problem, everyone):
        of_label[some] = rows[np.arange(len(some)), problem.labels[some]]
    chosen = np.linspace(0, len(problem) - 1, min(len(problem), OTHERS)).astype(np.int64)
    all_scores = np.concatenate([rows for _, rows in scores.of_samples(problem, chosen)])
    labels = problem.labels[chosen]
    scale, shift = np.ones(problem.classes, np.float32), np.zeros(problem.classes, np.float32)
    for k in range(problem.classes):
        high = np.median(of_label[problem.labels == k])
        low = np.median(all_scores[labels != k, k])
        if high > low:
            scale[k] = 2 / (high - low)
            shift[k] = 1 - scale[k] * high
    return LinearScores(scores.weights * scale[:, None], scores.bias * scale + shift)


@dataclass(frozen=True)
class Accuracy:
    """Top-1 accuracy, as fractions from 0 to 1.

    Attributes:
        own: of the network's own classifier; ``None`` if it has none.
        own_flip: with logits averaged over the image and its horizontal flip.
        svm: of the SVMs.
        svm_flip: with scores averaged over the image and its flip, as in the paper.
        images: the number of images.
        left_out: the number of unreadable images.
    """

    own: float | None
    own_flip: float | None
    svm: float
    svm_flip: float
    images: int
    left_out: int


def measure(
    model: PooledClassifier,
    scores: LinearScores,
    images: ImageSet,
    passing: Pass,
    processes: Processes,
) -> Accuracy:
    """Measure both classifiers in one pass over the images.

    Raises:
        ValueError: if no image is readable, or an output of the network is not finite.
    """
    right = dict.fromkeys(("own", "own_flip", "svm", "svm_flip"), 0)
    count = left_out = 0
    for result in passing.run(model, images, processes, outputs_of(model), views="flip"):
        left_out += len(result.bad)
        if not len(result.ids):
            continue
        count += len(result.ids)
        scores_of = {"svm": scores.of(result.outputs["features"].numpy())}
        if "logits" in result.outputs:
            scores_of["own"] = result.outputs["logits"].numpy()
        for name, of_views in scores_of.items():
            right[name] += _hits(of_views[0], result.labels)
            right[f"{name}_flip"] += _hits(of_views.mean(axis=0), result.labels)
    if not count:
        raise UsageError("no test image is readable: run 'covpool check'")
    has_own = model.num_classes > 0
    return Accuracy(
        own=right["own"] / count if has_own else None,
        own_flip=right["own_flip"] / count if has_own else None,
        svm=right["svm"] / count,
        svm_flip=right["svm_flip"] / count,
        images=count,
        left_out=left_out,
    )


def _hits(scores: NDArray[np.float32], labels: NDArray[np.int64]) -> int:
    return int((scores.argmax(axis=1) == labels).sum())


def with_svm(model: PooledClassifier, scores: LinearScores, classes: Sequence[str]) -> PooledClassifier:
    """Return a model with the same backbone, pooling and hidden layers, whose logits are the SVM scores.

    Args:
        model: computed the features.
        scores: of the features of unit length (each part, in a joined model).
        classes: the names of the classes.
    """
    config = dataclasses.replace(model.config, normalize="l2", num_classes=len(classes))
    with torch.random.fork_rng(devices=[]):
        result = build_model(config)
    weights = torch.from_numpy(scores.weights)
    second = result.head.hidden_size
    state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    state["head.classifier.weight"] = weights[:, :second].contiguous()
    state["head.classifier.bias"] = torch.from_numpy(scores.bias)
    if result.first_order is not None:
        state["first_order.weight"] = weights[:, second:].contiguous()
    result.load_state_dict(state)
    result.pretrained_cfg = {**model.pretrained_cfg, "num_classes": len(classes)}
    result.classes = tuple(classes)
    return result.eval()
