"""Ten families of networks, by ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import covpool
from covpool.data.transforms import Preprocessing
from covpool.export.formats import backbone_nodes, onnx_runner, to_onnx, write_onnx
from covpool.export.graph import ExportGraph, example, torch_runner, trace

# A network of each family, and the side of its images.
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


@pytest.mark.slow
@pytest.mark.parametrize("backbone", NETWORKS)
def test_logits_are_torchs(backbone: str, tmp_path: Path) -> None:
    size = NETWORKS[backbone]
    torch.manual_seed(0)
    model = covpool.create_model(backbone, dim=16, num_classes=7, image_size=size)
    model.train()
    with torch.no_grad():  # statistics of BatchNorm that are not those it begins with
        for _ in range(3):
            model(2 * torch.randn(8, 3, size, size) + 1)
    graph = ExportGraph(model.eval(), Preprocessing(size=size))
    written = to_onnx(trace(graph, size, free_size=False))
    names = [node.name for node in written.graph.node]
    assert len(names) == len(set(names))
    assert 0 < len(backbone_nodes(written)) < len(names)
    assert any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()) or (
        backbone in ("convnext_atto", "vit_tiny_patch16_224", "swin_tiny_patch4_window7_224")
    )
    write_onnx(written, tmp_path / "model.onnx", {})
    run, own = onnx_runner(tmp_path / "model.onnx"), torch_runner(graph)
    for batch in (1, 5):
        images = example(graph, batch, size, size).numpy()
        expected = own(images)
        assert np.abs(run(images) - expected).max() <= 1e-4 * np.abs(expected).max()
