from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

import covpool
from covpool.data.transforms import Preprocessing, evaluation_transform, pixels_transform
from covpool.export.graph import ExportGraph, example, may_have_free_size, trace
from covpool.export.options import graph_input
from tests.data.pictures import photo
from tests.export.conftest import Prepared
from tests.functional.tolerances import assert_close


@pytest.mark.parametrize("mean", [(0.485, 0.456, 0.406), (0.5, 0.5, 0.5)])
def test_the_graph_normalises_as_evaluation_does(mean: tuple[float, float, float]) -> None:
    preprocessing = Preprocessing(size=64, mean=mean)
    model = covpool.create_model("test_resnet", dim=8, num_classes=3, image_size=64).eval()
    picture: Image.Image = photo((90, 70))
    pixels = pixels_transform(preprocessing)(picture)[None]
    images = torch.from_numpy(graph_input(pixels, preprocessing, takes_pixels=True))
    assert (images.dtype, images.shape) == (torch.uint8, (1, 64, 64, 3))
    expected = model(evaluation_transform(preprocessing)(picture)[None])
    assert_close(ExportGraph(model, preprocessing)(images), expected, relative=1e-5)


def test_what_is_beside_the_graph_is_what_evaluation_does() -> None:
    preprocessing = Preprocessing(size=32)
    pixels = pixels_transform(preprocessing)(photo())[None]
    images = graph_input(pixels, preprocessing, takes_pixels=False)
    expected = evaluation_transform(preprocessing)(photo())[None]
    np.testing.assert_array_equal(images, expected.numpy())


@pytest.mark.parametrize(
    ("backbone", "free"),
    [("test_resnet", True), ("test_vit", False), ("tf_efficientnet_lite0", False), ("test_convnext", True)],
)
def test_which_backbones_may_take_any_size(backbone: str, free: bool) -> None:
    with torch.device("meta"):
        model = covpool.create_model(backbone, dim=8, num_classes=2)
    assert may_have_free_size(model) is free


@pytest.mark.parametrize("dim", [16, 64])  # fewer and more channels than the example has positions
def test_a_free_size_is_free_of_the_side_that_is_cheaper(dim: int) -> None:
    model = covpool.create_model("test_resnet", dim=dim, num_classes=3, image_size=96).eval()
    graph = ExportGraph(model, Preprocessing(size=96))
    run = trace(graph, 96, free_size=True).program.module()
    for size in ((32, 32), (96, 96), (256, 192)):
        images = example(graph, 1, *size)
        assert_close(run(images), graph(images), relative=1e-5)


def test_no_file_of_this_machine_is_named(prepared: Prepared) -> None:
    for module in prepared.traced.program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            assert "stack_trace" not in node.meta
