"""Convert the backbone of an ONNX graph to float16 or int8; pooling and classifier stay in float32.

**float16.** Values are cast where they enter and leave the backbone. ONNX Runtime's own converter would also
round values between the nodes that stay in float32.

**int8.** Plain rounding changed the prediction of EfficientNet-Lite0 on six of a hundred sparrows. So weights
are rounded such that errors cancel: GPTQ (Frantar et al., 2023) rounds a layer column by column and spreads
the error of a column over the next ones, to disturb the outputs on observed inputs least. The first layers
have the largest errors and few weights; they stay in float32.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import onnx
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

from covpool.export.graph import INPUT, Array, backbone_nodes, onnx_session
from covpool.storage.folders import scratch_folder
from covpool.terminal import Progresses, silent

Item = TypeVar("Item")
HALF, FLOAT = TensorProto.FLOAT16, TensorProto.FLOAT
LARGEST_HALF = float(np.finfo(np.float16).max)
# Operators with inputs that must be float32, and operators with graphs of their own.
NOT_HALF = ("Resize", "If", "Loop", "Scan")

LARGEST_INT8 = 127
# The fraction of the backbone's layers, from the front, that stays in float32.
KEPT = 0.2
LAYERS = ("Conv", "Gemm", "MatMul")
# Added to the diagonal, relative to its mean: inputs that hardly vary would absorb any error.
DAMPING = 1e-3
# Images per batch, whose inputs to all layers are in memory at once, and about how many positions of a batch
# are used: neighbors are similar.
IMAGES, POSITIONS = 4, 1024
# A layer with more inputs is rounded to nearest: its matrix of products would fill the memory.
MAX_INPUTS = 8192


def to_float16(model: ModelProto) -> ModelProto:
    """Return a copy with the backbone in float16; input and output keep their types."""
    converted = onnx.shape_inference.infer_shapes(model)
    graph = converted.graph
    inside = backbone_nodes(model)
    values = [*graph.value_info, *graph.input, *graph.output]
    floats = {value.name for value in values if value.type.tensor_type.elem_type == FLOAT}
    weights = {weight.name: weight for weight in graph.initializer if weight.data_type == FLOAT}
    halved: set[str] = set()  # names of values that are float16 now
    casts: dict[str, str] = {}  # names of values and weights in their other type
    nodes: list[NodeProto] = []

    def cast(name: str, to: int) -> str:
        if name not in casts:
            casts[name] = f"{name}.{'half' if to == HALF else 'float'}"
            if name in weights:
                graph.initializer.append(_half(weights[name], casts[name]))
            else:
                node = helper.make_node("Cast", [name], [casts[name]], to=to, name=f"cast.{casts[name]}")
                nodes.append(node)
        return casts[name]

    for node in graph.node:
        is_half = node.name in inside and node.op_type not in NOT_HALF
        for place, name in enumerate(node.input):
            if is_half and (name in weights or (name in floats and name not in halved)):
                node.input[place] = cast(name, HALF)
            elif not is_half and name in halved:
                node.input[place] = cast(name, FLOAT)
        if is_half:
            _halve_attributes(node)
            halved.update(floats.intersection(node.output))
        nodes.append(node)
    del graph.node[:], graph.value_info[:]
    graph.node.extend(nodes)
    used = {name for node in nodes for name in node.input} | {value.name for value in graph.output}
    kept = [weight for weight in graph.initializer if weight.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    return converted


def to_int8(model: ModelProto, images: Sequence[Array], progress: Progresses = silent) -> ModelProto:
    """Return a copy with the backbone in int8: weights per channel, values by their range on ``images``."""
    inside = quantized_nodes(model)
    outside = [node.name for node in model.graph.node if node.name not in inside]
    rounded, steps = round_weights(model, inside, images, progress)
    overrides: dict[str, list[dict[str, Any]]] = {
        name: [{"quant_type": QuantType.QInt8, "scale": step, "zero_point": np.int8(0)} for step in sizes]
        for name, sizes in steps.items()
    }
    for channels in overrides.values():
        channels[0]["axis"] = 0
    with scratch_folder() as folder, contextlib.ExitStack() as stack:
        bar = stack.enter_context(progress("batches, to find the ranges of values"))
        feeds = ({INPUT: np.ascontiguousarray(batch)} for batch in counted_off(images, bar))
        source, target = folder / "float.onnx", folder / "int8.onnx"
        # The quantizer advises through the root logger to preprocess the model first.
        logging.root.addFilter(_keep)
        stack.callback(logging.root.removeFilter, _keep)
        onnx.save(rounded, source)
        quantize_static(
            source,
            target,
            SimpleNamespace(get_next=lambda: next(feeds, None)),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=CalibrationMethod.MinMax,
            nodes_to_exclude=outside,
            extra_options={"TensorQuantOverrides": overrides},
        )
        return onnx.load(target)


def quantized_nodes(model: ModelProto) -> set[str]:
    """Return the names of the backbone's nodes, from the first quantized layer on."""
    inside = backbone_nodes(model)
    constant = {weight.name for weight in model.graph.initializer}
    layers = [
        place
        for place, node in enumerate(model.graph.node)
        if node.name in inside and node.op_type in LAYERS and constant.intersection(node.input)
    ]
    first = layers[math.ceil(KEPT * len(layers))] if len(layers) > 1 else 0
    return {node.name for node in list(model.graph.node)[first:] if node.name in inside}


