"""The backbone in float16 and int8, the rest in float32."""

from __future__ import annotations

import contextlib

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from covpool.export.graph import backbone_nodes
from covpool.export.onnx_precision import quantized_nodes, round_weights, scales, to_float16, to_int8
from covpool.functional.newton_schulz import FITTED_STEPS
from tests.export.conftest import Prepared


def producers(model: ModelProto) -> dict[str, NodeProto]:
    """Return the node that produces each value."""
    return {output: node for node in model.graph.node for output in node.output}


def types(model: ModelProto) -> dict[str, int]:
    """Return the type of each value; the check also refuses a broken graph."""
    onnx.checker.check_model(model, full_check=True)
    graph = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    values = [*graph.value_info, *graph.input, *graph.output]
    found = {value.name: value.type.tensor_type.elem_type for value in values}
    return found | {weight.name: weight.data_type for weight in graph.initializer}


def named(model: ModelProto, op_type: str) -> list[NodeProto]:
    return [node for node in model.graph.node if node.op_type == op_type]


def test_the_backbone_is_half_and_the_rest_is_not(prepared: Prepared) -> None:
    inside = backbone_nodes(prepared.model)
    before = ModelProto()
    before.CopyFrom(prepared.model)
    half = to_float16(prepared.model)
    assert prepared.model == before  # the input stays unchanged
    found = types(half)
    floats = {TensorProto.FLOAT16, TensorProto.FLOAT}
    for node in half.graph.node:
        if node.op_type != "Cast":
            wanted = TensorProto.FLOAT16 if node.name in inside else TensorProto.FLOAT
            assert {found[name] for name in (*node.input, *node.output) if name} & floats <= {wanted}, node


def test_values_are_cast_at_the_ends_of_the_backbone_alone(prepared: Prepared) -> None:
    half = to_float16(prepared.model)
    cast = [node for node in named(half, "Cast") if node.name.startswith("cast.")]
    assert [node.attribute[0].i for node in cast] == [TensorProto.FLOAT16, TensorProto.FLOAT]


def test_weights_are_held_once(prepared: Prepared) -> None:
    half = to_float16(prepared.model)
    kept = {weight.name: weight.data_type for weight in half.graph.initializer}
    assert len(kept) == len(half.graph.initializer) <= len(prepared.model.graph.initializer) + 1
    classifier = [node.input[1] for node in named(half, "Gemm")]
    assert [kept[name] for name in classifier] == [TensorProto.FLOAT]
    convolutions = [node.input[1] for node in named(half, "Conv")]
    assert len(convolutions) > 3
    assert {kept[name] for name in convolutions} == {TensorProto.FLOAT16}


def test_constants_beyond_float16_are_clipped() -> None:
    """The large finite values of an attention mask stay finite; infinities stay infinite."""
    weight = np.array([1e9, -1e9, 1000.5, -np.inf], np.float32)
    node = helper.make_node("Add", ["images", "weight"], ["logits"], name="layer")
    node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['model.backbone.layer']")
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in ("images", "logits")]
    graph = helper.make_graph([node], "mask", ends[:1], ends[1:], [numpy_helper.from_array(weight, "weight")])
    half = to_float16(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10))
    found = numpy_helper.to_array(half.graph.initializer[0])
    assert found.dtype == np.float16
    assert found.tolist() == [65504, -65504, 1000.5, -np.inf]


@pytest.fixture(scope="module")
def shown() -> list[tuple[str, int, int]]:
    """The progress of ``quantized``."""
    return []


@pytest.fixture(scope="module")
def quantized(prepared: Prepared, shown: list[tuple[str, int, int]]) -> ModelProto:
    noise = np.random.default_rng(0).integers(0, 256, (4, 64, 64, 3), dtype=np.uint8)
    return to_int8(
        prepared.model,
        [noise[:2], noise[2:]],
        lambda what: contextlib.nullcontext(lambda done, total: shown.append((what, done, total))),
    )


@pytest.mark.usefixtures("quantized")
def test_every_stage_of_int8_shows_its_progress(shown: list[tuple[str, int, int]]) -> None:
    for what in ("batches, to observe the layers", "batches, to find the ranges of values"):
        assert [(done, total) for name, done, total in shown if name == what] == [(0, 2), (1, 2)]
    assert len([name for name, _, _ in shown if name == "layers rounded"]) > 1


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
    assert len(products) >= 3 * FITTED_STEPS - 3 + 2  # the root, the covariance and the classifier
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
    assert len(entered) == 1


