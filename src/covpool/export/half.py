"""The backbone of an ONNX graph in float16, and all else in float32.

ONNX Runtime's own converter takes a list of nodes to leave alone, but rounds what passes from one of them to
the next to float16 all the same, so the matrix root would lose what it is in float32 for. Here values are
cast where they enter the backbone and where they leave it, and nowhere else.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from covpool.export.onnx_file import backbone_nodes

HALF, FLOAT = TensorProto.FLOAT16, TensorProto.FLOAT
LARGEST = float(np.finfo(np.float16).max)
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
    clipped = np.where(finite, np.clip(values, -LARGEST, LARGEST), values)
    return numpy_helper.from_array(clipped.astype(np.float16), name)
