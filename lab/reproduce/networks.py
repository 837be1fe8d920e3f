"""Small versions of the paper's networks, and the configuration of a training run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from covpool.device import fastest_precision
from covpool.errors import UsageError
from covpool.training.recipe import Recipe
from covpool.training.recipe_files import read_recipe

# At 64 pixels it has 7×7 positions of 64 channels; the paper's has 13×13 of 256.
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
# Images are enlarged to 96 pixels, which gives 6×6 positions; the paper's has 14×14. The name counts the
# layers (convolutions in blocks, stem and classifier); the value is the number of blocks per stage.
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
    """Return the recipe settings of a network. The schedule has the paper's shape, scaled to ``epochs``."""
    if network == "alexnet":
        return COMMON | ALEXNET | {"schedule.epochs": epochs}
    blocks = RESNETS[network]
    options = {"layers": [blocks] * 4, "channels": [16, 32, 64, 128], "stem_width": 16}
    milestones = [epochs / 2, epochs * 3 / 4]
    changes = {
        "model.backbone_options": options,
        "schedule.epochs": epochs,
        "schedule.milestones": milestones,
    }
    return COMMON | RESNET | changes


@dataclass(frozen=True)
class Scale:
    """The size of the experiments.

    Attributes:
        classes: number of Tiny-ImageNet's 200 classes, each with 500 training and 50 test images.
        alexnet_epochs: number of epochs for AlexNet.
        resnet_epochs: number of epochs for the ResNets.
        limit: maximum number of images per split; ``None`` for all.
        timed: batch size for timing; the default is the paper's for AlexNet.
    """

    classes: int = 25
    alexnet_epochs: int = 8
    resnet_epochs: int = 6
    limit: int | None = None
    timed: int = 128

    def epochs(self, network: str) -> int:
        """Return the number of epochs for a network."""
        return self.alexnet_epochs if network == "alexnet" else self.resnet_epochs


# The scale of the committed results, and a scale for tests.
MINIATURE = Scale()
SMALLEST = Scale(classes=2, alexnet_epochs=1, resnet_epochs=1, limit=64, timed=8)


@dataclass(frozen=True)
class Configuration:
    """A training run. Experiments with equal configurations share a run.

    Attributes:
        network: one of :data:`lab.reproduce.networks.NAMES`.
        pool: a method of :func:`covpool.nn.methods`.
        options: options of the pooling.
        dim: channels of a ResNet's covariance; ``None`` for the network's default.
        lr: factor on the network's learning rate.
        classifier: factor on the learning rate of the classifier.
        precision: autocast precision; ``None`` for bfloat16 if the CPU computes it faster.
        seed: seed of initial weights, order and augmentation.
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
            raise UsageError(f"network must be one of {', '.join(NAMES)}; got {self.network!r}")

    @property
    def name(self) -> str:
        """Name of the run folder: the settings that differ from the network's defaults."""
        given = [f"{key}={value}" for key, value in self.options.items()]
        given += [f"{key}={value}" for key, value in asdict(self).items() if key in _NAMED and value]
        rates = {"lr": self.lr, "classifier": self.classifier}
        given += [f"{key}={rate:g}" for key, rate in rates.items() if rate != 1]
        return "-".join([self.network, self.pool, *given, f"seed={self.seed}"])

    def recipe(self, scale: Scale, data: Path, runs: Path) -> Recipe:
        """Return the recipe of the run."""
        first_order = {} if self.pool != "gap" else {"model.dim": None}
        dim = {} if self.dim is None else {"model.dim": self.dim}
        paper = {"iteration": "paper"} if self.pool == "isqrt_cov" else {}
        return read_recipe(
            None,
            settings(self.network, scale.epochs(self.network))
            | first_order
            | dim
            | {
                "data.path": str(data),
                "data.limit": scale.limit,
                "model.pool": self.pool,
                "model.pool_options": {**paper, **self.options},
                "optimizer.lr": LR * self.lr,
                "optimizer.classifier_factor": self.classifier,
                "loop.precision": self.precision or fastest_precision(),
                # The first seed keeps all checkpoints: its epochs are observed afterwards.
                "checkpoint.keep": 1000 if self.seed == 0 else 1,
                "seed": self.seed,
                "out": str(runs / self.name),
            },
        )


_NAMED = ("dim", "precision")
