"""A backbone and the format of its features."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from covpool.arguments import LAST, KeyMap, Layers
from covpool.errors import (
    CovpoolError,
    KeepResolutionError,
    UnsupportedBackboneError,
    UsageError,
    UsageTypeError,
)
from covpool.models.config import Features, ModelConfig
from covpool.models.surgery import (
    applies_alone,
    build_network,
    builder,
    expansion,
    layers_to_keep_resolution,
    leave_out,
    norm_before_pooling,
    parameters_behind,
    remove_stride,
    takes_image_size,
    unused_parts,
)
from covpool.models.weights import load_backbone
from covpool.nn import CovPool
from covpool.nn.fusion import layer_maps

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backbone:
    """A network, the format of its features, and whether its last stage keeps its resolution.

    Attributes:
        network: the network.
        format: format of its features.
        kept_resolution: whether its last stage keeps its resolution.
        expansion: the layers between these features and those that the original network averages; ``None`` if
            there are none or they were not requested.
        expanded_channels: channels after the expansion.
    """

    network: nn.Module
    format: FeatureFormat
    kept_resolution: bool
    expansion: nn.Module | None
    expanded_channels: int


def make_backbone(
    name: str,
    *,
    keep: bool | None,
    features: Features,
    with_expansion: bool = False,
    image_size: int | None = None,
    layers: Layers = "last",
    options: Mapping[str, Any] | None = None,
    pretrained: bool = False,
    checkpoint_path: str | Path | None = None,
    key_map: KeyMap = None,
    loading: Mapping[str, Any] | None = None,
) -> Backbone:
    """Build a network, remove the layers after its features, and keep the last stage's resolution.

    Every change is first tested on a probe: the same network on the meta device, which computes only shapes.

    Args:
        name: a timm model name, or ``"alexnet"``.
        keep: keep the last stage's resolution; ``None`` for where possible.
        features: features before (``"stage"``) or after (``"head"``) the expansion of the channels.
        with_expansion: return a removed expansion separately.
        image_size: image size in pixels.
        layers: layers whose features are pooled.
        options: options of ``timm.create_model``.
        pretrained: load timm's weights.
        checkpoint_path: load these weights.
        key_map: see :func:`covpool.models.weights.load_backbone`.
        loading: options of ``timm.create_model`` that locate its weights.

    Raises:
        UnsupportedBackboneError: if timm has no such network or its features have an unknown shape.
        KeepResolutionError: if ``keep=True`` and the architecture does not support it.
    """
    options = dict(options or {})
    if "img_size" in options:
        raise UsageError("img_size is not an option here: pass image_size= to create_model")
    surgery = _plan_once(name, keep, features, with_expansion, image_size, layers, options)
    if surgery.why_strided:
        log.info("the last stage of %s stays as it is: %s", name, surgery.why_strided)
    network = build_network(name, {**surgery.options, **(loading or {})}, pretrained=pretrained)
    kept, removed = surgery.kept, (*surgery.expansion, *surgery.unused)
    if checkpoint_path is not None:
        optional = [name for name in removed if name not in kept]
        load_backbone(network, checkpoint_path, key_map, optional=optional)
    apart = nn.Sequential(*[network.get_submodule(name) for name in kept]) if kept else None
    leave_out(network, surgery.expansion)
    remove_stride(network, surgery.strided)
    norm_before_pooling(network)
    leave_out(network, surgery.unused)
    return Backbone(network, surgery.format, bool(surgery.strided), apart, surgery.expanded_channels)


@dataclass(frozen=True)
class Surgery:
    """The changes to a network, by layer names.

    Attributes:
        options: options of ``timm.create_model``.
        expansion: layers that expand the channels, to remove.
        kept: removed layers to keep separately.
        strided: layers whose stride is removed.
        why_strided: the reason if no stride can be removed.
        unused: layers that the features no longer depend on.
        format: format of the features.
        expanded_channels: channels after the expansion.
    """

    options: dict[str, Any]
    expansion: list[str]
    kept: list[str]
    strided: list[str]
    why_strided: str
    unused: list[str]
    format: FeatureFormat
    expanded_channels: int


_PLANNED: dict[tuple[object, ...], Surgery] = {}


def _plan_once(name: str, *arguments: Any) -> Surgery:
    """Return the changes to a network, cached: planning takes longer than building the network.

    The building function is part of the key, because a name can be registered again for another network.
    """
    key = (name, builder(name), *map(repr, arguments))
    if key not in _PLANNED:
        _PLANNED[key] = _plan(name, *arguments)
    return _PLANNED[key]


def _plan(
    name: str,
    keep: bool | None,
    features: Features,
    with_expansion: bool,
    image_size: int | None,
    layers: Layers,
    options: dict[str, Any],
) -> Surgery:
    probe = Probe(name, options)
    if image_size is not None and takes_image_size(probe.network):
        options = {**options, "img_size": image_size}
        probe = Probe(name, options)
    expanding = expansion(probe.network) if features == "stage" else []
    kept = expanding if with_expansion and applies_alone(probe.network) else []
    expanded = probe.features() if kept else None
    leave_out(probe.network, expanding)
    strided, why_strided = _strided_layers(probe, keep)
    remove_stride(probe.network, strided)
    norm_before_pooling(probe.network)
    unused = unused_parts(probe.network, probe.used_parameters())
    leave_out(probe.network, unused)
    feature_format = probe.format() if layers == LAST else probe.format_of_layers(layers)
    last = feature_format.layers[-1] if feature_format.layers else feature_format.channels
    channels = last if expanded is None else expanded.shape[1]
    return Surgery(options, expanding, kept, strided, why_strided, unused, feature_format, channels)


def _strided_layers(probe: Probe, keep: bool | None) -> tuple[list[str], str]:
    """Return the layers to take the stride from, or why there are none."""
    if keep is False:
        return [], ""
    try:
        # Without autograd: the probe is copied, and some networks cache tensors of the forward pass.
        with torch.no_grad():
            if probe.format().layout == "channels_last":
                raise KeepResolutionError("its features are tokens, or laid out like them")
            return layers_to_keep_resolution(probe.network, probe.features), ""
    except KeepResolutionError as reason:
        if keep:
            raise KeepResolutionError(
                f"{probe.name} cannot keep its last stage's resolution: {reason}"
            ) from None
        return [], str(reason)


@dataclass(frozen=True)
class FeatureFormat:
    """The format of the output of ``forward_features``.

    Attributes:
        channels: number of channels C.
        layout: ``"channels_first"`` for maps ``(B, C, H, W)``, or ``"channels_last"`` for maps
            ``(B, H, W, C)`` and tokens ``(B, n, C)``.
        tokens: whether the features are tokens; those of several layers are maps of tokens.
        prefix_tokens: number of class, distillation and register tokens, which precede the patch tokens.
        has_class_token: whether the first token is a class token, not a register.
        layers: channels of each layer, if the map has several.
    """

    channels: int
    layout: Literal["channels_first", "channels_last"]
    tokens: bool = False
    prefix_tokens: int = 0
    has_class_token: bool = False
    layers: tuple[int, ...] = ()

    def positions(self, features: Tensor) -> Tensor:
        """Return the features of spatial positions, without prefix tokens."""
        return features[:, self.prefix_tokens :] if self.prefix_tokens else features

    def last_layer(self, features: Tensor) -> Tensor:
        """Return the channels of the last layer."""
        return features[:, -self.layers[-1] :] if self.layers else features

    def class_token(self, features: Tensor) -> Tensor:
        """Return the class token, ``(B, C)``."""
        return features[:, 0]

    def average(self, features: Tensor) -> Tensor:
        """Return the average over spatial positions, ``(B, C)``."""
        x = self.positions(features)
        return x.flatten(2).mean(2) if self.layout == "channels_first" else x.flatten(1, -2).mean(1)


def _unknown_option(name: str, options: Mapping[str, Any], error: TypeError) -> CovpoolError:
    """Return the error for an option that timm's network refuses."""
    match = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if match is None or match[1] not in options:
        return UnsupportedBackboneError(f"timm cannot build {name} with {dict(options)}: {error}")
    near = difflib.get_close_matches(match[1], [field.name for field in dataclasses.fields(ModelConfig)], n=1)
    hint = f"did you mean {near[0]}?" if near else f"{error}"
    return UsageTypeError(f"{name} of timm has no option {match[1]!r}: {hint}")


