"""A backbone by name: timm's networks, and the one of the paper's that timm has not."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

import timm
from torch import nn

from covpool.models.backbones.alexnet import AlexNet

OWN: dict[str, type[nn.Module]] = {"alexnet": AlexNet}


class UnsupportedBackboneError(ValueError):
    """The network cannot be made second-order; the message says why."""


def build_network(name: str, options: Mapping[str, Any], *, pretrained: bool = False) -> nn.Module:
    """The network without its classifier, as timm builds it."""
    if name in OWN:
        if pretrained:
            raise ValueError(f"there are no pretrained weights of {name}; leave pretrained=False")
        return OWN[name](**options)
    if not timm.is_model(name.partition(".")[0]):
        close = difflib.get_close_matches(name, [*timm.list_models(), *OWN], n=3)
        hint = f"did you mean {', '.join(close)}?" if close else "timm.list_models() has all names"
        raise UnsupportedBackboneError(f"timm has no backbone {name!r}: {hint}")
    if taken := {"num_classes", "global_pool", "output_stride"} & options.keys():
        raise UnsupportedBackboneError(f"{', '.join(taken)} is not for the backbone: see create_model")
    try:
        network: nn.Module = timm.create_model(name, pretrained=pretrained, num_classes=0, **options)
    except (OSError, RuntimeError) as error:
        if not pretrained:
            raise
        raise ValueError(
            f"timm's weights of {name} cannot be had: {str(error).rstrip('.')}; give a file of weights: "
            "checkpoint_path= in Python, --weights.path of covpool train, --weights of covpool probe"
        ) from error
    return network


def takes_image_size(network: nn.Module) -> bool:
    """Whether the number of positions is part of the network, as in most transformers."""
    # A subclass may hand its arguments on without naming them.
    own = (vars(cls)["__init__"] for cls in type(network).__mro__ if "__init__" in vars(cls))
    return any("img_size" in inspect.signature(method).parameters for method in own)
