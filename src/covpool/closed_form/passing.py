"""One pass of a frozen backbone over images: the vectors, sums and predictions of several heads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

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
from covpool.closed_form.kept import basis_of_fit
from covpool.closed_form.options import FitOptions
from covpool.closed_form.solve import Solution
from covpool.closed_form.sums import Sums
from covpool.closed_form.vectors import PassProblems, Sample, Vectors, compute_vectors
from covpool.data.image_set import ImageSet
from covpool.data.sources import open_splits
from covpool.errors import UsageError
from covpool.inference.forward import Result, prepare
from covpool.inference.options import Running
from covpool.models.bundle import load_model
from covpool.models.card import CARD
from covpool.models.config import ModelConfig
from covpool.models.model import PooledClassifier
from covpool.models.saving import save_model
from covpool.storage.files import Digest
from covpool.terminal import counted
from covpool.training.metrics import Predictions, join_predictions, predictions_of, widest_interval
from covpool.training.splits import check_classes

FOLDED = "cross-validation"
# Folder of what is removed after a fit: the frozen model, and the vectors of the images.
WORK = "work"
Progress = Callable[[str, int, int], None]


class FrozenPass:
    """The images of ``covpool fit``, and the vectors of its heads without training.

    Args:
        data: the images.
        options: the network and the heads.
        folder: folder of the results.
        log: called with lines for a person.
        progress: called with the name of the counted items, the number done and the total.
        device: computes the features.
    """

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
        # Named by the images: after a change of the images, a resumed fit starts again.
        names = "".join(found.fingerprint() for found in self.sets.values())
        self.work = folder / WORK / Digest(names.encode()).hexdigest()[:16]
        self.problems = PassProblems()
        self.task = HeadVectors(self.fixed, options.dim)

    def announce_test(self) -> None:
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

    def prepare_frozen(self) -> None:
        """Save a frozen model with a basis, from a sample of the training images or from an earlier fit."""
        frozen = self.work / "frozen"
        if (frozen / CARD).exists():
            self.model = prepare(load_model(frozen), self.device)
        else:
            model = frozen_model(self.backbone, self.fixed, self.probe_options)
            self.model = prepare(model, self.device)
        self.sample: Sample | None = None
        if self.options.basis is not None:
            set_basis(self.model, basis_of_fit(Path(self.options.basis), len(basis_of(self.model))))
        elif self.task.needs_basis(self.backbone):
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
            self.work / "frozen",
            images,
            self.work / split,
            self.task,
            self.running,
            lambda done, total: self.progress(f"images of {split}", done, total),
            numbers,
        ):
            yield self.problems.noted(split, part)

    def summed(self, parts: Iterable[Vectors], without: Collection[int] = ()) -> dict[str, Sums]:
        """Return the sums of every head, without some images."""
        found = {head: Sums("", self.classes, width) for head, width in self.heads.widths.items()}
        left_out = np.fromiter(without, dtype=np.int64)
        for part in parts:
            kept = torch.from_numpy(~np.isin(part.ids, left_out))
            for head, sums in found.items():
                sums.add(part.rows(self.train_images, self.columns[head])[kept])
        return found

    def predicted(self, solutions: Mapping[str, Solution], split: str) -> dict[str, Predictions]:
        """Return the predictions of every head for a split."""
        found: dict[str, list[Predictions]] = {head: [] for head in solutions}
        for part in self.pooled(split):
            for head, one in solutions.items():
                scores = part.values[:, self.columns[head]].double() @ one.weight.T + one.bias
                found[head].append(predictions_from(part.ids, self.sets[split], scores))
        return {head: join_predictions(parts) for head, parts in found.items()}

    def folded(self, found: Solution) -> Predictions:
        """Return the predictions of images by solutions without their fold."""
        ids, content = self.problems.images["train"]
        order = np.argsort(content, kind="stable")
        place = order[np.searchsorted(content[order], found.images.numpy())]
        return join_predictions([predictions_from(ids[place], self.train_images, found.held_out)])

    def solved(self, head: str, solution: Solution) -> PooledClassifier:
        """Return the model of a solved head."""
        config = fixed_config(head, self.backbone, self.options.dim, expands=self.model.expansion is not None)
        return solved_model(config, basis_of(self.model), solution, self.classes, self.probe_options)


def predictions_from(ids: np.ndarray, images: ImageSet, scores_BK: Tensor) -> Predictions:
    """Return the predictions of some images of a set from their scores."""
    labels = np.asarray(images.labels, dtype=np.int64)[ids]
    return predictions_of(Result(ids, labels, {"logits": scores_BK.float()[None]}, ()))


def measured_on(sets: Mapping[str, ImageSet]) -> tuple[str, ImageSet]:
    """Return the images on which heads are compared; all of them in cross-validation."""
    for split in ("test", "val"):
        if split in sets:
            return split, sets[split]
    return FOLDED, sets["train"]
