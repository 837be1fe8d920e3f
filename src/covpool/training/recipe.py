"""The settings of a training run: one dataclass with a section for each part of the training."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from covpool.arguments import Device, check_choice, check_positive, check_whole
from covpool.data import Layout
from covpool.data.transforms import Augmentation
from covpool.errors import UsageError
from covpool.models.config import ModelConfig
from covpool.training.metrics import METRICS

if TYPE_CHECKING:
    Monitor = str
else:
    Monitor = Literal[tuple(METRICS)]


@dataclass(frozen=True)
class DataOptions:
    """The images, and how they are read.

    Attributes:
        path: a folder of classes, with or without train, val and test; a CSV of path,label; CUB-200-2011,
            FGVC-Aircraft or Stanford Cars as distributed; Parquet files with image and label; or shards,
            local or in object storage.
        layout: layout of the data; ``auto`` detects it.
        val_fraction: fraction of the training images for validation if there is no val; 0 for none.
        limit: most images per split, chosen by the seed, for a trial.
        balance: ``weights`` weights the loss by the rarity of a class, ``sampling`` draws every class
            equally often.
        workers: processes that read images, per training process.
        max_bad: most unreadable images before the run stops.
        window: number of shards or Parquet row groups whose samples are shuffled together.
        cache: local folder for remote shards.
    """

    path: str = ""
    layout: Layout = "auto"
    val_fraction: float = 0.1
    limit: int | None = None
    balance: Literal["none", "weights", "sampling"] = "none"
    workers: int = 2
    max_bad: int = 100
    window: int = 16
    cache: str | None = None

    def __post_init__(self) -> None:
        check_choice("balance", self.balance, ("none", "weights", "sampling"))
        check_whole("workers", self.workers, at_least=0)
        check_whole("max_bad", self.max_bad, at_least=0)
        check_whole("window", self.window)
        if self.limit is not None:
            check_whole("limit", self.limit)
        if not 0 <= self.val_fraction < 1:
            raise UsageError(f"val_fraction must be from 0 to below 1; got {self.val_fraction}")


@dataclass(frozen=True)
class WeightOptions:
    """The initial weights: at most one of ``pretrained``, ``path`` and ``bundle``.

    Attributes:
        pretrained: pretrained weights of the backbone, from an installed package or from timm.
        path: file with weights of the backbone, ``.safetensors`` or ``.pth``.
        bundle: folder of a run or of ``covpool convert``; all its weights, except those of the classifier if
            the classes differ. It sets the network if no recipe is named; a named recipe must have the same
            network.
        key_map: how the names in the file become timm's: ``{prefix: replacement}``, or ``order``.
        freeze: ``backbone`` trains only pooling and classifier.
        keep_statistics: BatchNorms of the backbone keep the statistics of the weights.
    """

    pretrained: bool = False
    path: str | None = None
    bundle: str | None = None
    key_map: dict[str, str | None] | Literal["order"] | None = None
    freeze: Literal["backbone"] | None = None
    keep_statistics: bool = False

    def __post_init__(self) -> None:
        check_choice("freeze", self.freeze, (None, "backbone"))
        if self.pretrained + (self.path is not None) + (self.bundle is not None) > 1:
            raise UsageError("initial weights have one source: use only one of pretrained, path and bundle")
        if self.key_map is not None and self.path is None:
            raise UsageError("key_map describes a file of weights: set its path too")


@dataclass(frozen=True)
class LossOptions:
    """Cross-entropy, label smoothing and mixing.

    Attributes:
        label_smoothing: share of every label that is spread over all classes.
        mixup: mix images and labels by a share from Beta(mixup, mixup); 0 for never.
        cutmix: paste a part of another image, its area from Beta(cutmix, cutmix); 0 for never. With both,
            each batch uses one of them.
    """

    label_smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise UsageError(f"label_smoothing must be from 0 to below 1; got {self.label_smoothing}")
        if min(self.mixup, self.cutmix) < 0:
            raise UsageError(f"mixup and cutmix must be at least 0; got {self.mixup} and {self.cutmix}")


@dataclass(frozen=True)
class OptimizerOptions:
    """The optimizer.

    Attributes:
        name: an optimizer of timm: ``sgd``, ``adamw``, ``lamb``, ``lion`` and others.
        lr: highest learning rate.
        momentum: of ``sgd``; the first of the two betas of ``adamw`` and similar optimizers.
        weight_decay: weight decay.
        decay_norms: decay norms and biases too, as in the paper.
        classifier_factor: learning rate of the classifier, as a factor of ``lr``.
        layer_decay: factor of the learning rate from each layer of the backbone to the one before it.
        clip: largest norm of the gradient; ``null`` for no limit.
    """

    name: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4
    decay_norms: bool = True
    classifier_factor: float = 1.0
    layer_decay: float | None = None
    clip: float | None = None

    def __post_init__(self) -> None:
        if not self.lr > 0 or self.weight_decay < 0 or (self.clip is not None and not self.clip > 0):
            raise UsageError(
                f"lr and clip must be above 0 and weight_decay at least 0; got {self.lr}, {self.clip} and "
                f"{self.weight_decay}"
            )


@dataclass(frozen=True)
class ScheduleOptions:
    """The learning rate of each step; lengths are in epochs, and may be fractions.

    Attributes:
        epochs: number of epochs.
        kind: ``constant``; ``steps``, a tenth at each of ``milestones``; ``exponential`` or ``cosine``, down
            to ``final_lr``.
        milestones: epochs at which ``steps`` lowers the learning rate.
        final_lr: last learning rate of ``exponential`` and ``cosine``, for parameters that start at ``lr``.
        warmup: epochs in which the learning rate rises from near 0.
        head_first: share of the epochs, at the start, in which the backbone is frozen, and pooling and
            classifier train on one cycle of the learning rate.
        head_lr: highest learning rate in these epochs; ``null`` for ``lr``.
    """

    epochs: int = 60
    kind: Literal["constant", "steps", "exponential", "cosine"] = "cosine"
    milestones: tuple[float, ...] = ()
    final_lr: float = 1e-5
    warmup: float = 0.0
    head_first: float = 0.0
    head_lr: float | None = None

    @property
    def head_epochs(self) -> int:
        """The epochs in which only pooling and classifier train."""
        return math.floor(self.head_first * self.epochs + 1e-9)  # 0.29 × 100 is 28.999…

    def __post_init__(self) -> None:
        check_whole("epochs", self.epochs)
        check_choice("schedule", self.kind, ("constant", "steps", "exponential", "cosine"))
        object.__setattr__(self, "milestones", tuple(self.milestones))
        if (self.kind == "steps") != bool(self.milestones):
            raise UsageError('milestones are for the schedule "steps", which needs them')
        if not self.final_lr > 0 or (self.head_lr is not None and not self.head_lr > 0):
            raise UsageError(f"final_lr and head_lr must be above 0; got {self.final_lr} and {self.head_lr}")
        if not 0 <= self.head_first <= 1:
            raise UsageError(f"head_first is a share, from 0 to 1; got {self.head_first}")
        if not 0 <= self.warmup < max(self.epochs - self.head_epochs, 1):
            raise UsageError(
                f"warmup must be at least 0 and below the epochs after those of the head; got {self.warmup}"
            )


@dataclass(frozen=True)
class LoopOptions:
    """How steps are computed.

    Attributes:
        precision: precision of autocast; the parameters stay in float32.
        accumulate: number of parts into which each process divides its share of a batch.
        ema: decay of an average of the weights, which is validated and saved; ``null`` for none.
        compile: use torch.compile.
        channels_last: use the memory format channels_last.
        sync_batchnorm: compute BatchNorm statistics over all processes; on GPUs only.
        divide_classes: divide the classifier over processes by class, for many classes; the result is that
            of the undivided classifier.
        deterministic: refuse operations that may differ from run to run.
        max_skips: most steps that may be skipped for a loss or gradient that is not finite.
        device: ``auto`` uses a GPU if there is one.
        timeout: minutes to wait for another process, which may be lost, before the run stops.
    """

    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    accumulate: int = 1
    ema: float | None = None
    compile: bool = False
    channels_last: bool = False
    sync_batchnorm: bool = False
    divide_classes: bool = False
    deterministic: bool = False
    max_skips: int = 10
    device: Device = "auto"
    timeout: float = 10.0

    def __post_init__(self) -> None:
        check_positive("timeout", self.timeout)
        check_choice("precision", self.precision, ("float32", "bfloat16", "float16"))
        check_whole("accumulate", self.accumulate)
        check_whole("max_skips", self.max_skips, at_least=0)
        if self.ema is not None and not 0 < self.ema < 1:
            raise UsageError(f"ema must be above 0 and below 1; got {self.ema}")


@dataclass(frozen=True)
class ValidationOptions:
    """How the best epoch is chosen, by the validation images.

    Attributes:
        monitor: metric that decides which epoch is the best.
        patience: stop after this many epochs without a better one; ``null`` for never.
        batch_size: batch size of each process.
        refit: before the test, train again on train and val together, for as many epochs as were best.
    """

    monitor: Monitor = "top1"
    patience: int | None = None
    batch_size: int = 64
    refit: bool = False

    def __post_init__(self) -> None:
        check_choice("monitor", self.monitor, tuple(METRICS))
        check_whole("batch_size of validation", self.batch_size)
        if self.patience is not None:
            check_whole("patience", self.patience)


@dataclass(frozen=True)
class CheckpointOptions:
    """When checkpoints are written, besides those at the end of each epoch.

    Attributes:
        steps: number of steps between checkpoints.
        minutes: minutes between checkpoints.
        keep: number of last checkpoints that are kept, besides that of the best epoch.
    """

    steps: int | None = None
    minutes: float | None = None
    keep: int = 2

    def __post_init__(self) -> None:
        check_whole("keep", self.keep)
        if self.steps is not None:
            check_whole("checkpoint steps", self.steps)
        if self.minutes is not None and not self.minutes > 0:
            raise UsageError(f"checkpoint minutes must be above 0; got {self.minutes}")


@dataclass(frozen=True)
class Recipe:
    """The settings of a training run. ``covpool train --help-all`` lists them, as ``section.name``.

    Attributes:
        data: the images, and how they are read.
        model: the network; its number of classes comes from the data.
        weights: the initial weights.
        augmentation: how images are augmented.
        loss: label smoothing and mixing.
        optimizer: the optimizer.
        schedule: epochs and learning rate.
        loop: how steps are computed.
        validation: how the best epoch is chosen.
        checkpoint: when checkpoints are written.
        batch_size: images per step, over all processes.
        seed: seed of the order, the augmentation, the initial weights and all other random numbers.
        trackers: ``tensorboard``, ``wandb``, ``mlflow``.
        out: folder of the run.
    """

    data: DataOptions = field(default_factory=DataOptions)
    model: ModelConfig = field(default_factory=lambda: ModelConfig("resnet50"))
    weights: WeightOptions = field(default_factory=WeightOptions)
    augmentation: Augmentation = field(default_factory=Augmentation)
    loss: LossOptions = field(default_factory=LossOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    loop: LoopOptions = field(default_factory=LoopOptions)
    validation: ValidationOptions = field(default_factory=ValidationOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    batch_size: int = 256
    seed: int = 0
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    out: str = "runs/train"

    def __post_init__(self) -> None:
        check_whole("batch_size", self.batch_size)
        check_whole("seed", self.seed, at_least=0)
        object.__setattr__(self, "trackers", tuple(self.trackers))
