"""The networks and how they are trained: the paper's forms and schedules, fewer channels and epochs.

As in the paper, there are fewer positions than channels of the covariance, and the last stage of the ResNet
keeps its resolution. AlexNet's two hidden layers are left out: of its covariance they would be nine tenths of
the parameters. Its learning rate falls exponentially, but not as far as the paper's 1e-5: half of the few
epochs would pass without learning.
"""

from __future__ import annotations

from typing import Any

# At 64 pixels 7×7 positions of 64 channels; the paper's has 13×13 of 256.
ALEXNET: dict[str, Any] = {
    "model.backbone": "alexnet",
    "model.backbone_options": {"channels": [32, 64, 96, 64, 64], "stem": [5, 2]},
    "model.image_size": 64,
    "model.dim": None,
    "augmentation.shorter_side": 72,
    "optimizer.weight_decay": 5e-4,
    "schedule.kind": "exponential",
    "schedule.final_lr": 1e-3,
}
# At 96 pixels, to which images are enlarged, 6×6 positions; the paper's has 14×14. By the
# number of layers, which are convolutions of blocks, stem and classifier: the blocks of each stage.
RESNETS = {"resnet10": 1, "resnet18": 2, "resnet26": 3}
RESNET: dict[str, Any] = {
    "model.backbone": "resnet10t",
    "model.image_size": 96,
    "model.dim": 64,
    "augmentation.shorter_side": 108,
    "optimizer.weight_decay": 1e-4,
    "schedule.kind": "steps",
}
COMMON: dict[str, Any] = {
    "model.preprocessing": {"crop_pct": 8 / 9, "interpolation": "bilinear"},
    "augmentation.crop": "random",
    "optimizer.name": "sgd",
    "optimizer.momentum": 0.9,
    "optimizer.clip": None,
    "loss.label_smoothing": 0.0,
    "loss.mixup": 0.0,
    "loss.cutmix": 0.0,
    "loop.channels_last": True,
    "loop.ema": None,
    "validation.patience": None,
    "validation.batch_size": 250,
    "schedule.warmup": 0.0,
    "batch_size": 64,
    "data.workers": 0,
    "trackers": [],
}
# The paper's, for its batches of 128 (AlexNet) and 256 (ResNet).
LR = 10**-1.1
NAMES = ("alexnet", *RESNETS)


def settings(network: str, epochs: int) -> dict[str, Any]:
    """What a recipe says of a network, for so many epochs: the shape of the schedule is the paper's."""
    if network == "alexnet":
        return COMMON | ALEXNET | {"schedule.epochs": epochs}
    blocks = RESNETS[network]
    options = {"layers": [blocks] * 4, "channels": [16, 32, 64, 128], "stem_width": 16}
    milestones = [epochs / 2, epochs * 3 / 4]
    own = {"model.backbone_options": options, "schedule.epochs": epochs, "schedule.milestones": milestones}
    return COMMON | RESNET | own
