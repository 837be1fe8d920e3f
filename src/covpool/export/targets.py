"""The export targets: one class per file format, which writes, loads and runs its file.

To add a target, write a subclass of :class:`Target` and add it to ``TARGETS``.
"""

from __future__ import annotations

import io
import json
import os
import warnings
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import torch
from google.protobuf.message import DecodeError
from onnx import ModelProto

from covpool.errors import TooLargeError, UsageError
from covpool.export.graph import INPUT, OUTPUT, Array, Runner, Traced, onnx_session, to_onnx, torch_runner
from covpool.export.onnx_precision import to_float16, to_int8
from covpool.export.parity import Parity, Tolerance
from covpool.storage.files import MAX_WEIGHTS_BYTES, open_regular, write_file
from covpool.terminal import Progresses, silent

# The size limit of a protobuf message.
MAX_BYTES = 2**31 - 1
# Names of a hundred thousand classes take 3 MB.
MAX_METADATA_BYTES = 16 << 20
# Fields of an ONNX file outside its graph, and the number of the field with metadata.
MAX_FIELDS, METADATA_FIELD = 100_000, 14
# Sizes of the wire types of protobuf; texts have their own length.
FIXED_BYTES = {1: 8, 2: 0, 5: 4}


@dataclass(frozen=True, eq=False)
class Exportable:
    """The input of :meth:`Target.write`.

    Attributes:
        traced: the graph.
        calibration: reads batches of training images, as the graph receives them.
        progress: as for :func:`covpool.export.export_model`; for targets that need calibration.
    """

    traced: Traced
    calibration: Callable[[], Sequence[Array]]
    progress: Progresses = silent

    @cached_property
    def onnx(self) -> ModelProto:
        """The graph in ONNX, converted once."""
        return to_onnx(self.traced)


class Target(ABC):
    """A file format.

    Attributes:
        name: in ``--formats`` and in results.
        file: the name of the exported file.
        precision: of the backbone.
        tolerance: how far the file may differ from the model.
        needs_calibration: whether writing the file needs training images.
    """

    name: ClassVar[str]
    file: ClassVar[str]
    precision: ClassVar[str]
    tolerance: ClassVar[Tolerance]
    needs_calibration: ClassVar[bool] = False

    @abstractmethod
    def write(self, model: Exportable, path: Path, metadata: Mapping[str, str]) -> None:
        """Write the file with its metadata."""

    @abstractmethod
    def load(self, path: Path) -> Runner:
        """Load the file, and return a function that runs it on images."""

    @abstractmethod
    def read_metadata(self, path: Path) -> dict[str, str]:
        """Return the metadata in the file."""

    def objection(self, parity: Parity) -> str | None:
        """Say how the file exceeds its tolerance; ``None`` if it does not."""
        if parity.top1 < self.tolerance.top1:
            return (
                f"{self.file} predicts torch's top-1 class on {parity.agreeing} of {parity.images} images "
                f"({100 * parity.top1:.2f} %); {self.precision} requires {100 * self.tolerance.top1:g} %"
            )
        if self.tolerance.relative is not None and not parity.relative <= self.tolerance.relative:
            return (
                f"the logits of {self.file} differ from torch's by {parity.relative:.1e} of the largest "
                f"logit; {self.precision} allows {self.tolerance.relative:g}"
            )
        return None


class Onnx(Target):
    """ONNX in float32, run by ONNX Runtime."""

    name, file, precision = "onnx", "model.onnx", "float32"
    tolerance = Tolerance(top1=1.0, relative=1e-3)

    def convert(self, model: Exportable) -> ModelProto:
        """Return the graph in the precision of the file."""
        return model.onnx

    def write(self, model: Exportable, path: Path, metadata: Mapping[str, str]) -> None:
        """Write the graph, without the file names that its nodes carry; raise if it is too large for ONNX."""
        written = ModelProto()
        written.CopyFrom(self.convert(model))
        for node in written.graph.node:
            del node.metadata_props[:]
        onnx.helper.set_model_props(written, dict(metadata))
        if (size := written.ByteSize()) > MAX_BYTES:
            raise UsageError(
                f"{path.name} would have {size / 1e9:.1f} GB; an ONNX file holds at most 2.1 GB. "
                "Use --formats torch."
            )
        write_file(path, written.SerializeToString())

    def load(self, path: Path) -> Runner:
        """Run the file with ONNX Runtime."""
        session = onnx_session(path)

        def run(images: Array) -> Array:
            (logits,) = session.run([OUTPUT], {INPUT: np.ascontiguousarray(images)})
            return np.asarray(logits)

        return run

    def read_metadata(self, path: Path) -> dict[str, str]:
        """Return the metadata of the ONNX model; the graph is not read."""
        metadata: dict[str, str] = {}
        with io.BufferedReader(open_regular(path, MAX_BYTES)) as file:
            try:
                for data in _metadata_fields(file, os.fstat(file.fileno()).st_size):
                    entry = onnx.StringStringEntryProto.FromString(data)
                    metadata[entry.key] = entry.value
            except TooLargeError as error:
                raise UsageError(f"{path} was not exported by covpool: {error}") from error
            except (DecodeError, ValueError, IndexError) as error:
                raise UsageError(f"{path} is not an ONNX file") from error
        return metadata


