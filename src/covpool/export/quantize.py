"""The backbone of an ONNX graph in int8, and all else in float32: ONNX Runtime's static quantisation.

Rounded as usual, EfficientNet-Lite0 told another sparrow than in float32 on six of a hundred photographs. So
weights are rounded such that errors cancel (:mod:`covpool.export.rounding`), and the first layers, whose
errors were the largest by far and which hold hardly any weights, stay in float32.
"""

from __future__ import annotations

import contextlib
import logging
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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
from covpool.export.rounding import round_weights
from covpool.export.running import Array

# Of the backbone's layers with weights, from the front, what stays in float32.
KEPT = 0.2
LAYERS = ("Conv", "Gemm", "MatMul")


def to_int8(model: ModelProto, images: Sequence[Array]) -> ModelProto:
    """A copy with the backbone in int8: weights by channel, values by the range they have on ``images``.

    Args:
        model: as :func:`covpool.export.onnx_file.to_onnx` made it.
        images: batches of them, as the graph takes them.
    """
    inside = quantized_nodes(model)
    outside = [node.name for node in model.graph.node if node.name not in inside]
    rounded, overrides = round_weights(model, inside, images)
    with tempfile.TemporaryDirectory() as folder, _quiet():
        source, target = Path(folder, "float.onnx"), Path(folder, "int8.onnx")
        onnx.save(rounded, source)
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
            extra_options={
                "TensorQuantOverrides": {name: _override(steps) for name, steps in overrides.items()}
            },
        )
        return onnx.load(target)


def quantized_nodes(model: ModelProto) -> set[str]:
    """The names of the backbone's nodes, without those before the first layer that is quantised."""
    inside = backbone_nodes(model)
    constant = {weight.name for weight in model.graph.initializer}
    layers = [
        place
        for place, node in enumerate(model.graph.node)
        if node.name in inside and node.op_type in LAYERS and constant.intersection(node.input)
    ]
    first = layers[math.ceil(KEPT * len(layers))] if len(layers) > 1 else 0
    return {node.name for node in list(model.graph.node)[first:] if node.name in inside}


def _override(steps: Array) -> list[dict[str, Any]]:
    """The scales that the weights were rounded to, as ONNX Runtime takes them."""
    found: list[dict[str, Any]] = [
        {"quant_type": QuantType.QInt8, "scale": step, "zero_point": np.int8(0)} for step in steps
    ]
    found[0]["axis"] = 0
    return found


class _Images(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime is untyped
    """Hands out the batches, one after the other, as ONNX Runtime asks for them."""

    def __init__(self, batches: Sequence[Array]) -> None:
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
