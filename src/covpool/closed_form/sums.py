r"""Sums of pooled vectors, from which a linear classifier is solved. They add, subtract and merge.

Ridge regression on one-hot labels needs only these sums over the training images:

.. math::
    n_k = \sum_{i \in k} 1, \qquad c_k = \sum_{i \in k} x_i, \qquad G = \sum_i x_i x_i^T

The classes' sums :math:`c_k` give :math:`\sum_i x_i` too. While the vectors fit into memory they are kept as
rows, which hold the same sums exactly and allow leave-one-out. Beyond that, only the sums remain, in float64,
so memory does not grow with the number of images. They are kept in two parts, because the strength of the
regularization is chosen on images that a solution has not seen. See :mod:`covpool.closed_form.solve`.

Letters: B images, p the length of a vector, K classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from covpool.errors import StorageError, UsageError
from covpool.processes import Processes
from covpool.terminal import counted

# Images are assigned to folds by their content, so that a fold is the same on every machine.
FOLDS = 5
# Bytes of rows that are kept; more rows become sums.
MAX_ROWS_BYTES = 1 << 30
# Rows that are added to the sums at once, and the width of a block of G. Only blocks on and above the
# diagonal are computed.
BLOCK_ROWS, BLOCK_COLUMNS = 1024, 1024
# Held-out images whose vectors are kept next to the sums, for the temperature and the held-out accuracy.
RESERVOIR = 2048


@dataclass(frozen=True)
class Rows:
    """Vectors of images.

    Attributes:
        vectors: ``(B, p)`` in float32.
        labels: ``(B,)``, the class of each image.
        images: ``(B,)``, a number of 63 bits that identifies the content of each image.
    """

    vectors: Tensor
    labels: Tensor
    images: Tensor

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, chosen: Tensor | slice) -> Rows:
        return Rows(self.vectors[chosen], self.labels[chosen], self.images[chosen])

    @property
    def folds(self) -> Tensor:
        """The fold of each image, ``(B,)``."""
        return self.images % FOLDS


def join_rows(parts: Sequence[Rows]) -> Rows:
    """Return the rows of all parts."""
    return Rows(
        *(torch.cat([getattr(part, field.name) for part in parts]) for field in dataclasses.fields(Rows))
    )


@dataclass
class Part:
    """The sums of some images, in float64.

    Attributes:
        counts: ``(K,)``, images per class.
        class_sums: ``(K, p)``.
        gram: ``(p, p)``; only the blocks on and above the diagonal are valid, see :meth:`full_gram`.
    """

    counts: Tensor
    class_sums: Tensor
    gram: Tensor

    @classmethod
    def zeros(cls, classes: int, width: int) -> Part:
        """Return the sums of no image."""
        return cls(
            torch.zeros(classes, dtype=torch.float64),
            torch.zeros(classes, width, dtype=torch.float64),
            torch.zeros(width, width, dtype=torch.float64),
        )

    def add(self, rows: Rows, sign: int = 1) -> None:
        """Add rows, or subtract them with ``sign=-1``."""
        x_Bp = rows.vectors.double()
        self.counts.index_add_(0, rows.labels, torch.full((len(x_Bp),), sign, dtype=torch.float64))
        self.class_sums.index_add_(0, rows.labels, x_Bp, alpha=sign)
        for top, left in _upper_blocks(x_Bp.shape[1]):
            self.gram[top, left].addmm_(x_Bp[:, top].T, x_Bp[:, left], alpha=sign)

    def full_gram(self) -> Tensor:
        """Return G with both triangles, ``(p, p)``, as a copy."""
        upper = self.gram.triu()
        return upper + upper.triu(1).T

    def __add__(self, other: Part) -> Part:
        return Part(self.counts + other.counts, self.class_sums + other.class_sums, self.gram + other.gram)


def _upper_blocks(width: int) -> Iterator[tuple[slice, slice]]:
    """Yield the rows and columns of the blocks on and above the diagonal, a row of blocks at a time."""
    for start in range(0, width, BLOCK_COLUMNS):
        yield slice(start, start + BLOCK_COLUMNS), slice(start, width)


class Sums:
    """The sums of training images.

    Args:
        identity: identifies the vectors: backbone, its weights, preprocessing, basis and pooling. Sums of
            different identity cannot be merged.
        classes: names of the classes.
        width: p, the length of a vector.
        max_rows_bytes: bytes of rows to keep before they become sums.

    Example:
        >>> sums = Sums("example", ("a", "b"), width=3)
        >>> sums.add(Rows(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]), torch.arange(4)))
        4
        >>> len(sums), sums.is_exact
        (4, True)
    """

    def __init__(
        self,
        identity: str,
        classes: Sequence[str],
        width: int,
        max_rows_bytes: int = MAX_ROWS_BYTES,
    ) -> None:
        self.identity, self.classes = identity, tuple(classes)
        self.width, self.max_rows_bytes = width, max_rows_bytes
        self._waiting: list[Rows] = []
        self._parts: tuple[Part, Part] | None = None
        self._reservoir = self._no_rows()

    def __len__(self) -> int:
        """The number of images."""
        return int(self.counts().sum())

    @property
    def is_exact(self) -> bool:
        """Whether all vectors are kept as rows."""
        return self._parts is None

    @property
    def rows(self) -> Rows:
        """The kept vectors, sorted by image: all of them if :attr:`is_exact`, else some held-out images."""
        if self._parts is not None:
            self._flush()
            return self._reservoir
        self._waiting = [_sorted(join_rows(self._waiting))] if self._waiting else [self._no_rows()]
        return self._waiting[0]

    @property
    def parts(self) -> tuple[Part, Part]:
        """The sums of the images to train on and of the held-out fold, if not :attr:`is_exact`."""
        assert self._parts is not None
        self._flush()
        return self._parts

    def counts(self) -> Tensor:
        """Return the number of images per class, ``(K,)``."""
        if self._parts is None:
            return torch.bincount(self.rows.labels, minlength=len(self.classes))
        train, held_out = self.parts
        return (train.counts + held_out.counts).round().long()

    def add(self, rows: Rows) -> int:
        """Add images. While all rows are kept, an image that was added before is not counted again.

        Returns:
            The number of images that were added.
        """
        self._check(rows)
        if self._parts is None:
            known = [some.images for some in self._waiting]
            rows = rows[_first_occurrences(torch.cat([*known, rows.images]))[sum(map(len, known)) :]]
        if len(rows):
            self._waiting.append(rows)
            self._compact()
        return len(rows)

    def remove(self, rows: Rows) -> None:
        """Remove images that were added before.

        Raises:
            UsageError: if an image was never added. Once rows have become sums this is not checked.
        """
        self._check(rows)
        if self._parts is None:
            self.rows_of(rows.images)
            self._waiting = [_without(self.rows, rows.images)]
            return
        for part, some in zip(self.parts, _split(rows), strict=True):
            part.add(some, sign=-1)
        self._reservoir = _without(self._reservoir, rows.images)

    def rows_of(self, images: Tensor) -> Rows:
        """Return the kept rows of some images.

        Raises:
            UsageError: if an image was never added.
        """
        if absent := int((~torch.isin(images, self.rows.images)).sum()):
            raise UsageError(
                f"{counted(absent, 'image')} to remove {'was' if absent == 1 else 'were'} never added"
            )
        return self.rows[torch.isin(self.rows.images, images)]

    def __add__(self, other: Sums) -> Sums:
        """Return the sums of the images of both. An image of both counts once if all rows are kept."""
        if self.identity != other.identity:
            raise UsageError(
                "these sums are of different vectors: backbone, weights, preprocessing, basis and pooling "
                "must be the same. Fit the second one with --basis and the first model"
            )
        classes = (*self.classes, *(name for name in other.classes if name not in self.classes))
        ours, theirs = self.with_classes(classes), other.with_classes(classes)
        if not theirs.is_exact:
            ours, theirs = theirs, ours
        if theirs.is_exact:
            ours.add(theirs.rows)
            return ours
        ours._parts = tuple(a + b for a, b in zip(ours.parts, theirs.parts, strict=True))  # type: ignore[assignment]
        ours._reservoir = _sorted(join_rows([ours._reservoir, theirs._reservoir]))[:RESERVOIR]
        return ours

    def with_classes(self, classes: Sequence[str]) -> Sums:
        """Return a copy with other classes; every class with an image must be among them."""
        place = {name: k for k, name in enumerate(classes)}
        counts = self.counts().tolist()
        if gone := [
            name for name, count in zip(self.classes, counts, strict=True) if count and name not in place
        ]:
            raise UsageError(f"class {gone[0]!r} has images and cannot be left out")
        number = torch.tensor([place.get(name, 0) for name in self.classes], dtype=torch.int64)
        changed = Sums(self.identity, classes, self.width, self.max_rows_bytes)
        changed._reservoir = dataclasses.replace(self._reservoir, labels=number[self._reservoir.labels])
        if self._parts is None:
            changed._waiting = [dataclasses.replace(self.rows, labels=number[self.rows.labels])]
            return changed
        kept = torch.tensor(counts) > 0
        parts = []
        for part in self.parts:
            new = Part.zeros(len(changed.classes), self.width)
            new.counts[number[kept]], new.class_sums[number[kept]] = part.counts[kept], part.class_sums[kept]
            new.gram = part.gram.clone()
            parts.append(new)
        changed._parts = (parts[0], parts[1])
        return changed

    def drop_rows(self) -> None:
        """Keep only sums, however few the images are."""
        if self._parts is None:
            size = len(self.classes), self.width
            self._parts = (Part.zeros(*size), Part.zeros(*size))
        self._flush()

    def reduced(self, processes: Processes) -> Sums:
        """Add up the sums of all processes.

        If the rows of all processes fit into memory, the first process returns them. If not, all processes
        return the sums.
        """
        if processes.world_size == 1:
            return self
        sizes = processes.gather((self.is_exact, len(self)))
        if (
            all(exact for exact, _ in sizes)
            and sum(n for _, n in sizes) * self.width * 4 <= self.max_rows_bytes
        ):
            total = Sums(self.identity, self.classes, self.width, self.max_rows_bytes)
            for rows in processes.gather_to_first(self.rows):
                total.add(rows)
            return total
        self.drop_rows()
        for part in self.parts:
            for field in dataclasses.fields(part):
                processes.sum_(getattr(part, field.name))
        self._reservoir = _sorted(join_rows(processes.gather(self._reservoir)))[:RESERVOIR]
        return self

    def to_tensors(self) -> dict[str, Tensor]:
        """Return everything but identity and classes as named tensors, for a file."""
        rows = self.rows
        tensors = {"vectors": rows.vectors, "labels": rows.labels, "images": rows.images}
        if self._parts is not None:
            for name, part in zip(("train", "held_out"), self.parts, strict=True):
                tensors |= {
                    f"{name}.{field.name}": getattr(part, field.name) for field in dataclasses.fields(Part)
                }
        return tensors

    @classmethod
    def from_tensors(cls, identity: str, classes: Sequence[str], tensors: dict[str, Tensor]) -> Sums:
        """Undo :meth:`to_tensors`.

        Raises:
            StorageError: if the tensors do not belong together.
        """
        rows = Rows(tensors["vectors"], tensors["labels"], tensors["images"])
        _check_tensors(tensors, len(classes))
        sums = cls(identity, classes, rows.vectors.shape[1])
        if "train.gram" not in tensors:
            sums._waiting = [rows]
            return sums
        sums._reservoir = rows
        parts = [
            Part(*(tensors[f"{name}.{field.name}"] for field in dataclasses.fields(Part)))
            for name in ("train", "held_out")
        ]
        sums._parts = (parts[0], parts[1])
        return sums

    def _check(self, rows: Rows) -> None:
        if rows.vectors.shape[1:] != (self.width,):
            raise UsageError(f"vectors must be (B, {self.width}); got shape {tuple(rows.vectors.shape)}")
        if not bool(rows.vectors.isfinite().all()):
            raise UsageError("a vector is not finite: check the weights of the backbone")

    def _compact(self) -> None:
        """Turn rows into sums if they take too much memory."""
        waiting = sum(len(rows) for rows in self._waiting)
        if self._parts is None:
            if waiting * self.width * 4 > self.max_rows_bytes:
                self.drop_rows()
        elif waiting >= BLOCK_ROWS:
            self._flush()

    def _flush(self) -> None:
        assert self._parts is not None
        if not self._waiting:
            return
        waiting, self._waiting = join_rows(self._waiting), []
        for start in range(0, len(waiting), BLOCK_ROWS):
            train, held_out = _split(waiting[start : start + BLOCK_ROWS])
            self._parts[0].add(train)
            self._parts[1].add(held_out)
            # The images with the smallest numbers are a random sample that does not depend on the order.
            self._reservoir = _sorted(join_rows([self._reservoir, held_out]))[:RESERVOIR]

    def _no_rows(self) -> Rows:
        none = torch.empty(0, dtype=torch.int64)
        return Rows(torch.empty(0, self.width), none, none)


def _check_tensors(tensors: dict[str, Tensor], classes: int) -> None:
    """Raise unless tensors from a file have the shapes, dtypes and values of sums."""
    vectors, labels, images = (tensors[name] for name in ("vectors", "labels", "images"))
    fit = vectors.ndim == 2 and vectors.dtype == torch.float32 and bool(vectors.isfinite().all())
    fit &= all(
        some.shape == vectors.shape[:1] and some.dtype == torch.int64 and bool((some >= 0).all())
        for some in (labels, images)
    )
    fit = fit and bool((labels < classes).all())
    width = vectors.shape[-1] if vectors.ndim else 0
    shapes = {"counts": (classes,), "class_sums": (classes, width), "gram": (width, width)}
    for name in ("train", "held_out") if "train.gram" in tensors else ():
        for field, shape in shapes.items():
            some = tensors[f"{name}.{field}"]
            fit = fit and some.shape == shape and some.dtype == torch.float64 and bool(some.isfinite().all())
    if not fit:
        raise StorageError("its tensors do not belong together")


def _split(rows: Rows) -> tuple[Rows, Rows]:
    """Return the images to train on, and those of the held-out fold."""
    held_out = rows.folds == 0
    return rows[~held_out], rows[held_out]


def _sorted(rows: Rows) -> Rows:
    return rows[rows.images.argsort()]


def _without(rows: Rows, images: Tensor) -> Rows:
    return rows[~torch.isin(rows.images, images)]


def _first_occurrences(images: Tensor) -> Tensor:
    """Return which entries are the first of their value."""
    order = images.argsort(stable=True)
    first = torch.ones(len(images), dtype=torch.bool)
    first[order[1:]] = images[order[1:]] != images[order[:-1]]
    return first
