from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, TensorProto

from covpool.export.formats import backbone_nodes
from covpool.export.smaller import quantized_nodes, to_int8
from tests.export.conftest import Prepared
from tests.export.onnx_graphs import named, producers


@pytest.fixture(scope="module")
def quantized(prepared: Prepared) -> ModelProto:
    noise = np.random.default_rng(0).integers(0, 256, (4, 64, 64, 3), dtype=np.uint8)
    return to_int8(prepared.model, [noise[:2], noise[2:]])


def test_convolutions_of_the_backbone_are_quantised_by_channel(
    prepared: Prepared, quantized: ModelProto
) -> None:
    inside, made = quantized_nodes(prepared.model), producers(quantized)
    weights = {weight.name: weight for weight in quantized.graph.initializer}
    convolutions = [node for node in named(quantized, "Conv") if node.name in inside]
    assert len(convolutions) == len([n for n in named(prepared.model, "Conv") if n.name in inside]) > 3
    for node in convolutions:
        value, weight = (made[name] for name in node.input[:2])
        assert value.op_type == weight.op_type == "DequantizeLinear"
        assert weights[weight.input[0]].data_type == TensorProto.INT8
        assert list(weights[weight.input[1]].dims) == [weights[weight.input[0]].dims[0]]


def test_no_product_of_the_root_is_quantised(prepared: Prepared, quantized: ModelProto) -> None:
    inside, made = backbone_nodes(prepared.model), producers(quantized)
    products = [node for op_type in ("MatMul", "Gemm") for node in named(quantized, op_type)]
    assert len(products) >= 12  # the root at five steps, and the classifier
    for node in products:
        assert node.name not in inside
        assert all(made[name].op_type != "DequantizeLinear" for name in node.input if name in made)


def test_outside_the_backbone_only_its_output_comes_from_int8(
    prepared: Prepared, quantized: ModelProto
) -> None:
    inside, made = backbone_nodes(prepared.model), producers(quantized)
    entered = {
        name
        for node in quantized.graph.node
        if node.name in {n.name for n in prepared.model.graph.node} - inside
        for name in node.input
        if name in made and made[name].op_type == "DequantizeLinear"
    }
    assert len(entered) <= 1


def test_the_first_layers_stay(prepared: Prepared, quantized: ModelProto) -> None:
    backbone, inside = backbone_nodes(prepared.model), quantized_nodes(prepared.model)
    assert inside < backbone
    layers = [node for node in named(quantized, "Conv") if node.name in backbone]
    made = producers(quantized)
    is_float = [node.input[1] not in made for node in layers]
    assert is_float == [True] * 3 + [False] * (len(layers) - 3)
    assert len(layers) == 15