def round_weights(
    model: ModelProto, names: set[str], batches: Sequence[Array], progress: Progresses = silent
) -> tuple[ModelProto, dict[str, NDArray[np.float32]]]:
    """Round the weights of some convolutions to int8 so that the errors cancel on images, as GPTQ does.

    E. Frantar et al., "GPTQ", ICLR 2023.

    Returns:
        A copy whose weights are multiples of the step of their channel, and the steps, by name of the weight.
    """
    rounded = ModelProto()
    rounded.CopyFrom(model)
    weights = {weight.name: weight for weight in rounded.graph.initializer}
    # Each weight once, if it is constant and of two spatial dimensions.
    convolutions = {
        node.input[1]: node
        for node in model.graph.node
        if node.op_type == "Conv" and node.name in names and node.input[1] in weights
        if len(weights[node.input[1]].dims) == 4
    }
    layers = [_Layer(node, numpy_helper.to_array(weights[name])) for name, node in convolutions.items()]
    layers = [layer for layer in layers if layer.inputs <= MAX_INPUTS]
    if layers:
        with progress("batches, to observe the layers") as bar:
            _observe(model, layers, counted_off(batches, bar))
    with progress("layers rounded") as bar:
        for layer in counted_off(layers, bar):
            weights[layer.name].CopyFrom(numpy_helper.from_array(layer.rounded(), layer.name))
    return rounded, {layer.name: scales(layer.weight) for layer in layers}


def counted_off(items: Sequence[Item], progress: Callable[[int, int], None]) -> Iterator[Item]:
    """Yield items, and tell the progress before each."""
    for done, item in enumerate(items):
        progress(done, len(items))
        yield item


def scales(weight: Array) -> NDArray[np.float32]:
    """Return the int8 step of each output channel."""
    largest = np.abs(weight).reshape(len(weight), -1).max(axis=1)
    return (np.where(largest > 0, largest, 1) / LARGEST_INT8).astype(np.float32)


