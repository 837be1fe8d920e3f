"""Tracing: preprocessing in the graph, dynamic sizes, and ten families of networks in ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import covpool
from covpool.data.transforms import Preprocessing, evaluation_transform, pixels_transform
from covpool.export.graph import (
    ExportGraph,
    backbone_nodes,
    example,
    graph_input,
    may_have_free_size,
    torch_runner,
    trace,
)
from covpool.export.targets import TARGETS, Exportable
from tests.data.pictures import photo
from tests.export.conftest import Prepared
from tests.functional.tolerances import assert_close

# A network of each family, and its image size in pixels.
NETWORKS = {
    "regnetx_002": 96,
    "densenet121": 64,
    "vgg11_bn": 64,
    "mobilenetv3_small_050": 96,
    "efficientnet_b0": 64,
    "convnext_atto": 64,
    "vit_tiny_patch16_224": 64,
    "swin_tiny_patch4_window7_224": 224,
    "repvgg_a0": 64,
    "ghostnet_050": 96,
}


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
    [("test_resnet", True), ("test_vit", False), ("tf_efficientnet_lite0", False)],
)
def test_which_backbones_may_take_any_size(backbone: str, free: bool) -> None:
    with torch.device("meta"):
        model = covpool.create_model(backbone, dim=8, num_classes=2)
    assert may_have_free_size(model) is free


# Fewer and more channels than positions in the example.
@pytest.mark.parametrize("dim", [pytest.param(16, marks=pytest.mark.slow), 64])
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


@pytest.mark.slow
@pytest.mark.parametrize("backbone", NETWORKS)
def test_logits_are_torchs(backbone: str, tmp_path: Path) -> None:
    size = NETWORKS[backbone]
    torch.manual_seed(0)
    model = covpool.create_model(backbone, dim=16, num_classes=7, image_size=size)
    model.train()
    with torch.no_grad():  # change the initial statistics of BatchNorm
        for _ in range(3):
            model(2 * torch.randn(8, 3, size, size) + 1)
    graph = ExportGraph(model.eval(), Preprocessing(size=size))
    exportable = Exportable(trace(graph, size, free_size=False), lambda: [])
    written = exportable.onnx
    names = [node.name for node in written.graph.node]
    assert len(names) == len(set(names))
    assert 0 < len(backbone_nodes(written)) < len(names)
    assert any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()) or (
        backbone in ("convnext_atto", "vit_tiny_patch16_224", "swin_tiny_patch4_window7_224")
    )
    TARGETS["onnx"].write(exportable, tmp_path / "model.onnx", {})
    run, own = TARGETS["onnx"].load(tmp_path / "model.onnx"), torch_runner(graph)
    for batch in (1, 5):
        images = example(graph, batch, size, size).numpy()
        expected = own(images)
        assert np.abs(run(images) - expected).max() <= 1e-4 * np.abs(expected).max()
