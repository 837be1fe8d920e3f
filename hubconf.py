"""For ``torch.hub.load(repository, "create_model", "resnet50", num_classes=10)``, without an installation."""

import sys
from pathlib import Path

dependencies = ["torch", "timm", "safetensors"]
sys.path.insert(0, str(Path(__file__).parent / "src"))

from covpool.models import (  # noqa: E402
    create_model,
    isqrt_cov_alexnet,
    isqrt_cov_resnet50,
    isqrt_cov_resnet101,
    isqrt_cov_vgg16_bn,
    load_model,
)

__all__ = [
    "create_model",
    "isqrt_cov_alexnet",
    "isqrt_cov_resnet50",
    "isqrt_cov_resnet101",
    "isqrt_cov_vgg16_bn",
    "load_model",
]