class _Layer:
    """A convolution, and the products of its inputs: ``(groups, inputs, inputs)``."""

    def __init__(self, node: NodeProto, weight: NDArray[np.float32]) -> None:
        self.source, self.name, self.weight = node.input[0], node.input[1], weight
        attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        self.groups: int = attributes.get("group", 1)
        self.strides, self.dilations = attributes.get("strides", [1, 1]), attributes.get("dilations", [1, 1])
        self.pads = attributes.get("pads", [0, 0, 0, 0])
        self.inputs = int(np.prod(weight.shape[1:]))
        self.products = np.zeros((self.groups, self.inputs, self.inputs), dtype=np.float32)

    def observe(self, x_BCHW: NDArray[np.float32]) -> None:
        """Add the products of a batch."""
        x_GnP = self._patches(x_BCHW)
        self.products += x_GnP @ x_GnP.transpose(0, 2, 1) / x_GnP.shape[2]

    def rounded(self) -> NDArray[np.float32]:
        """Round input by input, and correct the remaining weights for the error."""
        steps_Go1 = scales(self.weight).reshape(self.groups, -1)
        left_Gon = self.weight.reshape(self.groups, -1, self.inputs).astype(np.float64)
        result = np.zeros_like(left_Gon)
        diagonal = np.diagonal(self.products, axis1=1, axis2=2).mean(axis=1)
        damping = DAMPING * np.where(diagonal > 0, diagonal, 1)
        damped = self.products.astype(np.float64) + damping[:, None, None] * np.eye(self.inputs)
        upper_Gnn = np.linalg.cholesky(np.linalg.inv(damped)).transpose(0, 2, 1)
        for column in range(self.inputs):
            exact = left_Gon[:, :, column]
            nearest = np.clip(np.round(exact / steps_Go1), -LARGEST_INT8, LARGEST_INT8) * steps_Go1
            error_Go = (exact - nearest) / upper_Gnn[:, column, column][:, None]
            left_Gon[:, :, column:] -= error_Go[:, :, None] * upper_Gnn[:, None, column, column:]
            result[:, :, column] = nearest
        return result.reshape(self.weight.shape).astype(np.float32)

    def _patches(self, x_BCHW: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the inputs of each group at a sample of positions, ``(groups, inputs, positions)``."""
        top, left, bottom, right = self.pads
        x = np.pad(x_BCHW, ((0, 0), (0, 0), (top, bottom), (left, right)))
        sides = zip(self.weight.shape[2:], self.dilations, strict=True)
        height, width = (dilation * (side - 1) + 1 for side, dilation in sides)
        seen_BChwij = sliding_window_view(x, (height, width), axis=(2, 3))[
            :, :, :: self.strides[0], :: self.strides[1], :: self.dilations[0], :: self.dilations[1]
        ]
        batch, _, high, wide, _, _ = seen_BChwij.shape
        apart = max(1, math.isqrt(batch * high * wide // POSITIONS))
        ordered = seen_BChwij[:, :, ::apart, ::apart].transpose(1, 4, 5, 0, 2, 3)
        return ordered.reshape(self.groups, self.inputs, -1)


def _observe(model: ModelProto, layers: list[_Layer], batches: Iterable[Array]) -> None:
    """Run images through the graph, with the inputs of the layers as additional outputs."""
    watched = ModelProto()
    watched.CopyFrom(model)
    names = list(dict.fromkeys(layer.source for layer in layers))
    watched.graph.output.extend(helper.make_tensor_value_info(name, FLOAT, None) for name in names)
    session = onnx_session(watched.SerializeToString())
    for batch in batches:
        for start in range(0, len(batch), IMAGES):
            images = np.ascontiguousarray(batch[start : start + IMAGES])
            values = dict(zip(names, session.run(names, {INPUT: images}), strict=True))
            for layer in layers:
                layer.observe(values[layer.source])


def _halve_attributes(node: NodeProto) -> None:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.TENSOR and attribute.t.data_type == FLOAT:
            attribute.t.CopyFrom(_half(attribute.t, attribute.t.name))
        elif attribute.name == "to" and attribute.i == FLOAT:
            attribute.i = HALF


def _half(tensor: TensorProto, name: str) -> TensorProto:
    """Convert to float16; finite values beyond its range, such as -1e9 in a mask, are clipped."""
    values = numpy_helper.to_array(tensor)
    clipped = np.where(np.isfinite(values), np.clip(values, -LARGEST_HALF, LARGEST_HALF), values)
    return numpy_helper.from_array(clipped.astype(np.float16), name)


def _keep(record: logging.LogRecord) -> bool:
    """Drop warnings of ONNX Runtime, and only those."""
    return record.levelno > logging.WARNING or "onnxruntime" not in record.pathname
