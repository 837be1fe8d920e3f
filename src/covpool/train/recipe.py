"""All that decides what a training run does: one dataclass, from a YAML file and the command line to the run.

Each part of the training has a section of its own. All of it goes into ``recipe.yaml`` of the run's folder,
with what was left open filled in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from covpool.data.transforms import Augmentation
from covpool.errors import UsageError
from covpool.functional.arguments import check_choice, check_whole
from covpool.models.config import ModelConfig

Monitor = Literal["top1", "macro_f1", "balanced_accuracy"]


@dataclass(frozen=True)
class DataOptions:
    """Which images, and how they are read.

    Attributes:
        path: a folder of classes, with or without train, val and test; a CSV of path,label; CUB-200-2011,
            FGVC-Aircraft or Stanford Cars as their authors ship them; or shards, here or in a store.
        layout: of the data; ``auto`` finds it out.
        val_fraction: of the training images, set aside by the seed where there is no val; 0 for none.
        limit: use so many images of each split at most, chosen by the seed, for a trial.
        balance: ``weights`` weights the loss by the rarity of a class, ``sampling`` draws every class
            equally often.
        workers: processes that read images, for each process that trains.
        max_bad: how many images may turn out unusable before the run stops.
        window: shards whose samples are mixed with each other.
        cache: a local folder for the shards of a store.
    """

    path: str = ""
    layout: Literal["auto", "csv", "cub", "aircraft", "cars", "folder", "shards"] = "auto"
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
    """Where the first weights come from: of ``pretrained``, ``path`` and ``bundle`` one at most.

    Attributes:
        pretrained: the backbone's, of timm, downloaded.
        path: the backbone's, of a file, ``.safetensors`` or ``.pth``.
        bundle: all but the classifier's, of a folder that a run or ``covpool convert`` left. Its network is
            the run's where no recipe is named; one that is named must have the same.
        key_map: how the file's names become timm's: ``{prefix: replacement}``, or ``order``.
        freeze: ``backbone`` trains pooling and classifier alone.
        keep_statistics: BatchNorms of the backbone go by the statistics that came with the weights, and do
            not follow those of the batches.
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
            raise UsageError("the first weights come from one place: of pretrained, path and bundle give one")
        if self.key_map is not None and self.path is None:
            raise UsageError("key_map says how to read a file of weights: give its path too")


