"""The expansion some backbones make just before pooling, and how to leave it out.

EfficientNet, MobileNet and their kin blow the last stage's few hundred channels up by a 1x1 convolution
so that an average over positions keeps more. A covariance keeps pairs of channels by itself, and is
better, and far smaller, on the stage's own channels.
"""

from __future__ import annotations

from torch import nn

# Where each class of timm keeps its expansion, "-1" being the last child of a sequence. Listed by hand,
# because the last 1x1 convolution of a residual block (every ResNet) looks the same to an automatic
# search and must stay.
EXPANSIONS: dict[str, tuple[str, ...]] = {
    "ByobNet": ("final_conv",),
    "EfficientNet": ("conv_head", "bn2"),
    "FastVit": ("final_conv",),
    "GhostNet": ("blocks.-1",),
    "MobileNetV3": ("blocks.-1",),
    "NormFreeNet": ("final_conv",),
    "RegNet": ("final_conv",),
    "RepGhostNet": ("blocks.-1",),
    "RexNet": ("features.-1",),
}


def expansion(network: nn.Module) -> list[str]:
    """The names of the modules that make the expansion; empty where there is none."""
    names = []
    for name in EXPANSIONS.get(type(network).__name__, ()):
        parent, _, child = name.rpartition(".")
        if child == "-1":
            children = [child for child, _ in network.get_submodule(parent).named_children()]
            name = f"{parent}.{children[-1]}"
            if not _is_one_pointwise_convolution(network.get_submodule(name)):
                continue  # the last child is a stage like the others, as in LCNet
        if any(True for _ in network.get_submodule(name).parameters()):
            names.append(name)
    return names


def applies_alone(network: nn.Module) -> bool:
    """Whether the expansion of a network's features gives what the whole network would give.

    NFNet applies its last activation to either, so of an activated stage it would expand something else.
    """
    return type(network).__name__ != "NormFreeNet"


def _is_one_pointwise_convolution(module: nn.Module) -> bool:
    convolutions = [part for part in module.modules() if isinstance(part, nn.Conv2d)]
    return len(convolutions) == 1 and convolutions[0].kernel_size == (1, 1)
