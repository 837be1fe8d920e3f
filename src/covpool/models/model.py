"""The model: a backbone, a pooling layer and a classifier."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from covpool.arguments import CLASS_TOKEN, DIM, LAST, check_choice, check_whole
from covpool.data.transforms import all_opened
from covpool.errors import UsageError
from covpool.models.backbone import Backbone, FeatureFormat, prefixed_matcher
from covpool.models.config import Head, ModelConfig, pool_of, unit
from covpool.nn import CovPool
from covpool.nn.fusion import LayersPool, layer_maps, stacked

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image
    from torchvision.transforms.v2 import Transform

    Picture = str | os.PathLike[str] | Image | NDArray[Any] | Tensor

# Photographs that `predict` gives to the network at once.
AT_ONCE = 32


class Prediction(NamedTuple):
    """A class and its probability."""

    name: str
    probability: float


class PooledClassifier(nn.Module):
    """A backbone's features, pooled by one of covpool's methods, and classified.

    :func:`covpool.create_model` creates it. It has timm's ``forward_features``, ``forward_head``,
    ``reset_classifier``, ``get_classifier``, ``num_classes``, ``num_features``, ``head_hidden_size``,
    ``pretrained_cfg``, ``feature_info``, ``forward_intermediates``, ``group_matcher``, ``no_weight_decay``
    and ``set_grad_checkpointing``, so timm's tools (``timm.data.resolve_model_data_config``, ``timm.optim``)
    work with it.

    Attributes:
        config: the configuration, with the chosen values in place of ``None`` and ``"auto"``.
        backbone: timm's network, without its pooling and classifier.
        format: the format of the backbone's features.
        pool: the :class:`covpool.nn.CovPool`, or a :class:`ClassToken`.
        head: the :class:`~covpool.models.config.Head` on the pooled vector.
        first_order: with ``join``, the linear classifier whose logits are added to the head's.
        expansion: with ``join="gap"``, the layers of the backbone between its features and average pooling.
        classes: the names of the classes, if known.
        initial_weights: the source of the backbone's pretrained weights, for the card of a bundle.
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
            config.with_iteration(), dim=_dim(config, channels), keep_resolution=backbone.kept_resolution
        )
        _check_class_token(self.config, self.format)
        self.pool = make_pool(self.config, self.format)
        self.head = _head(self.config, self.pool.out_features)
        self.num_features = channels
        self.expansion = backbone.expansion
        self.expanded_channels = backbone.expanded_channels if config.join == "gap" else channels
        self.num_classes = config.num_classes
        self.first_order = self._new_first_order(config.num_classes) if config.join else None
        self.pretrained_cfg = self._own_pretrained_cfg()
        self.classes: tuple[str, ...] | None = None
        self.initial_weights: dict[str, str] = {}
        self.keep_statistics = False

    @property
    def head_hidden_size(self) -> int:
        """The length of ``forward_head(..., pre_logits=True)``."""
        return self.head.hidden_size + (self.expanded_channels if self.first_order is not None else 0)

    def forward_features(self, x: Tensor) -> Tensor:
        """Images ``(B, 3, H, W)`` to the features, as timm gives them; those of several layers as one map."""
        if self.config.layers != LAST:
            return stacked(layer_maps(self.backbone, x, self.config.layers)[1])
        features: Tensor = self.backbone.forward_features(x)
        return features

    def forward_intermediates(self, x: Tensor, *args: Any, **options: Any) -> Any:
        """Return the features of several stages, with the arguments of timm's ``forward_intermediates``."""
        if not hasattr(self.backbone, "forward_intermediates"):
            raise UsageError(f"{self.config.backbone} has no forward_intermediates")
        return self.backbone.forward_intermediates(x, *args, **options)

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """The channels and the reduction of each stage, as timm lists them, at the kept resolution."""
        stages = [dict(stage) for stage in self.backbone.feature_info]
        if self.config.keep_resolution:
            last = max(stage["reduction"] for stage in stages)
            for stage in stages:
                stage["reduction"] //= 2 if stage["reduction"] == last else 1
        return stages

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
        last = self.format.last_layer(features)
        return self.format.average(last if self.expansion is None else self.expansion(last))

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

    @property
    def transform(self) -> Transform:
        """The preprocessing: an image of Pillow to the tensor ``(3, H, W)`` that the network receives."""
        from covpool.data.transforms import Preprocessing, evaluation_transform

        return evaluation_transform(Preprocessing.of(self.pretrained_cfg))

    def predict(
        self, images: Picture | Sequence[Picture], top: int = 5
    ) -> list[Prediction] | list[list[Prediction]]:
        """Classify photographs: the most probable classes, with their probabilities.

        For thousands of images, :func:`covpool.inference.infer` is faster, and resumes. What it assumes about
        arrays and tensors, it logs once (``logging``, level WARNING, logger ``covpool``).

        Args:
            images: the path of a photograph, an image of Pillow, an array of NumPy or a tensor, or a list of
                these. Arrays and tensors are ``(H, W, 3)``, ``(3, H, W)`` or ``(H, W)`` in RGB, with uint8
                values, or floats from 0 to 1 or from 0 to 255. A fourth dimension in front is a batch. Floats
                that are clearly negative are preprocessed already, as by ``model.transform``. The range of a
                batch decides for all its images.
            top: number of classes.

        Returns:
            The classes of the photograph, the most probable first; of a list or a batch, a list of these.

        Raises:
            BadImageError: if a photograph cannot be read.
            UsageError: if the model has no classifier.

        Example:
            >>> model = covpool.load_model("runs/birds/bundle")  # doctest: +SKIP
            >>> model.predict("bird.jpg", top=2)  # doctest: +SKIP
            [Prediction(name='Song Sparrow', probability=0.93), Prediction(name='Vesper Sparrow', ...)]
        """
        if not self.num_classes:
            raise UsageError("the model has no classifier: create it with num_classes=")
        check_whole("top", top)
        if self.classes and len(self.classes) != self.num_classes:
            raise UsageError(f"the model has {len(self.classes)} class names for {self.num_classes} classes")
        pictures, several = all_opened(images)
        names = self.classes or [str(k) for k in range(self.num_classes)]
        like, predictions = next(self.parameters()), []
        modes = {module: module.training for module in self.modules()}
        self.eval()
        try:
            while batch := [self._prepared(picture) for picture in islice(pictures, AT_ONCE)]:
                with torch.inference_mode():
                    logits = self(torch.stack(batch).to(like))
                scores, indices = logits.float().softmax(dim=1).topk(min(top, self.num_classes), dim=1)
                for row in zip(scores.tolist(), indices.tolist(), strict=True):
                    predictions.append([Prediction(names[k], score) for score, k in zip(*row, strict=True)])
        finally:
            for module, mode in modes.items():
                module.training = mode
        return predictions if several else predictions[0]

    def _prepared(self, image: Image | Tensor) -> Tensor:
        if not isinstance(image, Tensor):
            prepared: Tensor = self.transform(image)
            return prepared
        expected = tuple(self.pretrained_cfg["input_size"])
        if tuple(image.shape) != expected:
            raise UsageError(f"a preprocessed image must be {expected}; got {tuple(image.shape)}")
        return image

    def get_classifier(self) -> nn.Module | tuple[nn.Module, nn.Module]:
        """Return the classifier; with ``join`` the second-order and the first-order classifier."""
        if self.first_order is None:
            return self.head.classifier
        return self.head.classifier, self.first_order

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier, and the pooling if ``global_pool`` names another one.

        The backbone stays as it is: after ``reset_classifier(5, "avg")`` it still has the resolution and the
        channels that were chosen for the former pooling.

        Args:
            num_classes: number of classes; 0 for no classifier.
            global_pool: a pooling method of covpool, or timm's ``"avg"`` (``"gap"``) or ``"token"``
                (``"cls"``); ``None`` keeps the pooling.
        """
        check_whole("num_classes", num_classes, at_least=0)
        if global_pool is not None and pool_of(global_pool) != self.config.pool:
            self._reset_pool(pool_of(global_pool))
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
            raise UsageError(
                f"{self.config.backbone} does not list its layers in order: use layer_decay=None"
            )
        return prefixed_matcher(self.backbone.group_matcher(coarse=coarse))

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters that the backbone's authors train without weight decay."""
        names = self.backbone.no_weight_decay() if hasattr(self.backbone, "no_weight_decay") else ()
        return {f"backbone.{name}" for name in names}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the backbone's activations in the backward pass."""
        if not hasattr(self.backbone, "set_grad_checkpointing"):
            raise UsageError(f"{self.config.backbone} cannot checkpoint its activations")
        self.backbone.set_grad_checkpointing(enable)

    def _reset_pool(self, pool: str) -> None:
        """Replace the pooling and all layers after it. Options of the former method do not apply."""
        before = self.config
        config = dataclasses.replace(before, pool=pool, pool_options={}, dim="auto").with_iteration()
        dim = before.dim if before.reduces and config.reduces else _dim(config, self.format.channels)
        config = dataclasses.replace(config, dim=dim)
        _check_class_token(config, self.format)
        like, self.config = next(self.parameters()), config
        self.pool = make_pool(config, self.format).to(like)
        self.head = _head(config, self.pool.out_features).to(like)
        self.train(self.training)

    def _new_first_order(self, num_classes: int) -> nn.Module:
        like = next(self.parameters())
        if not num_classes:
            return nn.Identity()
        # The bias is the head's.
        channels = self.expanded_channels
        return nn.Linear(channels, num_classes, bias=False, device=like.device, dtype=like.dtype)

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
        cfg |= self.config.preprocessing
        channels = self.config.backbone_options.get("in_chans", 3)
        cfg["input_size"] = (channels, *cfg["input_size"][1:])
        for name in ("mean", "std"):
            rgb = cfg[name]
            if channels != 3 and len(rgb) == 3:  # timm sums the RGB weights for 1 channel, else repeats them
                cfg[name] = (sum(rgb) / 3,) if channels == 1 else tuple(rgb[k % 3] for k in range(channels))
        return cfg


