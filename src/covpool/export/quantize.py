"""The backbone of an ONNX graph in int8, and all else in float32: ONNX Runtime's static quantisation."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto
from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quantize_static,
)

from covpool.export.graph import INPUT
from covpool.export.onnx_file import backbone_nodes
from covpool.export.running import Array


def to_int8(model: ModelProto, images: Iterable[Array]) -> ModelProto:
    """A copy with the backbone in int8: weights by channel, values by the range they have on ``images``.

    Args:
        model: as :func:`covpool.export.onnx_file.to_onnx` made it.
        images: batches of them, as the graph takes them.
    """
    inside = backbone_nodes(model)
    outside = [node.name for node in model.graph.node if node.name not in inside]
    with tempfile.TemporaryDirectory() as folder, _quiet():
        source, target = Path(folder, "float.onnx"), Path(folder, "int8.onnx")
        onnx.save(model, source)
        quantize_static(
            source,
            target,
            _Images(images),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=CalibrationMethod.MinMax,
            nodes_to_exclude=outside,
        )
        return onnx.load(target)


class _Images(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime is untyped
    """Hands out the batches, one after the other, as ONNX Runtime asks for them."""

    def __init__(self, batches: Iterable[Array]) -> None:
        self.batches: Iterator[Array] = iter(batches)

    def get_next(self) -> dict[str, Array] | None:
        """The next, or ``None`` at the end."""
        batch = next(self.batches, None)
        return None if batch is None else {INPUT: np.ascontiguousarray(batch)}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without advice through the root logger, to prepare the model by another tool first."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
