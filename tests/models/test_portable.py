"""Complete models under torch.compile and ONNX Runtime: a ResNet, an EfficientNet, a transformer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import covpool
from covpool.models import PooledClassifier
from tests.functional.portability import check_onnx
from tests.functional.tolerances import assert_close

# torch's own code raises these warnings during tracing and code generation.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

MODELS = {
    "resnet10t": {"normalize": "l2"},
    "tf_efficientnet_lite0": {"join": "gap"},
    "vit_tiny_patch16_224": {"join": "cls", "rank": 4},
}


def models(*fast: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "backbone", [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in MODELS]
    )


def make(backbone: str) -> tuple[PooledClassifier, Tensor]:
    model = covpool.create_model(backbone, dim=16, num_classes=5, image_size=64, **MODELS[backbone])
    return model, torch.randn(3, 3, 64, 64)


@models()
def test_onnx_runtime(backbone: str, tmp_path: Path) -> None:
    model, images = make(backbone)
    others = [(images[:2],), (torch.randn(5, 3, 64, 64),)]
    check_onnx(model.eval(), tmp_path / "model.onnx", (images,), others)


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["resnet10t", "vit_tiny_patch16_224"])  # EfficientNet takes minutes
def test_compiled_training(backbone: str) -> None:
    model, images = make(backbone)
    # Evaluation mode: in training, BatchNorm uses batch statistics, and sums run in another order.
    model.eval()
    compiled = torch.compile(model, fullgraph=True)
    results = []
    for each in (model, compiled):
        model.zero_grad()
        logits = each(images)
        torch.nn.functional.cross_entropy(logits, torch.tensor([0, 4, 2])).backward()
        results.append({"logits": logits, **{name: p.grad for name, p in model.named_parameters()}})
    plain, other = results
    for name in plain:
        assert_close(other[name], plain[name], relative=1e-3)
