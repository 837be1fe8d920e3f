"""Compute the pooled vectors of images.

A sample of the images gives the basis of the heads. Bulk inference computes the vectors of the others, so it
resumes after an interruption. Every batch has the same size, so the vector of an image does not depend on the
other images of its batch.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from covpool.closed_form.heads import PooledHeads
from covpool.closed_form.sums import Rows, Sums
from covpool.data.check import REMEDIES, write_report
from covpool.data.image_set import ImageSet, Subset
from covpool.data.look import Problem
from covpool.data.transforms import Preprocessing
from covpool.errors import UsageError
from covpool.inference import Files, Running
from covpool.inference.bulk import infer_set
from covpool.inference.forward import Forward
from covpool.inference.tasks import Task, read_vectors
from covpool.inference.work import Decoder, Unit, decoded_batches, divide
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

    def rows(self, labels: NDArray[np.int64], columns: slice = slice(None)) -> Rows:
        """Return some columns as rows of :class:`covpool.closed_form.sums.Sums`, given all labels."""
        of_rows = torch.from_numpy(labels[self.ids])
        return Rows(self.values[:, columns], of_rows, torch.from_numpy(self.content))


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


def sample_numbers(images: int) -> NDArray[np.int64]:
    """Return the numbers of the images that give the basis, at equal distances."""
    count = min(SAMPLE, images)
    return np.arange(count) * images // max(count, 1)


class Sample:
    """Features of some training images, at equal distances in the set."""

    def __init__(
        self, model: PooledClassifier, images: ImageSet, running: Running, progress: Progress
    ) -> None:
        self.model, self.batch_size = model, running.batch_size
        self.numbers = sample_numbers(len(images))
        count = len(self.numbers)
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
            x_BCn = channels_first(form.positions(features), form.channels, form.layout).flatten(2)
            if x_BCn.shape[2] == 1:
                raise UsageError(
                    "an image has one spatial position after the backbone, and covariance pooling needs "
                    "several: use a larger --image-size"
                )
            yield x_BCn

    def vectors(self, heads: PooledHeads) -> Vectors:
        """Return the vectors of all heads."""
        parts = []
        for ids, content, features in self.parts:
            padding = [0, 0] * (features.ndim - 1) + [0, self.batch_size - len(features)]
            with torch.no_grad():
                values = heads.pooled(F.pad(features, padding))[: len(features)].cpu()
            parts.append(Vectors(ids, content, values, []))
        none = np.zeros(0, dtype=np.int64)
        rest = Vectors(none, none, torch.empty(0, sum(heads.widths.values())), self.errors)
        return join_vectors([*parts, rest])


@dataclass(frozen=True)
class VectorFile:
    """A file of vectors."""

    path: Path
    ids: NDArray[np.int64]

    def read(self) -> Vectors:
        """Return the vectors of its readable images."""
        rows = read_vectors(read_file(self.path, MAX_WEIGHTS_BYTES))
        good = np.array([error is None for error in rows.errors])
        return Vectors(
            self.ids[good],
            rows.content[good],
            torch.from_numpy(rows.vectors[good]),
            [(rows.ids[i], str(rows.errors[i])) for i in np.flatnonzero(~good)],
        )


def compute_vectors(
    bundle: Path,
    images: ImageSet,
    out: Path,
    task: Task,
    running: Running,
    progress: Progress,
    numbers: NDArray[np.int64] | None = None,
) -> list[VectorFile]:
    """Compute vectors by bulk inference into a folder, and return its files."""
    chosen = np.arange(len(images)) if numbers is None else numbers
    if not len(chosen):
        return []
    part = images if numbers is None else Subset(images, numbers)
    files = Files(format="parquet", rows_per_file=ROWS_PER_FILE)
    infer_set(bundle, part, out, task, files, running, progress, name=images.fingerprint())
    units = divide(part, ROWS_PER_FILE)
    return [VectorFile(out / f"{unit.name}.parquet", chosen[unit.start : unit.stop]) for unit in units]


@dataclass(frozen=True)
class Adding:
    """How vectors are added to the sums of several heads."""

    classes: tuple[str, ...]
    widths: Mapping[str, int]
    columns: Mapping[str, slice]
    labels: NDArray[np.int64]
    without: Collection[int] = ()

    def sums(self, parts: Iterable[Vectors]) -> dict[str, Sums]:
        """Return the sums of every head."""
        sums = {head: Sums("", self.classes, width) for head, width in self.widths.items()}
        left_out = np.fromiter(self.without, dtype=np.int64)
        for part in parts:
            kept = torch.from_numpy(~np.isin(part.ids, left_out))
            for head in sums:
                sums[head].add(part.rows(self.labels, self.columns[head])[kept])
        return sums


def merged_sums(first: Mapping[str, Sums], second: Mapping[str, Sums]) -> dict[str, Sums]:
    """Return the sums of the images of both, for every head."""
    return {head: sums + second[head] for head, sums in first.items()}


class PassProblems:
    """Problems of the images that a pass over them finds: unreadable images, copies and leaks."""

    def __init__(self) -> None:
        self._ids: dict[str, list[NDArray[np.int64]]] = {}
        self._content: dict[str, list[NDArray[np.int64]]] = {}
        self._errors: list[tuple[str, str]] = []

    def note(self, split: str, part: Vectors) -> None:
        """Note the contents of some images, and the errors of unreadable ones."""
        self._ids.setdefault(split, []).append(part.ids)
        self._content.setdefault(split, []).append(part.content)
        self._errors += part.errors

    def add(self, other: PassProblems) -> None:
        """Add what another process has noted."""
        for split, ids in other._ids.items():
            self._ids.setdefault(split, []).extend(ids)
            self._content.setdefault(split, []).extend(other._content[split])
        self._errors += other._errors

    def images(self, split: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the numbers and the contents of the readable images of a split, by number."""
        ids, content = np.concatenate(self._ids[split]), np.concatenate(self._content[split])
        order = np.argsort(ids)
        return ids[order], content[order]

    def write(self, sets: Mapping[str, ImageSet], file: Path) -> dict[str, int]:
        """Write the list, and return the number of problems of each kind."""
        problems = [
            Problem(name, "unreadable", error.partition(": ")[2] or error) for name, error in self._errors
        ]
        splits = list(self._ids)
        noted = [self.images(split) for split in splits]
        split_of = np.repeat(np.arange(len(splits)), [len(ids) for ids, _ in noted])
        none = np.zeros(0, dtype=np.int64)
        ids = np.concatenate([none, *(numbers for numbers, _ in noted)])
        content = np.concatenate([none, *(contents for _, contents in noted)])
        _, first, group = np.unique(content, return_index=True, return_inverse=True)
        for k in np.flatnonzero(first[group] != np.arange(len(content))).tolist():
            original = int(first[group[k]])
            split, its_split = splits[split_of[k]], splits[split_of[original]]
            i, j = int(ids[k]), int(ids[original])
            kind = "duplicate"
            if its_split != split:
                kind = "leak"
            elif sets[split].label(i) != sets[its_split].label(j):
                kind = "two labels"
            detail = f"it has the bytes of {sets[its_split].name(j)}"
            problems.append(Problem(sets[split].name(i), kind, detail))
        write_report(problems, file)
        counts = Counter(problem.problem for problem in problems)
        return {kind: counts[kind] for kind in REMEDIES if counts[kind]}
