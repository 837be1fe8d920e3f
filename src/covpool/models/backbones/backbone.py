"""Any network of timm as a backbone: its features, and nothing of its own pooling and classifier."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from covpool.models.backbones.expansion import applies_alone, expansion
from covpool.models.backbones.network import UnsupportedBackboneError, build_network, takes_image_size
from covpool.models.backbones.probe import FeatureFormat, Probe
from covpool.models.backbones.resolution import KeepResolutionError, layers_to_keep_resolution, remove_stride
from covpool.models.backbones.surgery import leave_out, norm_before_pooling, unused_parts
from covpool.models.config import Features
from covpool.models.weights.checkpoint import KeyMap, load_backbone

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backbone:
    """A network, the format of its features, and whether its last stage keeps its resolution.

    Attributes:
        network: the network.
        format: of its features.
        kept_resolution: whether its last stage keeps its resolution.
        expansion: what it would do next, from its features to those that its authors average; ``None`` where
            there is nothing, or nobody asked for it.
        expanded_channels: of the features after the expansion.
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
    options: Mapping[str, Any] | None = None,
    pretrained: bool = False,
    checkpoint_path: str | Path | None = None,
    key_map: KeyMap = None,
) -> Backbone:
    """Build the network, take off what comes after its features, and keep the last stage's resolution.

    Every change is first made to a probe, the same network on the meta device, whose shapes tell whether
    it works.

    Args:
        name: a name of timm, or ``"alexnet"``.
        keep: keep the last stage's resolution; ``None`` where possible.
        features: before (``"stage"``) or after (``"head"``) the expansion of the channels.
        with_expansion: keep an expansion that is left out of the network, beside it.
        image_size: the side of the images.
        options: for timm's ``create_model``.
        pretrained: load timm's weights.
        checkpoint_path: load these weights.
        key_map: see :func:`covpool.models.weights.checkpoint.load_backbone`.

    Raises:
        UnsupportedBackboneError: where timm has no such network or its features are of an unknown form.
        KeepResolutionError: with ``keep=True``, where the architecture cannot.
    """
    options = dict(options or {})
    if "img_size" in options:
        raise UnsupportedBackboneError("img_size is image_size= of create_model")
    probe = Probe(name, options)
    if image_size is not None and takes_image_size(probe.network):
        options["img_size"] = image_size
        probe = Probe(name, options)
    expanding = expansion(probe.network) if features == "stage" else []
    kept = expanding if with_expansion and applies_alone(probe.network) else []
    expanded = probe.features() if kept else None
    leave_out(probe.network, expanding)
    strided = _strided_layers(probe, keep)
    remove_stride(probe.network, strided)
    norm_before_pooling(probe.network)
    unused = unused_parts(probe.network, probe.used_parameters())
    leave_out(probe.network, unused)

    network = build_network(name, options, pretrained=pretrained)
    if checkpoint_path is not None:
        optional = [name for name in (*expanding, *unused) if name not in kept]
        load_backbone(network, checkpoint_path, key_map, optional=optional)
    apart = nn.Sequential(*[network.get_submodule(name) for name in kept]) if kept else None
    leave_out(network, expanding)
    remove_stride(network, strided)
    norm_before_pooling(network)
    leave_out(network, unused)
    found = probe.format()
    channels = found.channels if expanded is None else expanded.shape[1]
    return Backbone(network, found, bool(strided), expansion=apart, expanded_channels=channels)


def _strided_layers(probe: Probe, keep: bool | None) -> list[str]:
    """The layers to take the stride from; none where it is not wanted, or not possible and not asked for."""
    if keep is False:
        return []
    try:
        # Without autograd: some networks cache what they compute, and the probe is copied.
        with torch.no_grad():
            if probe.format().layout == "channels_last":
                raise KeepResolutionError("its features are tokens, or laid out like them")
            return layers_to_keep_resolution(probe.network, probe.features)
    except KeepResolutionError as reason:
        if keep:
            raise KeepResolutionError(
                f"{probe.name} cannot keep its last stage's resolution: {reason}"
            ) from None
        log.info("the last stage of %s stays as it is: %s", probe.name, reason)
        return []
