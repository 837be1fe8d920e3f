"""What a network's features look like, found out by running it without numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from covpool.models.backbones.network import UnsupportedBackboneError, build_network
from covpool.models.backbones.surgery import parameters_behind
from covpool.nn import CovPool


@dataclass(frozen=True)
class FeatureFormat:
    """How the output of ``forward_features`` is to be read.

    Attributes:
        channels: C.
        layout: ``"channels_first"`` maps ``(B, C, H, W)``, or ``"channels_last"``: maps ``(B, H, W, C)``
            and tokens ``(B, n, C)``.
        tokens: whether they are tokens.
        prefix_tokens: class, distillation and register tokens, which come before the patches' own.
        has_class_token: whether the first of them is a class token, and not a register.
    """

    channels: int
    layout: Literal["channels_first", "channels_last"]
    tokens: bool = False
    prefix_tokens: int = 0
    has_class_token: bool = False

    def positions(self, features: Tensor) -> Tensor:
        """The features that belong to places in the image."""
        return features[:, self.prefix_tokens :] if self.prefix_tokens else features

    def class_token(self, features: Tensor) -> Tensor:
        """``(B, C)``, the class token."""
        return features[:, 0]

    def average(self, features: Tensor) -> Tensor:
        """``(B, C)``, the average over the places in the image."""
        x = self.positions(features)
        return x.flatten(2).mean(2) if self.layout == "channels_first" else x.flatten(1, -2).mean(1)


class Probe:
    """A network on the meta device: it computes shapes and autograd's graph, and not one number."""

    network: Any  # torch's types do not know timm's interface

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.name = name
        with torch.device("meta"):
            try:
                self.network = build_network(name, options).eval()
            except (AssertionError, KeyError, RuntimeError, TypeError) as error:
                told = f" with {dict(options)}" if options else ""
                raise UnsupportedBackboneError(f"timm cannot build {name}{told}: {error}") from error
        if any(isinstance(part, CovPool) for part in self.network.children()):
            raise UnsupportedBackboneError(f"{name} has its pooling: timm.create_model({name!r}) builds it")
        size = options.get("img_size") or self.network.pretrained_cfg["input_size"][-1]
        height, width = size if isinstance(size, tuple | list) else (size, size)
        self.images = torch.empty(2, options.get("in_chans", 3), height, width, device="meta")

    def features(self, network: Any = None) -> Tensor:
        """The features of two images, by the network or by a changed copy of it."""
        network = network or self.network
        if not hasattr(network, "forward_features"):
            raise UnsupportedBackboneError(f"{self.name} has no forward_features: there is nothing to pool")
        try:
            features = network.forward_features(self.images)
        except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
            size = "x".join(map(str, self.images.shape[1:]))
            raise UnsupportedBackboneError(f"{self.name} does not run on {size} images: {error}") from error
        if not isinstance(features, Tensor) or features.ndim not in (3, 4):
            got = tuple(features.shape) if isinstance(features, Tensor) else f"a {type(features).__name__}"
            raise UnsupportedBackboneError(
                f"{self.name} gives {got} as features; "
                "a covariance needs maps (B, C, H, W) or tokens (B, n, C)"
            )
        return features

    def format(self) -> FeatureFormat:
        """How to read the features."""
        features = self.features()
        if features.ndim == 3:
            prefix = self._prefix_tokens(features)
            if features.shape[1] - prefix < 2:
                raise UnsupportedBackboneError(f"{self.name} gives its class token alone, and no patches'")
            return FeatureFormat(
                features.shape[2], "channels_last", True, prefix, self._has_class_token(prefix)
            )
        if self.is_channels_last(features):
            return FeatureFormat(features.shape[3], "channels_last")
        return FeatureFormat(features.shape[1], "channels_first")

    def is_channels_last(self, features: Tensor) -> bool:
        """Whether maps are ``(B, H, W, C)``, as Swin's are."""
        declared = getattr(self.network, "output_fmt", None)
        if declared is not None:
            return str(declared).endswith("NHWC")
        return bool(features.shape[-1] == self.network.num_features != features.shape[1])

    def _prefix_tokens(self, features: Tensor) -> int:
        declared = getattr(self.network, "num_prefix_tokens", None)
        if declared is not None:
            return int(declared)
        # XCiT, CaiT and others have a class token and do not say so. The images are square, and so is the
        # grid of their patches: what is over came before it.
        return int(features.shape[1] - math.isqrt(features.shape[1]) ** 2)

    def _has_class_token(self, prefix_tokens: int) -> bool:
        if hasattr(self.network, "num_prefix_tokens"):  # which counts registers too
            return getattr(self.network, "cls_token", None) is not None
        return prefix_tokens > 0

    def used_parameters(self) -> set[int]:
        """The ids of the parameters that have a part in the features."""
        # In training mode: for evaluation some networks keep what they computed before, without its graph.
        self.network.train()
        with torch.enable_grad():
            used = parameters_behind(self.features())
        self.network.eval()
        return used
