"""Backbones of timm with covariance pooling and a classifier, and their files on disk.

Importing this package registers the paper's networks with timm.
"""

from typing import TYPE_CHECKING

from covpool import lazily
from covpool.errors import BundleError, CheckpointError, KeepResolutionError, UnsupportedBackboneError
from covpool.models.bundle import load_model, read_card
from covpool.models.config import ModelConfig
from covpool.models.convert import (
    isqrt_cov_alexnet,
    isqrt_cov_resnet50,
    isqrt_cov_resnet101,
    isqrt_cov_vgg16_bn,
)
from covpool.models.create import build_model, create_model, parameter_groups
from covpool.models.model import PooledClassifier
from covpool.models.saving import save_model

if TYPE_CHECKING:  # used by few, so it is imported when it is first used
    from covpool.models.push import push_to_hub

__all__ = [
    "BundleError",
    "CheckpointError",
    "KeepResolutionError",
    "ModelConfig",
    "PooledClassifier",
    "UnsupportedBackboneError",
    "build_model",
    "create_model",
    "isqrt_cov_alexnet",
    "isqrt_cov_resnet50",
    "isqrt_cov_resnet101",
    "isqrt_cov_vgg16_bn",
    "load_model",
    "parameter_groups",
    "push_to_hub",
    "read_card",
    "save_model",
]

__getattr__ = lazily(
    __name__,
    "hub",
    {
        "covpool.models.push": "push_to_hub",
    },
)