def test_the_first_layers_stay(prepared: Prepared, quantized: ModelProto) -> None:
    backbone, inside = backbone_nodes(prepared.model), quantized_nodes(prepared.model)
    assert inside < backbone
    layers = [node for node in named(quantized, "Conv") if node.name in backbone]
    made = producers(quantized)
    is_float = [node.input[1] not in made for node in layers]
    assert is_float == [True] * 3 + [False] * (len(layers) - 3)
    assert len(layers) == 15


def convolution(weight: NDArray[np.float32], **attributes: object) -> onnx.ModelProto:
    node = helper.make_node("Conv", ["images", "weight"], ["logits"], name="layer", **attributes)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("images", "logits")]
    graph = helper.make_graph(
        [node], "graph", ends[:1], ends[1:], [numpy_helper.from_array(weight, "weight")]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def output(model: onnx.ModelProto, images: NDArray[np.float32], **options: object) -> torch.Tensor:
    weight = torch.from_numpy(numpy_helper.to_array(model.graph.initializer[0]).copy())
    return torch.nn.functional.conv2d(torch.from_numpy(images), weight, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "attributes", "options"),
    [
        ((8, 4, 3, 3), {"pads": [1, 1, 1, 1]}, {"padding": 1}),
        (
            (4, 1, 5, 5),
            {"pads": [4, 4, 4, 4], "group": 4, "dilations": [2, 2]},
            {"padding": 4, "groups": 4, "dilation": 2},
        ),
        ((6, 2, 3, 3), {"strides": [2, 2], "group": 2}, {"stride": 2, "groups": 2}),
        ((8, 4, 1, 1), {}, {}),
    ],
    ids=["dense", "depthwise", "groups", "pointwise"],
)
def test_errors_cancel(
    shape: tuple[int, ...], attributes: dict[str, object], options: dict[str, object]
) -> None:
    """On smooth images with similar channels, errors are smaller than with weights rounded one by one."""
    random = np.random.default_rng(0)
    weight = random.normal(size=shape).astype(np.float32)
    smooth = np.cumsum(np.cumsum(random.normal(size=(6, 1, 24, 24)), axis=2), axis=3) / 24
    images = (1 + smooth + 0.1 * random.normal(size=(6, 4, 24, 24))).astype(np.float32)
    model = convolution(weight, **attributes)
    rounded, steps = round_weights(model, {"layer"}, [images[:4], images[4:]])
    found = numpy_helper.to_array(rounded.graph.initializer[0])
    step = scales(weight).reshape(-1, 1, 1, 1)
    np.testing.assert_array_equal(steps["weight"], step.ravel())
    whole = found / step
    np.testing.assert_allclose(whole, np.round(whole), atol=1e-4)
    assert np.abs(whole).max() <= 127.001
    assert np.abs(found - weight).max() <= 4 * step.max()
    usual = convolution(np.round(weight / step) * step, **attributes)
    exact = output(model, images, **options)
    errors = [float((output(one, images, **options) - exact).square().mean()) for one in (rounded, usual)]
    assert errors[0] < 0.5 * errors[1]


def test_the_products_are_of_what_the_filters_see() -> None:
    """Filters that see only zeros, and channels of zeros, are rounded as usual."""
    weight = np.random.default_rng(0).normal(size=(3, 2, 3, 3)).astype(np.float32)
    weight[1] = 0
    rounded, steps = round_weights(convolution(weight), {"layer"}, [np.zeros((2, 2, 5, 5), np.float32)])
    step = steps["weight"].reshape(-1, 1, 1, 1)
    expected = np.round(weight / step) * step
    np.testing.assert_allclose(numpy_helper.to_array(rounded.graph.initializer[0]), expected, rtol=1e-5)


def test_others_are_left_alone() -> None:
    model = convolution(np.ones((2, 2, 1, 1), np.float32))
    rounded, steps = round_weights(model, {"another"}, [np.ones((1, 2, 4, 4), np.float32)])
    assert rounded == model
    assert steps == {}
