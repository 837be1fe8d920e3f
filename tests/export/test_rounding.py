from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from covpool.export.smaller import round_weights, scales


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
    """On smooth images of like channels the outputs are nearer than those of weights rounded one by one."""
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
    """Filters that see nothing but zeros, and channels of zeros, round as usual."""
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
