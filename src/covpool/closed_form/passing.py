"""One pass of a frozen backbone over images: the vectors, sums and predictions of several heads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from pathlib import Path

import numpy as np
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
from covpool.closed_form.sums import FOLDS, MAX_ROWS_BYTES, RESERVOIR, Sums
from covpool.closed_form.vectors import (
    Adding,
    PassProblems,
    Sample,
    VectorFile,
    Vectors,
    compute_vectors,
    merged_sums,
    sample_numbers,
)
from covpool.data.image_set import ImageSet
from covpool.data.sources import open_splits
from covpool.errors import UsageError
from covpool.inference import Running
from covpool.inference.forward import Result, prepare
from covpool.models.bundle import load_model
from covpool.models.card import CARD
from covpool.models.config import ModelConfig
from covpool.models.model import PooledClassifier
from covpool.models.saving import save_model
from covpool.processes import Processes
from covpool.storage.files import digest, digest_file
from covpool.terminal import counted, printable
from covpool.training.metrics import Predictions, join_predictions, predictions_of, widest_interval
from covpool.training.splits import check_classes, contents

FOLDED = "cross-validation"
# Folder of what is removed after a fit: the frozen model, and the vectors of the images.
WORK = "work"
Progress = Callable[[str, int, int], None]


class FrozenPass:
    """The images of ``covpool fit``, and the vectors of its heads without training."""

    def __init__(
        self,
        data: str,
        options: FitOptions,
        folder: Path,
        log: Callable[[str], None],
        progress: Progress,
        processes: Processes,
    ) -> None:
        self.data, self.options, self.folder, self.processes = data, options, folder, processes
        self.device = processes.device
        self.log = log if processes.is_first else lambda line: None
        self.progress = progress if processes.is_first else lambda what, done, total: None
        self.probe_options = options.probe()
        self.fixed = tuple(head for head in options.heads if is_fixed(head))
        self.learned = tuple(head for head in options.heads if head not in self.fixed)
        self.running = Running(
            options.batch_size,
            options.workers,
            options.device,
            options.engine,
            options.actors,
            options.ray_address,
            compile=options.compile,
        )
        self.stages = 3 + bool(options.finetune)
        self.sets: dict[str, ImageSet] = {
            str(split): images for split, images in open_splits(data, "auto").items()
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
        self.labels = {
            split: np.asarray(images.labels, dtype=np.int64) for split, images in self.sets.items()
        }
        self.problems = PassProblems()
        self.noted: set[str] = set()
        self.is_resumed = False
        self.task = HeadVectors(self.fixed, options.dim)
        if self.split == FOLDED:
            self._check_folds()

    def _check_folds(self) -> None:
        """Note classes of one image, which cross-validation leaves out of the classifier that predicts it."""
        single = np.flatnonzero(np.bincount(self.labels["train"]) == 1)
        if len(single) == len(self.classes):
            raise UsageError(
                f"{self.data} has one image of each class, and no test images to measure the accuracy: add "
                "images"
            )
        if len(single):
            first = f"{len(single):,}, first {printable(self.classes[single[0]])}"
            self.log(f"classes with one image, which cross-validation cannot predict: {first}")

    @cached_property
    def work(self) -> Path:
        """The folder of what is removed after a fit.

        Its name depends on the images and the network: if one of them changes, a resumed fit starts again.
        """
        names = [name for images in self.sets.values() for name in (images.fingerprint(), contents(images))]
        weights = self.options.weights
        names += [self.probe_options.model, "" if weights is None else digest_file(weights)]
        return self.folder / WORK / digest("\n".join(names))[:16]

    def announce_test(self) -> None:
        """Print which images measure the accuracy, and how precise it will be."""
        count = len(self.measured)
        widest = max(self.heads.widths.values()) if self.fixed else 0
        if self.split == FOLDED and 4 * widest * count > MAX_ROWS_BYTES:
            count = min(count // FOLDS, RESERVOIR)
            self.log(
                "    no test images, and too many vectors for cross-validation: some images are held out"
            )
        elif self.split == FOLDED:
            self.log(
                "    no test images: 5-fold cross-validation; each image is predicted by a classifier that "
                "was solved without it"
            )
        self.log(
            f"    accuracy is measured on {counted(count, 'image')}: "
            f"its 95 % interval is up to ±{widest_interval(count):.0f} points"
        )

    def prepare_frozen(self) -> None:
        """Save a frozen model with a basis, from a sample of the training images or from an earlier fit."""
        self.sample: Sample | None = None
        self.processes.by_first(self._make_frozen)
        if not self.processes.is_first:
            self.model = prepare(load_model(self.work / "frozen"), self.device)
        self.heads = PooledHeads(self.task, self.model)
        ends = np.cumsum(list(self.heads.widths.values()))
        self.columns = {
            head: slice(int(end) - width, int(end))
            for (head, width), end in zip(self.heads.widths.items(), ends, strict=True)
        }

    def _make_frozen(self) -> None:
        model = frozen_model(self.backbone, self.fixed, self.probe_options)
        folder = self.work / "frozen"  # after the network: wrong options raise before an image is read
        is_there = self.is_resumed = (folder / CARD).exists()
        self.model = prepare(load_model(folder) if is_there else model, self.device)
        if self.options.basis is not None:
            if not is_there:
                dim, backbone = len(basis_of(self.model)), self.model.config.backbone
                set_basis(self.model, basis_of_fit(Path(self.options.basis), dim, backbone))
        elif self.task.needs_basis(self.backbone):
            self.sample = Sample(
                self.model,
                self.train_images,
                self.running,
                lambda done, total: self.progress("images for the basis", done, total),
            )
            set_basis(self.model, principal_directions(self.sample.positions(), len(basis_of(self.model))))
        if not is_there:
            save_model(self.model, folder)

    def files(self, split: str) -> list[VectorFile]:
        """Compute the vectors of this process's share of a split, without the sample; return their files."""
        count, rank, world_size = len(self.sets[split]), self.processes.rank, self.processes.world_size
        numbers = np.arange(count)
        if split == "train" and self.task.needs_basis(self.backbone) and self.options.basis is None:
            numbers = np.setdiff1d(numbers, sample_numbers(count))
        return compute_vectors(
            self.work / "frozen",
            self.sets[split],
            self.work / (split if world_size == 1 else f"{split}-{rank}-of-{world_size}"),
            self.task,
            self.running,
            lambda done, total: self.progress(f"images of {split}", done, total),
            np.array_split(numbers, world_size)[rank],
        )

    def pooled(self, split: str) -> Iterator[Vectors]:
        """Yield the vectors of this process's share of a split, and note its problems once."""
        is_new = split not in self.noted
        self.noted.add(split)
        sample = self.sample if split == "train" else None
        parts = (file.read() for file in self.files(split))
        for part in itertools.chain([sample.vectors(self.heads)] if sample is not None else [], parts):
            if is_new:
                self.problems.note(split, part)
            yield part

    def summed(self, without: Collection[int] = ()) -> dict[str, Sums]:
        """Return the sums of every head over the training images of all processes, without some images."""
        adding = Adding(self.classes, self.heads.widths, self.columns, self.labels["train"], without)
        if self.options.engine == "ray":
            from covpool.closed_form.ray_sums import summed_by_ray  # here: Ray is optional

            sums, problems = summed_by_ray(adding, self.files("train"), self.running)
            if self.sample is not None:
                part = self.sample.vectors(self.heads)
                problems.note("train", part)
                sums = merged_sums(adding.sums([part]), sums)
            if "train" not in self.noted:
                self.problems.add(problems)
            self.noted.add("train")
            return sums
        return {
            head: sums.reduced(self.processes) for head, sums in adding.sums(self.pooled("train")).items()
        }

    def predicted(self, solutions: Mapping[str, Solution], split: str) -> dict[str, Predictions]:
        """Return the predictions of every head for a split, in the first process."""
        predictions: dict[str, list[Predictions]] = {head: [] for head in solutions}
        for part in self.pooled(split):
            for head, solution in solutions.items():
                scores = part.values[:, self.columns[head]].double() @ solution.weight.T + solution.bias
                predictions[head].append(predictions_from(part.ids, self.labels[split], scores))
        shares = self.processes.gather_to_first(predictions)
        return {
            head: join_predictions([part for share in shares for part in share[head]]) for head in solutions
        }

    def gather_problems(self) -> None:
        """Give the first process the problems that the others have noted."""
        for problems in self.processes.gather_to_first(self.problems)[1:]:
            self.problems.add(problems)

    def folded(self, solution: Solution) -> Predictions:
        """Return the predictions of images by solutions without their fold."""
        ids, content = self.problems.images("train")
        order = np.argsort(content, kind="stable")
        place = order[np.searchsorted(content[order], solution.images.numpy())]
        return join_predictions([predictions_from(ids[place], self.labels["train"], solution.held_out)])

    def solved(self, head: str, solution: Solution) -> PooledClassifier:
        """Return the model of a solved head."""
        config = fixed_config(head, self.backbone, self.options.dim, expands=self.model.expansion is not None)
        return solved_model(config, basis_of(self.model), solution, self.classes, self.probe_options)


def predictions_from(ids: np.ndarray, labels: np.ndarray, scores_BK: Tensor) -> Predictions:
    """Return the predictions of some images of a set from their scores, given the labels of the set."""
    return predictions_of(Result(ids, labels[ids], {"logits": scores_BK.float()[None]}, ()))


def measured_on(sets: Mapping[str, ImageSet]) -> tuple[str, ImageSet]:
    """Return the images on which heads are compared; all of them in cross-validation."""
    for split in ("test", "val"):
        if split in sets:
            return split, sets[split]
    return FOLDED, sets["train"]
