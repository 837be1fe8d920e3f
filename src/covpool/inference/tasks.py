"""What bulk inference computes for each image: predictions or embeddings, as rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from covpool.errors import UsageError
from covpool.inference import Embed, Format, Precision, Predict
from covpool.models.model import PooledClassifier
from covpool.storage.files import FORMULA, WRITTEN


def projection(length: int, to: int, seed: int = 0) -> Tensor:
    """A matrix ``(length, to)`` of orthogonal columns, √(length/to) long: it keeps lengths on average.

    By Johnson and Lindenstrauss, 512 dimensions keep most distances within a factor of 1 ± 0.1, whatever the
    data.

    Raises:
        ValueError: if ``to`` is larger.

    Example:
        >>> matrix = projection(100, 20)
        >>> torch.allclose(matrix.T @ matrix, 5 * torch.eye(20), atol=1e-5)
        True
    """
    if to > length:
        raise UsageError(f"project must be at most {length}, the numbers that there are; got {to}")
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(length, to, generator=generator, dtype=torch.float64)
    orthogonal, triangle = torch.linalg.qr(normal)
    # With these signs every direction is equally likely, and no library's choice of them matters.
    matrix: Tensor = orthogonal * triangle.diagonal().sign() * (length / to) ** 0.5
    return matrix.float()


Columns = dict[str, Any]


class ExactTask(Protocol):
    """Something to compute for every image that must not depend on the other images of its batch.

    Its rows have a column ``content`` too, which identifies the bytes of the image.
    """

    @property
    def flip(self) -> bool:
        """Whether to average with the horizontally flipped image."""

    @property
    def precision(self) -> Precision:
        """Precision of the network."""

    def start(self, model: PooledClassifier) -> Outputs:
        """Prepare the task for a network."""


# Something to compute for every image.
Task = Predict | Embed | ExactTask


class Outputs(Protocol):
    """A task for a network."""

    def forward(self, images: Tensor) -> Tensor:
        """A vector for each image, which is averaged with the mirrored image's if that is wanted."""

    def columns(self, vectors: Tensor) -> Columns:
        """The columns of the rows."""

    def empty(self, count: int) -> Columns:
        """The same columns for images that have none."""


class Classes:
    """Columns ``label1``, ``score1``, ``label2`` and so on."""

    def __init__(self, task: Predict, model: PooledClassifier) -> None:
        if not model.num_classes:
            raise UsageError("the bundle has no classifier: 'covpool embed' gives vectors without one")
        self.forward = model
        self.top = min(task.top, model.num_classes)
        self.names = np.array(model.classes or [str(k) for k in range(model.num_classes)], dtype=object)

    def columns(self, logits_BK: Tensor) -> Columns:
        """Return names and probabilities of the top classes."""
        scores, indices = logits_BK.softmax(dim=1).topk(self.top, dim=1)
        labels = self.names[indices.cpu().numpy()]
        values = scores.cpu().numpy()
        return self._named(labels, values)

    def empty(self, count: int) -> Columns:
        """Return empty names and NaN."""
        labels = np.full((count, self.top), "", dtype=object)
        return self._named(labels, np.full((count, self.top), np.nan, dtype=np.float32))

    def _named(self, labels: Any, scores: Any) -> Columns:
        named = {}
        for k in range(self.top):
            named[f"label{k + 1}"], named[f"score{k + 1}"] = labels[:, k], scores[:, k]
        return named


class Vectors:
    """A column ``vector``."""

    def __init__(self, task: Embed, model: PooledClassifier) -> None:
        self.task, self.model = task, model
        self.dtype = getattr(torch, task.dtype)
        self.width = task.project or model.head_hidden_size
        self.projection = None
        if task.project is not None:
            matrix = projection(model.head_hidden_size, task.project, task.seed)
            self.projection = matrix.to(next(model.parameters()).device)

    def forward(self, images: Tensor) -> Tensor:
        """Return the vectors that the classifier receives."""
        return self.model.forward_head(self.model.forward_features(images), pre_logits=True)

    def columns(self, vectors_BD: Tensor) -> Columns:
        """Scale and project the embeddings."""
        if not self.task.raw:
            vectors_BD = torch.nn.functional.normalize(vectors_BD, dim=1)
        if self.projection is not None:
            vectors_BD = vectors_BD @ self.projection
        return {"vector": vectors_BD.to(self.dtype).cpu().numpy()}

    def empty(self, count: int) -> Columns:
        """Return vectors of NaN."""
        return {"vector": torch.full((count, self.width), torch.nan, dtype=self.dtype).numpy()}


def start_task(task: Task, model: PooledClassifier) -> Outputs:
    """Prepare a task for a network; raise UsageError if the network cannot do it."""
    if isinstance(task, Predict):
        return Classes(task, model)
    return Vectors(task, model) if isinstance(task, Embed) else task.start(model)


# Begins the error of a row whose URL gave no answer; such rows can be tried again.
UNREACHABLE = "unreachable: "


