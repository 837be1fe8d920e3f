"""What tests ask of an ONNX graph."""

from __future__ import annotations

from onnx import ModelProto, NodeProto


def producers(model: ModelProto) -> dict[str, NodeProto]:
    """The node that each value comes from."""
    return {output: node for node in model.graph.node for output in node.output}


def types(model: ModelProto) -> dict[str, int]:
    """The type of each value, by a check that also refuses a broken graph."""
    import onnx

    onnx.checker.check_model(model, full_check=True)
    graph = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    values = [*graph.value_info, *graph.input, *graph.output]
    found = {value.name: value.type.tensor_type.elem_type for value in values}
    return found | {weight.name: weight.data_type for weight in graph.initializer}


def named(model: ModelProto, op_type: str) -> list[NodeProto]:
    return [node for node in model.graph.node if node.op_type == op_type]