def _metadata_fields(file: io.BufferedReader[Any], size: int) -> Iterator[bytes]:
    """Yield the metadata entries of an ONNX file, and skip its other fields.

    Raises:
        ValueError, IndexError: if it is not a protobuf message.
        TooLargeError: if the metadata has too many bytes, or the file too many fields.
    """
    left, fields = MAX_METADATA_BYTES, 0

    def number() -> int:
        value = 0
        for place in range(0, 70, 7):
            byte = file.read(1)[0]
            value |= (byte & 127) << place
            if byte < 128:
                return value
        raise ValueError("a number is too long")

    while file.tell() < size:
        field, kind = divmod(number(), 8)
        fields += 1
        if kind == 0:
            number()
            length = 0
        elif kind in FIXED_BYTES:
            length = FIXED_BYTES[kind]
        else:
            raise ValueError("not a field of ONNX")
        if kind == 2:
            length = number()
        if file.tell() + length > size:
            raise ValueError("a field is longer than the file")
        left -= length if field == METADATA_FIELD else 0
        if left < 0 or fields > MAX_FIELDS:
            raise TooLargeError("its metadata is too large")
        if field == METADATA_FIELD:
            yield file.read(length)
        else:
            file.seek(length, os.SEEK_CUR)


class OnnxFloat16(Onnx):
    """ONNX with the backbone in float16."""

    name, file, precision = "onnx-float16", "model-float16.onnx", "float16"
    tolerance = Tolerance(top1=0.99, relative=None)

    def convert(self, model: Exportable) -> ModelProto:
        """Return the graph with the backbone in float16."""
        return to_float16(model.onnx)


class OnnxInt8(Onnx):
    """ONNX with most of the backbone in int8."""

    name, file, precision = "onnx-int8", "model-int8.onnx", "int8"
    tolerance = Tolerance(top1=0.97, relative=None)
    needs_calibration = True

    def convert(self, model: Exportable) -> ModelProto:
        """Return the graph with the backbone in int8."""
        return to_int8(model.onnx, model.calibration(), model.progress)


class TorchExport(Target):
    """torch.export in float32, run by torch."""

    name, file, precision = "torch", "model.pt2", "float32"
    tolerance = Tolerance(top1=1.0, relative=1e-3)

    def write(self, model: Exportable, path: Path, metadata: Mapping[str, str]) -> None:
        """Write the program; each metadata entry is an extra file."""
        buffer = io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about channels-last weights, which are saved correctly
            torch.export.save(model.traced.program, buffer, extra_files=dict(metadata))
        write_file(path, buffer.getvalue())

    def load(self, path: Path) -> Runner:
        """Run the file with torch."""
        return torch_runner(torch.export.load(path).module())

    def read_metadata(self, path: Path) -> dict[str, str]:
        """Return the extra files, without loading the program."""
        try:
            with open_regular(path, MAX_WEIGHTS_BYTES) as file, zipfile.ZipFile(file) as archive:
                entries = [entry for entry in archive.infolist() if "/extra/" in entry.filename]
                if sum(entry.file_size for entry in entries) > MAX_METADATA_BYTES:
                    raise UsageError(f"{path} was not exported by covpool: its metadata is too large")
                return {
                    entry.filename.partition("/extra/")[2]: archive.read(entry).decode() for entry in entries
                }
        # An encrypted or unknown entry is a RuntimeError or a NotImplementedError.
        except (zipfile.BadZipFile, zlib.error, EOFError, UnicodeDecodeError, RuntimeError) as error:
            raise UsageError(f"{path} is not a torch.export file") from error


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Onnx(),
        OnnxFloat16(),
        OnnxInt8(),
        TorchExport(),
    )
}


def read_metadata(path: str | Path) -> dict[str, Any]:
    """Return the metadata of an exported file: classes, preprocessing, input, output and more.

    Raises:
        UsageError: if covpool did not export the file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(2, "No such file", str(path))
    same_suffix = (target for target in TARGETS.values() if Path(target.file).suffix == path.suffix)
    texts = next(same_suffix, TARGETS["onnx"]).read_metadata(path)
    if not texts.get("covpool"):
        raise UsageError(f"{path} was not exported by covpool: it has no metadata on classes")
    try:
        return {name: json.loads(text) for name, text in texts.items()}
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} was not exported by covpool: its metadata is not JSON") from error