class ClassToken(nn.Module):
    """The class token of features ``(B, n, C)``, in place of a pooling method."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.in_channels = self.out_features = channels

    def forward(self, features: Tensor) -> Tensor:
        """``(B, C)``."""
        return features[:, 0]


def _check_class_token(config: ModelConfig, form: FeatureFormat) -> None:
    if CLASS_TOKEN in (config.pool, config.join) and not form.has_class_token:
        option = "join" if config.join == CLASS_TOKEN else "pool"
        raise UsageError(f'{config.backbone} has no class token; {option}="gap" takes the average')


def _dim(config: ModelConfig, channels: int) -> int | None:
    if config.dim != "auto":
        return config.dim
    return DIM if channels > DIM and config.reduces else None


def make_pool(config: ModelConfig, form: FeatureFormat) -> CovPool | ClassToken:
    """Return the pooling layer of a configuration for features of a format."""
    if config.pool == CLASS_TOKEN:
        return ClassToken(form.channels)
    options = dict(config.pool_options)
    if isinstance(name := options.get("compute_dtype"), str):  # as JSON has it
        options["compute_dtype"] = getattr(torch, name, name)
    if options.get("reduction", "auto") == "auto":
        options["reduction"] = "linear" if form.tokens else "convolution"
    assert config.dim != "auto"
    if form.layers:
        return LayersPool(form.layers, config.pool, dim=config.dim, fusion=config.fusion, **options)
    return CovPool(form.channels, config.pool, dim=config.dim, layout=form.layout, **options)


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
