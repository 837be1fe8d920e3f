from __future__ import annotations

from onnx import ModelProto, TensorProto

from covpool.export.formats import backbone_nodes
from covpool.export.smaller import to_half
from tests.export.conftest import Prepared
from tests.export.onnx_graphs import named, types


def test_the_backbone_is_half_and_the_rest_is_not(prepared: Prepared) -> None:
    inside = backbone_nodes(prepared.model)
    before = ModelProto()
    before.CopyFrom(prepared.model)
    half = to_half(prepared.model)
    assert prepared.model == before  # which others are made from
    found = types(half)
    floats = {TensorProto.FLOAT16, TensorProto.FLOAT}
    for node in half.graph.node:
        if node.op_type != "Cast":
            wanted = TensorProto.FLOAT16 if node.name in inside else TensorProto.FLOAT
            assert {found[name] for name in (*node.input, *node.output) if name} & floats <= {wanted}, node


def test_values_are_cast_at_the_ends_of_the_backbone_alone(prepared: Prepared) -> None:
    half = to_half(prepared.model)
    cast = [node for node in named(half, "Cast") if node.name.startswith("cast.")]
    assert [node.attribute[0].i for node in cast] == [TensorProto.FLOAT16, TensorProto.FLOAT]


def test_weights_are_held_once(prepared: Prepared) -> None:
    half = to_half(prepared.model)
    kept = {weight.name: weight.data_type for weight in half.graph.initializer}
    assert len(kept) == len(half.graph.initializer) <= len(prepared.model.graph.initializer) + 1
    classifier = [node.input[1] for node in named(half, "Gemm")]
    assert [kept[name] for name in classifier] == [TensorProto.FLOAT]
    convolutions = [node.input[1] for node in named(half, "Conv")]
    assert len(convolutions) > 3
    assert {kept[name] for name in convolutions} == {TensorProto.FLOAT16}
