"""The networks that stand for the paper's, and one training run of one of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from covpool.errors import UsageError
from covpool.processes import fastest_precision
from covpool.train.recipe import Recipe
from covpool.train.recipe_files import read_recipe

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


@dataclass(frozen=True)
class Scale:
    """How large everything is.

    Attributes:
        classes: of Tiny-ImageNet's 200, each with 500 images to train on and 50 to test.
        alexnet_epochs: of AlexNet.
        resnet_epochs: of the ResNets.
        limit: of the images of each split; ``None`` for all.
        timed: images in the batches that are timed; the paper's of AlexNet.
    """

    classes: int = 25
    alexnet_epochs: int = 8
    resnet_epochs: int = 6
    limit: int | None = None
    timed: int = 128

    def epochs(self, network: str) -> int:
        """Of a network."""
        return self.alexnet_epochs if network == "alexnet" else self.resnet_epochs


# What the committed results are of, and what shows that the code runs.
MINIATURE = Scale()
SMALLEST = Scale(classes=2, alexnet_epochs=1, resnet_epochs=1, limit=64, timed=8)


@dataclass(frozen=True)
class Configuration:
    """What is trained. Two experiments that ask for the same share one run.

    Attributes:
        network: one of :data:`covpool.reproduce.networks.NAMES`.
        pool: a method of :func:`covpool.nn.methods`.
        options: of the pooling.
        dim: the channels of the covariance of a ResNet; ``None`` for its own number.
        lr: the learning rate over the network's own.
        classifier: that of the classifier over the others'.
        precision: of autocast; ``None`` for bfloat16 where the CPU multiplies it faster.
        seed: of first weights, order and augmentation.
    """

    network: str
    pool: str
    options: dict[str, Any] = field(default_factory=dict)
    dim: int | None = None
    lr: float = 1.0
    classifier: float = 1.0
    precision: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.network not in NAMES:
            raise UsageError(f"network is one of {', '.join(NAMES)}; got {self.network!r}")

    @property
    def name(self) -> str:
        """Of its folder: what differs from the network's own settings."""
        given = [f"{key}={value}" for key, value in self.options.items()]
        given += [f"{key}={value}" for key, value in asdict(self).items() if key in _NAMED and value]
        rates = {"lr": self.lr, "classifier": self.classifier}
        given += [f"{key}={rate:g}" for key, rate in rates.items() if rate != 1]
        return "-".join([self.network, self.pool, *given, f"seed={self.seed}"])

    def recipe(self, scale: Scale, data: Path, runs: Path) -> Recipe:
        """Of the run."""
        first_order = {} if self.pool != "gap" else {"model.dim": None}
        dim = {} if self.dim is None else {"model.dim": self.dim}
        return read_recipe(
            None,
            settings(self.network, scale.epochs(self.network))
            | first_order
            | dim
            | {
                "data.path": str(data),
                "data.limit": scale.limit,
                "model.pool": self.pool,
                "model.pool_options": dict(self.options),
                "optimizer.lr": LR * self.lr,
                "optimizer.classifier_factor": self.classifier,
                "loop.precision": self.precision or fastest_precision(),
                # Those of the first seed are looked into afterwards, epoch by epoch.
                "checkpoint.keep": 1000 if self.seed == 0 else 1,
                "seed": self.seed,
                "out": str(runs / self.name),
            },
        )


_NAMED = ("dim", "precision")