def is_unreachable(error: str) -> bool:
    """Return whether a row has an error because its URL gave no answer."""
    return error.startswith(UNREACHABLE)


def write_table(
    parts: Sequence[Columns], kind: Format, old: bytes | None = None, indices: Sequence[int] = ()
) -> tuple[bytes, int]:
    """Return a file with the rows of some batches; a row with an error has only its id besides.

    Args:
        parts: the columns of each batch.
        kind: the format of the file.
        old: a file of the same columns, some of whose rows are replaced.
        indices: the rows that are replaced, in order.

    Returns:
        The bytes of the file, and the number of its rows whose URL gave no answer.
    """
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    table = pa.table(_arrow(columns))
    if kind == "csv":
        table = _flat(table)
    if old is not None:
        before = _read_table(old, kind)
        order = np.arange(len(before))
        order[list(indices)] = len(before) + np.arange(len(table))
        table = pa.concat_tables([before, table.cast(before.schema)]).combine_chunks().take(order)
    stream = pa.BufferOutputStream()
    if kind == "csv":
        pyarrow.csv.write_csv(_replaced(table, FORMULA, r"'\1"), stream)
    else:
        # To look for numbers that come again in vectors would be in vain.
        words = [name for name in table.column_names if name != "vector"]
        pq.write_table(table, stream, use_dictionary=words)
    data: bytes = stream.getvalue().to_pybytes()
    return data, sum(is_unreachable(error or "") for error in table.column("error").to_pylist())


def read_rows(data: bytes, kind: Format) -> list[dict[str, Any]]:
    """Return the rows of a file that :func:`write_table` wrote."""
    return list(_read_table(data, kind).to_pylist())


def read_column(data: bytes, kind: Format, name: str) -> list[Any]:
    """Return a column of a file that :func:`write_table` should have written.

    Raises:
        UsageError: if the file is damaged, or has no such column.
    """
    try:
        return list(_read_table(data, kind).column(name).to_pylist())
    except (pa.ArrowException, OSError, KeyError) as error:
        raise UsageError(f"it is truncated or damaged: {error}") from error


class VectorRows(NamedTuple):
    """The rows of a Parquet file of an exact task."""

    ids: list[str]
    content: NDArray[np.int64]
    vectors: NDArray[np.float32]
    errors: list[str | None]


def read_vectors(data: bytes) -> VectorRows:
    """Return the rows of a Parquet file with ``content`` and ``vector``."""
    table = _read_table(data, "parquet")
    vector = table.column("vector").combine_chunks()
    return VectorRows(
        table.column("id").to_pylist(),
        table.column("content").to_numpy(),
        vector.values.to_numpy(zero_copy_only=False).reshape(len(table), -1),
        table.column("error").to_pylist(),
    )


def _read_table(data: bytes, kind: Format) -> pa.Table:
    stream = pa.BufferReader(data)
    if kind == "parquet":
        return pq.read_table(stream)
    names = data.partition(b"\n")[0].decode("utf-8", "replace").replace('"', "").split(",")
    # An id such as 0012 is no number, and the class nan is no missing one.
    is_number = {name: name.startswith(("score", "vector")) for name in names}
    options = pyarrow.csv.ConvertOptions(
        column_types={name: pa.float32() if is_number[name] else pa.string() for name in names},
        strings_can_be_null=True,
        null_values=[""],
    )
    return _replaced(pyarrow.csv.read_csv(stream, convert_options=options), WRITTEN, r"\1")


def _replaced(table: pa.Table, pattern: str, replacement: str) -> pa.Table:
    """Replace a pattern in all texts."""
    for place, field in enumerate(table.schema):
        if pa.types.is_string(field.type):
            column = pc.replace_substring_regex(table.column(place), pattern, replacement)
            table = table.set_column(place, field, column)
    return table


def _arrow(columns: Columns) -> dict[str, Any]:
    errors = columns["error"]
    bad = errors != ""
    arrays: dict[str, Any] = {}
    for name, values in columns.items():
        if name == "vector":
            arrays[name] = pa.FixedSizeListArray.from_arrays(
                pa.array(values.reshape(-1)), values.shape[1], mask=pa.array(bad)
            )
        elif name in ("id", "content"):
            arrays[name] = pa.array(values, pa.string() if name == "id" else pa.int64())
        else:
            kind = pa.float32() if values.dtype == np.float32 else pa.string()
            arrays[name] = pa.array(values, kind, mask=~bad if name == "error" else bad)
    return arrays


def _flat(table: pa.Table) -> pa.Table:
    """With a column for each number of a vector, for CSV knows no lists."""
    columns: dict[str, Any] = {}
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        if name != "vector":
            columns[name] = column
            continue
        width = column.type.list_size
        numbers = column.values.cast(pa.float32()).to_numpy().reshape(-1, width)
        missing = column.is_null().to_numpy(zero_copy_only=False)
        for k in range(width):
            columns[f"vector{k + 1}"] = pa.array(np.ascontiguousarray(numbers[:, k]), mask=missing)
    return pa.table(columns)