class Probe:
    """A network on the meta device, which computes shapes and the autograd graph but no values."""

    network: Any  # torch's types lack timm's interface

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.name = name
        with torch.device("meta"):
            try:
                self.network = build_network(name, options).eval()
            except CovpoolError:
                raise
            except TypeError as error:
                raise _unknown_option(name, options, error) from error
            except Exception as error:  # timm's networks raise many kinds for invalid options
                given = f" with {dict(options)}" if options else ""
                raise UnsupportedBackboneError(f"timm cannot build {name}{given}: {error}") from error
        if any(isinstance(part, CovPool) for part in self.network.children()):
            raise UnsupportedBackboneError(f"{name} has its own pooling: use timm.create_model({name!r})")
        size = options.get("img_size") or self.network.pretrained_cfg["input_size"][-1]
        height, width = size if isinstance(size, tuple | list) else (size, size)
        self.images = torch.empty(2, options.get("in_chans", 3), height, width, device="meta")

    def features(self, network: Any = None) -> Tensor:
        """Return the features of two images, from the network or from a changed copy."""
        network = network or self.network
        if not hasattr(network, "forward_features"):
            raise UnsupportedBackboneError(f"{self.name} has no forward_features to pool")
        try:
            features = network.forward_features(self.images)
        except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
            size = "x".join(map(str, self.images.shape[1:]))
            raise UnsupportedBackboneError(f"{self.name} does not run on {size} images: {error}") from error
        if not isinstance(features, Tensor) or features.ndim not in (3, 4):
            got = tuple(features.shape) if isinstance(features, Tensor) else f"a {type(features).__name__}"
            raise UnsupportedBackboneError(
                f"{self.name} returns {got} as features; "
                "covariance pooling needs maps (B, C, H, W) or tokens (B, n, C)"
            )
        return features

    def format(self) -> FeatureFormat:
        """Return the format of the features."""
        features = self.features()
        if features.ndim == 3:
            prefix = self._prefix_tokens(features)
            if features.shape[1] - prefix < 2:
                raise UnsupportedBackboneError(f"{self.name} returns only its class token, no patch tokens")
            return FeatureFormat(
                features.shape[2], "channels_last", True, prefix, self._has_class_token(prefix)
            )
        if self.is_channels_last(features):
            return FeatureFormat(features.shape[3], "channels_last")
        return FeatureFormat(features.shape[1], "channels_first")

    def format_of_layers(self, layers: Layers) -> FeatureFormat:
        """Return the format of several layers' features on one grid."""
        tokens = self.features().ndim == 3
        _, maps = layer_maps(self.network, self.images, layers)
        channels = tuple(map_.shape[1] for map_ in maps)
        return FeatureFormat(sum(channels), "channels_first", tokens, layers=channels)

    def is_channels_last(self, features: Tensor) -> bool:
        """Return whether maps are ``(B, H, W, C)``, as in Swin."""
        declared = getattr(self.network, "output_fmt", None)
        if declared is not None:
            return str(declared).endswith("NHWC")
        return bool(features.shape[-1] == self.network.num_features != features.shape[1])

    def _prefix_tokens(self, features: Tensor) -> int:
        declared = getattr(self.network, "num_prefix_tokens", None)
        if declared is not None:
            return int(declared)
        # XCiT, CaiT and others have a class token but do not declare it. The images are square, so the
        # patches form a square grid, and the other tokens are the prefix.
        return int(features.shape[1] - math.isqrt(features.shape[1]) ** 2)

    def _has_class_token(self, prefix_tokens: int) -> bool:
        if hasattr(self.network, "num_prefix_tokens"):  # which counts registers too
            return getattr(self.network, "cls_token", None) is not None
        return prefix_tokens > 0

    def used_parameters(self) -> set[int]:
        """Return the ids of the parameters that the features depend on."""
        # In training mode: in evaluation mode some networks cache tensors without their graph.
        self.network.train()
        with torch.enable_grad():
            used = parameters_behind(self.features())
        self.network.eval()
        return used


def prefixed_matcher(matcher: Any) -> Any:
    """Return timm's patterns of a backbone's layer names for a model that has it as ``backbone``."""
    if callable(matcher):  # CaiT and Inception give a function of a name
        return lambda name: (
            matcher(name.removeprefix("backbone.")) if name.startswith("backbone.") else (math.inf,)
        )
    return {stage: _prefixed(pattern) for stage, pattern in matcher.items()}


def _prefixed(pattern: Any) -> Any:
    """Prefix a pattern of a backbone's names, or a list of (pattern, order), with ``backbone``."""
    if pattern is None:
        return None
    if isinstance(pattern, str):
        # The alternatives may each begin with an anchor of their own: ^cls_token|^pos_embed.
        return r"^backbone\.(?:" + re.sub(r"(?<!\[)\^", "", pattern) + ")"
    return [(_prefixed(single), order) for single, order in pattern]
