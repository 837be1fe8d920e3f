"""Convert an ONNX file to float16 or int8."""

from __future__ import annotations

import contextlib
import logging
import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quantize_static,
)

from covpool.export.formats import backbone_nodes
from covpool.export.graph import INPUT, Array

LARGEST = 127
# Of the mean of the diagonal, added to it: columns that hardly vary would take up any error.
DAMPING = 1e-3
# Images at a time, whose inputs of all layers are in memory together; and about how many positions of them
# are looked at, for neighbours tell the same.
IMAGES, POSITIONS = 4, 1024
# A layer of more inputs is rounded as usual: its square would fill the memory.
MAX_INPUTS = 8192


def scales(weight: Array) -> NDArray[np.float32]:
    """The step of int8 for each output channel."""
    largest = np.abs(weight).reshape(len(weight), -1).max(axis=1)
    return (np.where(largest > 0, largest, 1) / LARGEST).astype(np.float32)


def round_weights(
    model: ModelProto, names: set[str], batches: Iterable[Array]
) -> tuple[ModelProto, dict[str, NDArray[np.float32]]]:
    """A copy in which the weights of some convolutions are multiples of scales, and these, by the weight.

    Args:
        model: of float32.
        names: of the nodes.
        batches: of images, as the graph takes them.
    """
    rounded = ModelProto()
    rounded.CopyFrom(model)
    weights = {weight.name: weight for weight in rounded.graph.initializer}
    layers = [
        _Layer(node, numpy_helper.to_array(weights[node.input[1]])) for node in _convolutions(model, names)
    ]
    layers = [layer for layer in layers if layer.inputs <= MAX_INPUTS]
    if not layers:
        return rounded, {}
    _observe(model, layers, batches)
    for layer in layers:
        name = layer.node.input[1]
        weights[name].CopyFrom(numpy_helper.from_array(layer.rounded(), name))
    return rounded, {layer.node.input[1]: scales(layer.weight) for layer in layers}


