"""Compute the pooled vectors of images.

A sample of the images gives the basis of the heads. Bulk inference computes the vectors of the others, so it
resumes after an interruption. Every batch has the same size, so the vector of an image does not depend on the
other images of its batch.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from covpool.closed_form.heads import PooledHeads
from covpool.closed_form.sums import Rows
from covpool.data.check import REMEDIES, write_report
from covpool.data.image_set import ImageSet, Subset
from covpool.data.look import Problem
from covpool.data.transforms import Preprocessing
from covpool.inference.bulk import infer_set
from covpool.inference.forward import Forward
from covpool.inference.options import Files, Running
from covpool.inference.tasks import Task, read_vectors
from covpool.inference.work import Decoder, Unit, decoded_batches
from covpool.models.model import PooledClassifier
from covpool.nn.cov_pool import channels_first
from covpool.storage.files import MAX_WEIGHTS_BYTES, read_file

Progress = Callable[[int, int], None]
# Images that give the basis.
SAMPLE = 256
# Rows of a file of bulk inference.
ROWS_PER_FILE = 256


class Vectors(NamedTuple):
    """Vectors of some images of a set; those of unreadable images are left out.

    Attributes:
        ids: ``(B,)``, the numbers of the images in the set.
        content: ``(B,)``, a number that identifies the bytes of each image.
        values: ``(B, p)`` in float32.
        errors: the name and the error of each unreadable image.
    """

    ids: NDArray[np.int64]
    content: NDArray[np.int64]
    values: Tensor
    errors: list[tuple[str, str]]

    def rows(self, images: ImageSet, columns: slice = slice(None)) -> Rows:
        """Return some columns as rows of :class:`covpool.closed_form.sums.Sums`."""
        labels = np.asarray(images.labels, dtype=np.int64)[self.ids]
        return Rows(self.values[:, None, columns], torch.from_numpy(labels), torch.from_numpy(self.content))


def join_vectors(parts: Sequence[Vectors]) -> Vectors:
    """Return the vectors of all parts, in the order of the set."""
    ids = np.concatenate([part.ids for part in parts])
    order = np.argsort(ids, kind="stable")
    return Vectors(
        ids[order],
        np.concatenate([part.content for part in parts])[order],
        torch.cat([part.values for part in parts])[torch.from_numpy(order)],
        list(itertools.chain.from_iterable(part.errors for part in parts)),
    )


class Sample:
    """Features of some training images, at equal distances in the set.

    Args:
        model: a frozen model.
        images: the training images.
        running: batch size, workers and device.
        progress: called with the number of images done and the total.
    """

    def __init__(
        self, model: PooledClassifier, images: ImageSet, running: Running, progress: Progress
    ) -> None:
        self.model, self.batch_size = model, running.batch_size
        count = min(SAMPLE, len(images))
        self.numbers = np.arange(count) * len(images) // count
        self.parts: list[tuple[NDArray[np.int64], NDArray[np.int64], Tensor]] = []
        self.errors: list[tuple[str, str]] = []
        preprocessing = Preprocessing.of(model.pretrained_cfg)
        forward = Forward(
            model,
            lambda batch: {"features": model.forward_features(batch)},
            device=next(model.parameters()).device,
            preprocessing=preprocessing,
            pad_to=self.batch_size,
        )
        unit = Unit("sample", 0, count, tuple(self.numbers.tolist()))
        done = 0
        for (_, numbers), batch in decoded_batches(images, [unit], Decoder(preprocessing, True), running):
            good = np.flatnonzero(batch["error"] == "")
            if len(good):
                features = forward(batch["image"][good])["features"][0]
                self.parts.append((np.asarray(numbers)[good], batch["content"][good], features))
            bad = np.flatnonzero(batch["error"] != "")
            self.errors += [(batch["id"][i], batch["error"][i]) for i in bad]
            done += len(numbers)
            progress(done, count)

    def positions(self) -> Iterator[Tensor]:
        """Yield the features as ``(B, C, n)``, batch by batch."""
        form = self.model.format
        for _, _, features in self.parts:
            yield channels_first(form.positions(features), form.channels, form.layout).flatten(2)

    def vectors(self, heads: PooledHeads) -> Vectors:
        """Return the vectors of all heads."""
        found = []
        for ids, content, features in self.parts:
            padding = [0, 0] * (features.ndim - 1) + [0, self.batch_size - len(features)]
            with torch.no_grad():
                values = heads.pooled(F.pad(features, padding))[: len(features)].cpu()
            found.append(Vectors(ids, content, values, []))
        none = np.zeros(0, dtype=np.int64)
        rest = Vectors(none, none, torch.empty(0, sum(heads.widths.values())), self.errors)
        return join_vectors([*found, rest])


def compute_vectors(
    bundle: Path,
    images: ImageSet,
    out: Path,
    task: Task,
    running: Running,
    progress: Progress,
    numbers: NDArray[np.int64] | None = None,
) -> Iterator[Vectors]:
    """Compute vectors by bulk inference into a folder, and yield them file by file.

    Args:
        bundle: the folder of a model.
        images: the set.
        out: folder of the job; call again to resume it.
        task: an exact task with a column ``vector``, such as :class:`covpool.closed_form.heads.HeadVectors`.
        running: how the job runs.
        progress: called with the number of images done and the total.
        numbers: the images of the set to compute; all if not given.
    """
    chosen = np.arange(len(images)) if numbers is None else numbers
    if not len(chosen):
        return
    part = images if numbers is None else Subset(images, numbers)
    files = Files(format="parquet", rows_per_file=ROWS_PER_FILE)
    infer_set(bundle, part, out, task, files, running, progress, name=images.fingerprint())
    start = 0
    for file in sorted(out.glob("*.parquet")):
        found = read_vectors(read_file(file, MAX_WEIGHTS_BYTES))
        good = np.array([error is None for error in found.errors])
        yield Vectors(
            chosen[start : start + len(good)][good],
            found.content[good],
            torch.from_numpy(found.vectors[good]),
            [(found.ids[i], str(found.errors[i])) for i in np.flatnonzero(~good)],
        )
        start += len(good)


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