@dataclass(frozen=True)
class LossOptions:
    """Cross-entropy, and what makes it harder.

    Attributes:
        label_smoothing: the share of every label that is spread over all classes.
        mixup: images and labels are mixed by a share from Beta(mixup, mixup); 0 for never.
        cutmix: a part of another image, of an area from Beta(cutmix, cutmix); 0 for never. With both, each
            batch takes one of them.
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
    """How weights follow gradients.

    Attributes:
        name: ``sgd``, with momentum, or ``adamw``.
        lr: the learning rate at its highest.
        momentum: of ``sgd``; the first beta of ``adamw``.
        weight_decay: of all parameters.
        decay_norms: also of norms and biases, as the paper does.
        classifier_factor: the classifier's learning rate over ``lr``.
        layer_decay: each layer of the backbone learns so much slower than the next.
        clip: the largest norm of the gradient; ``null`` for any.
    """

    name: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4
    decay_norms: bool = True
    classifier_factor: float = 1.0
    layer_decay: float | None = None
    clip: float | None = None

    def __post_init__(self) -> None:
        check_choice("optimizer", self.name, ("sgd", "adamw"))
        if not 0 <= self.momentum < 1:
            raise UsageError(f"momentum must be at least 0 and below 1; got {self.momentum}")
        if not self.lr > 0 or self.weight_decay < 0 or (self.clip is not None and not self.clip > 0):
            raise UsageError(
                f"lr and clip must be above 0 and weight_decay at least 0; got {self.lr}, {self.clip} and "
                f"{self.weight_decay}"
            )


@dataclass(frozen=True)
class ScheduleOptions:
    """The learning rate from step to step; lengths are in epochs, and need not be whole.

    Attributes:
        epochs: in all.
        kind: ``constant``; ``steps``, a tenth of it from each of ``milestones``; ``exponential``, down to
            ``final_lr``; ``cosine``, likewise.
        milestones: of ``steps``.
        final_lr: of ``exponential`` and ``cosine``, for parameters whose rate begins at ``lr``.
        warmup: epochs in which it rises from near 0.
        head_first: the share of the epochs, the first ones, in which the backbone is frozen and pooling and
            classifier learn alone, on one cycle of the rate. What follows begins as if it were the start.
        head_lr: the highest rate in these epochs, in the place of the optimiser's; ``null`` for the same.
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
        """The epochs in which pooling and classifier learn alone."""
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
    """How the steps are computed.

    Attributes:
        precision: of autocast; the parameters stay in float32.
        accumulate: the parts in which each process takes its share of a batch, one after the other.
        ema: the decay of an average of the weights, which is then what is validated and saved; ``null`` for
            none.
        compile: the network by torch.compile.
        channels_last: the memory format of the images and convolutions.
        sync_batchnorm: BatchNorm's statistics over all processes; on GPUs only.
        deterministic: refuse operations that may differ from run to run.
        max_skips: steps with a loss or gradient that is not finite are skipped; after more of them than this
            the run stops.
        device: ``auto`` takes a GPU if there is one.
    """

    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    accumulate: int = 1
    ema: float | None = None
    compile: bool = False
    channels_last: bool = False
    sync_batchnorm: bool = False
    deterministic: bool = False
    max_skips: int = 10
    device: Literal["auto", "cpu", "cuda"] = "auto"

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, ("float32", "bfloat16", "float16"))
        check_whole("accumulate", self.accumulate)
        check_whole("max_skips", self.max_skips, at_least=0)
        if self.ema is not None and not 0 < self.ema < 1:
            raise UsageError(f"ema must be above 0 and below 1; got {self.ema}")


@dataclass(frozen=True)
class ValidationOptions:
    """How the best epoch is found: by the validation images, never by those of the test.

    Attributes:
        monitor: the metric whose best epoch is kept.
        patience: stop after so many epochs without a better one; ``null`` for never.
        batch_size: of each process.
        refit: train once more, on train and val together and for as many epochs as were best, before the
            test.
    """

    monitor: Monitor = "top1"
    patience: int | None = None
    batch_size: int = 64
    refit: bool = False

    def __post_init__(self) -> None:
        check_choice("monitor", self.monitor, ("top1", "macro_f1", "balanced_accuracy"))
        check_whole("batch_size of validation", self.batch_size)
        if self.patience is not None:
            check_whole("patience", self.patience)


@dataclass(frozen=True)
class CheckpointOptions:
    """When checkpoints are written; at the end of every epoch in any case.

    Attributes:
        steps: also every so many steps.
        minutes: also after so many minutes.
        keep: how many of the last are kept, beside that of the best epoch.
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
    """A training run.

    Attributes:
        data: which images, and how they are read.
        model: the network; the number of classes is that of the data.
        weights: where the first weights come from.
        augmentation: how training varies an image.
        loss: label smoothing and mixing.
        optimizer: how weights follow gradients.
        schedule: epochs and learning rate.
        loop: how the steps are computed.
        validation: how the best epoch is found.
        checkpoint: when checkpoints are written.
        batch_size: images in a step, over all processes.
        seed: of the order, the augmentation, the first weights, and everything else by chance.
        trackers: where numbers go besides the run's folder: ``tensorboard``, ``wandb``, ``mlflow``.
        out: the run's folder.
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
    out: str = "run"

    def __post_init__(self) -> None:
        check_whole("batch_size", self.batch_size)
        check_whole("seed", self.seed, at_least=0)
        object.__setattr__(self, "trackers", tuple(self.trackers))