class _Layer:
    """A convolution, and the products of its inputs: ``(groups, inputs, inputs)``."""

    def __init__(self, node: NodeProto, weight: NDArray[np.float32]) -> None:
        self.node, self.weight = node, weight
        found = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        self.groups: int = found.get("group", 1)
        self.strides, self.dilations = found.get("strides", [1, 1]), found.get("dilations", [1, 1])
        self.pads = found.get("pads", [0, 0, 0, 0])
        self.inputs = int(np.prod(weight.shape[1:]))
        self.products = np.zeros((self.groups, self.inputs, self.inputs), dtype=np.float32)

    def observe(self, x_BCHW: NDArray[np.float32]) -> None:
        """Add the products of a batch."""
        x_GnP = self._patches(x_BCHW)
        self.products += x_GnP @ x_GnP.transpose(0, 2, 1) / x_GnP.shape[2]

    def rounded(self) -> NDArray[np.float32]:
        """The weights as multiples of their scales."""
        steps_Go1 = scales(self.weight).reshape(self.groups, -1)
        left_Gon = self.weight.reshape(self.groups, -1, self.inputs).astype(np.float64)
        result = np.zeros_like(left_Gon)
        diagonal = np.diagonal(self.products, axis1=1, axis2=2).mean(axis=1)
        damping = DAMPING * np.where(diagonal > 0, diagonal, 1)
        damped = self.products.astype(np.float64) + damping[:, None, None] * np.eye(self.inputs)
        upper_Gnn = np.linalg.cholesky(np.linalg.inv(damped)).transpose(0, 2, 1)
        for column in range(self.inputs):
            exact = left_Gon[:, :, column]
            nearest = np.clip(np.round(exact / steps_Go1), -LARGEST, LARGEST) * steps_Go1
            error_Go = (exact - nearest) / upper_Gnn[:, column, column][:, None]
            left_Gon[:, :, column:] -= error_Go[:, :, None] * upper_Gnn[:, None, column, column:]
            result[:, :, column] = nearest
        return result.reshape(self.weight.shape).astype(np.float32)

    def _patches(self, x_BCHW: NDArray[np.float32]) -> NDArray[np.float32]:
        """What the filters of each group see, ``(groups, inputs, positions)``, here and there."""
        top, left, bottom, right = self.pads
        x = np.pad(x_BCHW, ((0, 0), (0, 0), (top, bottom), (left, right)))
        height, width = (
            dilation * (side - 1) + 1
            for side, dilation in zip(self.weight.shape[2:], self.dilations, strict=True)
        )
        seen_BChwij = sliding_window_view(x, (height, width), axis=(2, 3))[
            :, :, :: self.strides[0], :: self.strides[1], :: self.dilations[0], :: self.dilations[1]
        ]
        batch, _, high, wide, _, _ = seen_BChwij.shape
        apart = max(1, math.isqrt(batch * high * wide // POSITIONS))
        ordered = seen_BChwij[:, :, ::apart, ::apart].transpose(1, 4, 5, 0, 2, 3)
        return ordered.reshape(self.groups, self.inputs, -1)


def _convolutions(model: ModelProto, names: set[str]) -> list[NodeProto]:
    """Of two dimensions and with weights that are constant, each weight once."""
    ranks = {weight.name: len(weight.dims) for weight in model.graph.initializer}
    found = [node for node in model.graph.node if node.op_type == "Conv" and node.name in names]
    return list({node.input[1]: node for node in found if ranks.get(node.input[1]) == 4}.values())


def _observe(model: ModelProto, layers: list[_Layer], batches: Iterable[Array]) -> None:
    """Let images through, with the inputs of all layers as outputs too."""
    watched = ModelProto()
    watched.CopyFrom(model)
    names = list(dict.fromkeys(layer.node.input[0] for layer in layers))
    watched.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        watched.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    for batch in batches:
        for start in range(0, len(batch), IMAGES):
            images = np.ascontiguousarray(batch[start : start + IMAGES])
            values = dict(zip(names, session.run(names, {INPUT: images}), strict=True))
            for layer in layers:
                layer.observe(values[layer.node.input[0]])


HALF, FLOAT = TensorProto.FLOAT16, TensorProto.FLOAT
LARGEST_HALF = float(np.finfo(np.float16).max)
# Ops of which some inputs must be float32, and those with graphs of their own.
LEFT_ALONE = ("Resize", "If", "Loop", "Scan")


def to_half(model: ModelProto) -> ModelProto:
    """A copy with the backbone in float16; input and output stay as they are."""
    converted = onnx.shape_inference.infer_shapes(model)
    return _Conversion(converted).run()


class _Conversion:
    """One walk over the nodes, in their order.

    Attributes:
        floats: the names of float32 values.
        weights: the float32 weights, by name.
        halved: the names of values that are float16 by now.
        nodes: the new list of nodes.
        casts: the names of values in their other type.
    """

    def __init__(self, model: ModelProto) -> None:
        self.model = model
        graph = model.graph
        inside = backbone_nodes(model)
        self.inside = {
            node.name for node in graph.node if node.name in inside and node.op_type not in LEFT_ALONE
        }
        self.floats = _float_values(graph)
        self.weights = {weight.name: weight for weight in graph.initializer if weight.data_type == FLOAT}
        self.halved: set[str] = set()
        self.nodes: list[NodeProto] = []
        self.casts: dict[str, str] = {}

    def run(self) -> ModelProto:
        graph = self.model.graph
        for node in graph.node:
            if node.name in self.inside:
                self._halve(node)
            else:
                self._leave(node)
            self.nodes.append(node)
        kept = self.nodes[:]
        del graph.node[:], graph.value_info[:]
        graph.node.extend(kept)
        used = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
        weights = [weight for weight in graph.initializer if weight.name in used]
        del graph.initializer[:]
        graph.initializer.extend(weights)
        return self.model

    def _halve(self, node: NodeProto) -> None:
        for place, name in enumerate(node.input):
            if name in self.weights:
                node.input[place] = self._half_weight(name)
            elif name in self.floats and name not in self.halved:
                node.input[place] = self._cast(name, HALF)
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR and attribute.t.data_type == FLOAT:
                attribute.t.CopyFrom(_half(attribute.t, attribute.t.name))
            elif attribute.name == "to" and attribute.i == FLOAT:
                attribute.i = HALF
        self.halved.update(name for name in node.output if name in self.floats)

    def _leave(self, node: NodeProto) -> None:
        for place, name in enumerate(node.input):
            if name in self.halved:
                node.input[place] = self._cast(name, FLOAT)

    def _half_weight(self, name: str) -> str:
        if name not in self.casts:
            self.casts[name] = f"{name}.half"
            self.model.graph.initializer.append(_half(self.weights[name], self.casts[name]))
        return self.casts[name]

    def _cast(self, name: str, to: int) -> str:
        if name not in self.casts:
            self.casts[name] = f"{name}.{'half' if to == HALF else 'float'}"
            made = helper.make_node(
                "Cast", [name], [self.casts[name]], to=to, name=f"cast.{self.casts[name]}"
            )
            self.nodes.append(made)
        return self.casts[name]


def _float_values(graph: GraphProto) -> set[str]:
    values = [*graph.value_info, *graph.input, *graph.output]
    return {value.name for value in values if value.type.tensor_type.elem_type == FLOAT}


def _half(tensor: TensorProto, name: str) -> TensorProto:
    """What is beyond float16, as a mask's -1e9 is, becomes its largest number."""
    values = numpy_helper.to_array(tensor)
    finite = np.isfinite(values)
    clipped = np.where(finite, np.clip(values, -LARGEST_HALF, LARGEST), values)
    return numpy_helper.from_array(clipped.astype(np.float16), name)


# Of the backbone's layers with weights, from the front, what stays in float32.
KEPT = 0.2
LAYERS = ("Conv", "Gemm", "MatMul")


def to_int8(model: ModelProto, images: Sequence[Array]) -> ModelProto:
    """A copy with the backbone in int8: weights by channel, values by the range they have on ``images``.

    Args:
        model: as :func:`covpool.export.formats.to_onnx` made it.
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
    """Drop the warnings that ONNX Runtime's quantizer sends to the root logger, and only those."""

    def keep(record: logging.LogRecord) -> bool:
        return record.levelno > logging.WARNING or "onnxruntime" not in record.pathname

    logging.root.addFilter(keep)
    try:
        yield
    finally:
        logging.root.removeFilter(keep)
