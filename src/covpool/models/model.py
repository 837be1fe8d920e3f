"""The model: a backbone, a pooling layer and a classifier."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covpool.errors import UsageError
from covpool.functional.arguments import check_choice, check_whole
from covpool.models.backbone import Backbone
from covpool.models.config import CLASS_TOKEN, ModelConfig
from covpool.nn import CovPool
from covpool.nn.cov_pool import DIM


class Head(nn.Module):
    """Optional hidden layers, optional normalization, dropout, classifier.

    The pooled vector is long, d(d+1)/2 values. At 1,000 classes a dense classifier has as many parameters as
    a backbone. A bottleneck makes more classes possible:

    ============================ =========================================
    ``Head(v, k)``               dense: v·k weights
    ``Head(v, k, rank=r)``       low rank, still linear: r·(v + k)
    ``Head(v, k, hidden=(h,))``  an MLP with ReLU: v·h + h·k
    ============================ =========================================

    Args:
        in_features: v, the length of the pooled vector.
        num_classes: k; 0 for no classifier.
        rank: r, or ``None``.
        hidden: widths of hidden layers; the paper's AlexNet and VGG have (4096, 4096).
        batchnorm: BatchNorm after each hidden layer.
        drop_rate: dropout after each hidden layer, or on the vector if there is none.
        normalize: ``"l2"`` divides the input of the classifier by its norm.

    Shapes:
        ``(B, in_features)`` to ``(B, num_classes)``; ``(B, hidden_size)`` with ``pre_logits=True``.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        rank: int | None = None,
        hidden: Sequence[int] = (),
        batchnorm: bool = False,
        drop_rate: float = 0.0,
        normalize: Literal["l2"] | None = None,
    ) -> None:
        super().__init__()
        self.classifier: nn.Module
        self.in_features = in_features
        if rank is not None:
            # Without ReLU and bias it is a linear map of rank r.
            self.hidden = nn.Sequential(nn.Linear(in_features, rank, bias=False))
        else:
            self.hidden = _hidden_layers(in_features, hidden, batchnorm, drop_rate)
        self.hidden_size = rank or (hidden[-1] if hidden else in_features)
        self.normalize = normalize
        self.drop = nn.Dropout(drop_rate)
        self.reset_classifier(num_classes, like=torch.empty(0))

    def reset_classifier(self, num_classes: int, like: Tensor) -> None:
        """Replace the classifier (0 classes for none), on the device and in the dtype of ``like``."""
        self.classifier = (
            nn.Linear(self.hidden_size, num_classes, device=like.device, dtype=like.dtype)
            if num_classes
            else nn.Identity()
        )

    def forward(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return the logits, or the input of the classifier with ``pre_logits``."""
        first = self.hidden[0] if len(self.hidden) else self.classifier
        if isinstance(first, nn.Linear):
            x = x.to(first.weight.dtype)  # a model cast to half precision still pools in float32
        x = self.hidden(x)
        if self.normalize is not None:
            x = unit(x)
        x = self.drop(x)
        return x if pre_logits else self.classifier(x)


def unit(x: Tensor) -> Tensor:
    """Divide each row by its norm, computed in float32 at least; rows of zeros stay zero."""
    full = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.normalize(full, dim=1).to(x.dtype)


def _hidden_layers(before: int, widths: Sequence[int], batchnorm: bool, drop_rate: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in widths:
        if layers:
            layers.append(nn.Dropout(drop_rate))
        layers.append(nn.Linear(before, width, bias=not batchnorm))
        if batchnorm:
            layers.append(nn.BatchNorm1d(width))
        layers.append(nn.ReLU(inplace=True))
        before = width
    return nn.Sequential(*layers)


class PooledClassifier(nn.Module):
    """A backbone's features, pooled by one of covpool's methods, and classified.

    :func:`covpool.create_model` creates it. It has timm's ``forward_features``, ``forward_head``,
    ``reset_classifier``, ``get_classifier``, ``num_classes``, ``num_features``, ``head_hidden_size``,
    ``pretrained_cfg``, ``no_weight_decay`` and ``set_grad_checkpointing``, so timm's tools
    (``timm.data.resolve_model_data_config``, ``timm.optim``) work with it.

    Attributes:
        config: the configuration, with the chosen values in place of ``None`` and ``"auto"``.
        backbone: timm's network, without its pooling and classifier.
        format: the format of the backbone's features.
        pool: the :class:`covpool.nn.CovPool`, or a :class:`ClassToken`.
        head: the :class:`~covpool.models.model.Head` on the pooled vector.
        first_order: with ``join``, the linear classifier whose logits are added to the head's.
        expansion: with ``join="gap"``, the layers of the backbone between its features and average pooling.
        classes: the names of the classes, if known.
        keep_statistics: whether the backbone's BatchNorms use their stored statistics in training, too; their
            weights still learn. Use it to fine-tune with small batches.
    """

    backbone: Any  # torch's types do not know timm's interface

    def __init__(self, config: ModelConfig, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone.network
        self.format = backbone.format
        channels = backbone.format.channels
        self.config = dataclasses.replace(
            config, dim=_dim(config, channels), keep_resolution=backbone.kept_resolution
        )
        self._check_class_token()
        self.pool = ClassToken(channels) if config.pool == CLASS_TOKEN else _pool(self.config, backbone)
        self.head = _head(self.config, self.pool.out_features)
        self.num_features = channels
        self.expansion = backbone.expansion
        self.expanded_channels = backbone.expanded_channels if config.join == "gap" else channels
        self.num_classes = config.num_classes
        self.first_order = self._new_first_order(config.num_classes) if config.join else None
        self.pretrained_cfg = self._own_pretrained_cfg()
        self.classes: tuple[str, ...] | None = None
        self.keep_statistics = False

    @property
    def head_hidden_size(self) -> int:
        """The length of ``forward_head(..., pre_logits=True)``."""
        return self.head.hidden_size + (self.expanded_channels if self.first_order is not None else 0)

    def forward_features(self, x: Tensor) -> Tensor:
        """Images ``(B, 3, H, W)`` to the backbone's features, as timm gives them."""
        features: Tensor = self.backbone.forward_features(x)
        return features

    def forward_pool(self, features: Tensor) -> Tensor:
        """Features to the pooled vector ``(B, pool.out_features)``, in float32 at least."""
        is_token = self.config.pool == CLASS_TOKEN
        vector: Tensor = self.pool(features if is_token else self.format.positions(features))
        return vector

    def forward_first_order(self, features: Tensor) -> Tensor | None:
        """Features to the first-order vector ``(B, expanded_channels)``; ``None`` without ``join``."""
        if self.config.join is None:
            return None
        if self.config.join == "cls":
            return self.format.class_token(features)
        return self.format.average(features if self.expansion is None else self.expansion(features))

    def classify(self, vector: Tensor, first: Tensor | None, pre_logits: bool = False) -> Tensor:
        """The pooled vector and the first-order vector to logits, or to the input of the classifiers."""
        if first is None or self.first_order is None:
            logits: Tensor = self.head(vector, pre_logits)
            return logits
        if self.config.normalize is not None:
            first = unit(first)
        if pre_logits or not self.num_classes:
            return torch.cat([self.head(vector, pre_logits=True), first], dim=1)
        return self.head(vector) + self.first_order(self.head.drop(first))  # type: ignore[no-any-return]

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        """Features to logits, or to the input of the classifiers with ``pre_logits``."""
        return self.classify(self.forward_pool(features), self.forward_first_order(features), pre_logits)

    def forward(self, x: Tensor) -> Tensor:
        """Images ``(B, 3, H, W)`` to logits ``(B, num_classes)``."""
        return self.forward_head(self.forward_features(x))

    def get_classifier(self) -> nn.Module | tuple[nn.Module, nn.Module]:
        """Return the classifier; with ``join`` the second-order and the first-order classifier."""
        if self.first_order is None:
            return self.head.classifier
        return self.head.classifier, self.first_order

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier; 0 classes for none. The pooling stays."""
        if global_pool is not None:
            raise UsageError(f"the pooling is {self.config.pool}: make a new model with pool={global_pool!r}")
        check_whole("num_classes", num_classes, at_least=0)
        self.head.reset_classifier(num_classes, like=next(self.parameters()))
        if self.first_order is not None:
            self.first_order = self._new_first_order(num_classes)
        self.num_classes = num_classes
        self.config = dataclasses.replace(self.config, num_classes=num_classes)
        self.classes = None

    def freeze(self, part: Literal["backbone"]) -> None:
        """Freeze ``part``: it gets no gradient, and its BatchNorms stay in evaluation mode."""
        check_choice("freeze", part, ("backbone",))
        for frozen in self.backbone_parts():
            frozen.requires_grad_(False)
        self.train(self.training)

    def unfreeze(self) -> None:
        """Train all parameters."""
        self.requires_grad_(True)
        self.train(self.training)

    def train(self, mode: bool = True) -> PooledClassifier:
        """Set the mode; a frozen backbone stays in evaluation mode."""
        super().train(mode)
        if not any(parameter.requires_grad for parameter in self.backbone.parameters()):
            for frozen in self.backbone_parts():
                frozen.eval()
        elif self.keep_statistics:
            for module in (module for part in self.backbone_parts() for module in part.modules()):
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        return self

    def backbone_parts(self) -> list[nn.Module]:
        """Return the backbone, and its expansion if that is separate."""
        return [self.backbone] if self.expansion is None else [self.backbone, self.expansion]

    def group_matcher(self, coarse: bool = False) -> Any:
        """Return patterns of the backbone's layer names in order, for timm's layer-wise decay.

        Pooling and classifier match no pattern and come last.
        """
        if not hasattr(self.backbone, "group_matcher"):
            raise UsageError(f"{self.config.backbone} does not tell its layers apart: leave layer_decay=None")
        matcher = self.backbone.group_matcher(coarse=coarse)
        if callable(matcher):  # CaiT and Inception give a function of a name
            return lambda name: _order(matcher, name)
        return {stage: _prefixed(pattern) for stage, pattern in matcher.items()}

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters that the backbone's authors train without weight decay."""
        names = self.backbone.no_weight_decay() if hasattr(self.backbone, "no_weight_decay") else ()
        return {f"backbone.{name}" for name in names}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the backbone's activations in the backward pass."""
        if not hasattr(self.backbone, "set_grad_checkpointing"):
            raise UsageError(f"{self.config.backbone} cannot checkpoint its activations")
        self.backbone.set_grad_checkpointing(enable)

    def _check_class_token(self) -> None:
        if CLASS_TOKEN in (self.config.pool, self.config.join) and not self.format.has_class_token:
            option = "join" if self.config.join == CLASS_TOKEN else "pool"
            raise UsageError(f'{self.config.backbone} has no class token; {option}="gap" takes the average')

    def _new_first_order(self, num_classes: int) -> nn.Module:
        like = next(self.parameters())
        if not num_classes:
            return nn.Identity()
        # The bias is the head's.
        wanted = self.expanded_channels
        return nn.Linear(wanted, num_classes, bias=False, device=like.device, dtype=like.dtype)

    def _own_pretrained_cfg(self) -> dict[str, Any]:
        """Return the backbone's, with the new names of layers and the configured preprocessing."""
        cfg = dict(self.backbone.pretrained_cfg)
        first = cfg.get("first_conv") or ()
        first = (first,) if isinstance(first, str) else first
        cfg["first_conv"] = tuple(f"backbone.{name}" for name in first)
        cfg["classifier"] = ("head.classifier", *(("first_order",) if self.first_order is not None else ()))
        cfg["num_classes"] = self.num_classes
        if size := self.config.image_size:
            cfg["input_size"] = (cfg["input_size"][0], size, size)
        unknown = self.config.preprocessing.keys() - {"mean", "std", "interpolation", "crop_pct", "crop_mode"}
        if unknown:
            raise UsageError(f"preprocessing has no {', '.join(sorted(unknown))}; the size is image_size=")
        for name in ("mean", "std"):
            given = self.config.preprocessing.get(name, ())
            if not isinstance(given, list | tuple):
                raise UsageError(f"{name} of preprocessing has a number for each channel; got {given!r}")
        return {**cfg, **self.config.preprocessing}


class ClassToken(nn.Module):
    """The class token of features ``(B, n, C)``, in place of a pooling method."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.in_channels = self.out_features = channels

    def forward(self, features: Tensor) -> Tensor:
        """``(B, C)``."""
        return features[:, 0]


def _dim(config: ModelConfig, channels: int) -> int | None:
    if config.dim != "auto":
        return config.dim
    return DIM if channels > DIM and config.reduces else None


def _pool(config: ModelConfig, backbone: Backbone) -> CovPool:
    options = dict(config.pool_options)
    if isinstance(name := options.get("compute_dtype"), str):  # as JSON has it
        options["compute_dtype"] = getattr(torch, name, name)
    if options.get("reduction", "auto") == "auto":
        options["reduction"] = "linear" if backbone.format.tokens else "convolution"
    assert config.dim != "auto"
    return CovPool(
        backbone.format.channels, config.pool, dim=config.dim, layout=backbone.format.layout, **options
    )


def _head(config: ModelConfig, in_features: int) -> Head:
    return Head(
        in_features,
        config.num_classes,
        rank=config.rank,
        hidden=config.hidden if config.head == "mlp" else (),
        batchnorm=config.hidden_batchnorm,
        drop_rate=config.drop_rate,
        normalize=config.normalize,
    )


def _order(matcher: Any, name: str) -> Any:
    return matcher(name.removeprefix("backbone.")) if name.startswith("backbone.") else (math.inf,)


def _prefixed(pattern: Any) -> Any:
    """Prefix a pattern of a backbone's names, or a list of (pattern, order), with ``backbone``."""
    if pattern is None:
        return None
    if isinstance(pattern, str):
        # The alternatives may each begin with an anchor of their own: ^cls_token|^pos_embed.
        return r"^backbone\.(?:" + re.sub(r"(?<!\[)\^", "", pattern) + ")"
    return [(_prefixed(single), order) for single, order in pattern]
