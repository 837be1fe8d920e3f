"""Weights rounded to int8 so that the errors cancel each other on images, not each by itself.

A layer's output is W x. Rounding W column by column, the error of a column is spread over the columns that
are still to come, in the proportion that disturbs the outputs on the observed x least: the second-order
method of optimal brain surgery, in the form of GPTQ (Frantar et al. 2023). On smooth images the taps of a
small filter see almost the same values, so that most of its error can be cancelled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import onnxruntime
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from covpool.export.graph import INPUT
from covpool.export.running import Array

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
