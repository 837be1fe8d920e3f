"""One optimization step: loss, gradient accumulation, clipping, finite check."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.transforms import v2

from covpool.data.batch import Batch
from covpool.data.image_set import ImageSet, class_counts
from covpool.data.order import number
from covpool.device import autocast
from covpool.models.model import PooledClassifier
from covpool.processes import Processes
from covpool.train.network import make_parallel
from covpool.train.optimizer import Schedule, make_optimizer
from covpool.train.recipe import LossOptions, Recipe, ScheduleOptions


class Objective:
    """The loss of each image.

    Args:
        options: of the recipe.
        classes: how many there are.
        class_weights: of the loss, by the class of an image; ``None`` for equal ones.
    """

    def __init__(self, options: LossOptions, classes: int, class_weights: Tensor | None = None) -> None:
        self.smoothing = options.label_smoothing
        self.class_weights = class_weights
        mixes = []
        if options.mixup > 0:
            mixes.append(v2.MixUp(alpha=options.mixup, num_classes=classes))
        if options.cutmix > 0:
            mixes.append(v2.CutMix(alpha=options.cutmix, num_classes=classes))
        self._mix = v2.RandomChoice(mixes) if mixes else None

    def mixed(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Images and their targets: labels, or where images were mixed, the share of each class."""
        if self._mix is None:
            return images, labels
        images, targets = self._mix(images, labels)
        return images, targets

    def __call__(self, logits_BK: Tensor, targets: Tensor) -> Tensor:
        """The loss of each image, in float32."""
        losses_B = F.cross_entropy(
            logits_BK.float(), targets, reduction="none", label_smoothing=self.smoothing
        )
        if self.class_weights is None:
            return losses_B
        is_mixed = targets.ndim == 2
        weights_B = targets @ self.class_weights if is_mixed else self.class_weights[targets]
        return losses_B * weights_B


def make_objective(recipe: Recipe, images: ImageSet, device: torch.device) -> Objective:
    """That of a recipe, for the images it learns from."""
    is_weighted = recipe.data.balance == "weights"
    weights = balancing_weights(images).to(device) if is_weighted else None
    return Objective(recipe.loss, len(images.classes), weights)


def balancing_weights(images: ImageSet) -> Tensor:
    """A weight for each class, inverse to its number of images; the mean over images is 1.

    A class without images has the weight 0.
    """
    counts = class_counts(images)
    present = counts > 0
    weights = np.where(present, len(images) / (present.sum() * np.maximum(counts, 1)), 0.0)
    return torch.from_numpy(weights.astype(np.float32))


class Outcome(NamedTuple):
    """Of a step, over all processes.

    Attributes:
        loss: the mean over the batch.
        top1: the fraction whose highest logit is right.
        gradient_norm: before clipping.
        skipped: the loss or the gradient was not finite, and nothing was changed.
        counts: whether that is a fault; an overflow in float16 that the next step's scale avoids is not.
    """

    loss: float
    top1: float
    gradient_norm: float
    skipped: bool
    counts: bool


class Learner:
    """A model and all that changes when it learns; the state of training is this and the cursor.

    Random numbers inside the network, of dropout and of mixing, are seeded anew in every step, by the seed,
    the cursor and the rank. So there are no states of generators to keep.

    Args:
        model: on its device.
        recipe: of the run.
        processes: that train together.
        objective: the loss.
        batches: steps in an epoch.
    """

    def __init__(
        self,
        model: PooledClassifier,
        recipe: Recipe,
        processes: Processes,
        objective: Objective,
        batches: int,
    ) -> None:
        self.model, self.recipe, self.processes, self.objective = model, recipe, processes, objective
        self.optimizer = make_optimizer(model, recipe.optimizer)
        self.schedule = Schedule(_stages(recipe), recipe.optimizer.lr, batches)
        # With its usual decay from the first step on, the average would be of the first weights for long.
        self.ema = ModelEmaV3(model, decay=recipe.loop.ema, use_warmup=True) if recipe.loop.ema else None
        self.scaler = torch.GradScaler(processes.device.type, enabled=recipe.loop.precision == "float16")
        self._buffers = _Kept(model)
        self._head_steps = 0 if recipe.weights.freeze else self.schedule.head_steps
        self._head_alone = False
        self._make_network()

    @property
    def best_weights(self) -> PooledClassifier:
        """What is validated and saved: the average of the weights where there is one."""
        return self.model if self.ema is None else self.ema.module

    @property
    def lr(self) -> float:
        """The rate of the pooling and the backbone's last layers."""
        group = self.optimizer.param_groups[0]
        rate: float = group["lr"] / group.get("initial_lr", group["lr"]) * self.recipe.optimizer.lr
        return rate

    def step(self, batch: Batch, cursor: int) -> Outcome:
        """Learn from this process's share of a global batch.

        Args:
            batch: the share.
            cursor: the global batches before it.
        """
        self._begin_stage(cursor)
        torch.manual_seed(number("step", self.recipe.seed, cursor, self.processes.rank))
        self.schedule.set_rates(self.optimizer, cursor)
        self._buffers.keep()
        loss, hits = self._backward(batch)
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self._parameters, self.recipe.optimizer.clip or math.inf)
        # One exchange and one wait a step: all processes must come to the same decision.
        is_faulty = ~loss.isfinite()
        totals = self.processes.sum_(torch.stack([loss.nan_to_num(), hits, is_faulty.float()]))
        mean, top1, faulty, gradient_norm = torch.cat([totals, norm[None].float()]).tolist()
        skipped = faulty > 0 or not math.isfinite(gradient_norm)
        overflow = skipped and faulty == 0 and self.scaler.is_enabled() and self.scaler.get_scale() > 1
        if skipped:
            self._buffers.restore()
        else:
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.ema is not None and not skipped:
            self.ema.update(self.model, step=cursor + 1)
        loss_told = math.nan if faulty else mean
        return Outcome(loss_told, top1, gradient_norm, skipped, counts=skipped and not overflow)

    def _begin_stage(self, cursor: int) -> None:
        """Freeze the backbone for the epochs of the head alone, and let it go after them."""
        head_alone = cursor < self._head_steps
        if head_alone == self._head_alone:
            return
        self._head_alone = head_alone
        if head_alone:
            self.model.freeze("backbone")
        else:
            self.model.unfreeze()
        self._make_network()

    def _make_network(self) -> None:
        """What a step calls. DDP asks once which parameters learn, so each stage has its own."""
        self.parallel = make_parallel(self.model, self.processes)
        self._network = torch.compile(self.parallel) if self.recipe.loop.compile else self.parallel
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        if self.recipe.loop.deterministic and self.processes.world_size > 2:
            self._settle_buckets()

    def _backward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """This process's part of the loss and of the top-1 of the global batch; gradients are left behind."""
        device, loop = self.processes.device, self.recipe.loop
        layout = torch.channels_last if loop.channels_last else torch.preserve_format
        images = batch.images.to(device, non_blocking=True, memory_format=layout)
        images, targets = self.objective.mixed(images, batch.labels.to(device, non_blocking=True))
        loss, hits = torch.zeros(2, device=device)
        # As many parts in every process, whatever its share: SyncBatchNorm exchanges in each.
        count = min(loop.accumulate, self.recipe.batch_size // self.processes.world_size)
        parts = list(zip(images.tensor_split(count), targets.tensor_split(count), strict=True))
        for place, (x, y) in enumerate(parts, start=1):
            with self._gradients_stay_here() if place < len(parts) else contextlib.nullcontext():
                with autocast(device, loop.precision):
                    logits = self._network(x)
                part = self.objective(logits, y).sum() / self.recipe.batch_size
                # Shares may differ by an image, so each is a sum over the global batch. DDP averages: hence
                # the number of processes.
                self.scaler.scale(part * self.processes.world_size).backward()
            loss += part.detach()
            labels = y.argmax(dim=1) if y.ndim == 2 else y
            hits += (logits.detach().argmax(dim=1) == labels).sum() / self.recipe.batch_size
        return loss, hits

    def _settle_buckets(self) -> None:
        """Let DDP make its buckets of gradients, which it does anew after the first step of a process.

        On three processes or more the buckets decide in which order gradients are added, so the first step
        of a run that was resumed would differ in its last bits.
        """
        self._buffers.keep()
        _, height, width = self.model.pretrained_cfg["input_size"]
        self.parallel(torch.zeros(2, 3, height, width, device=self.processes.device)).sum().backward()
        self.optimizer.zero_grad()
        self._buffers.restore()

    def _gradients_stay_here(self) -> contextlib.AbstractContextManager[None]:
        """Until the last part of a share, gradients need not be exchanged."""
        if isinstance(self.parallel, DistributedDataParallel):
            return self.parallel.no_sync()
        return contextlib.nullcontext()


def _stages(recipe: Recipe) -> ScheduleOptions:
    """Where the backbone never learns, all epochs are the head's."""
    if recipe.weights.freeze is None or not recipe.schedule.head_first:
        return recipe.schedule
    return dataclasses.replace(recipe.schedule, head_first=1.0)


class _Kept:
    """A copy of the buffers: a forward pass that meets a NaN puts it into BatchNorm's statistics for good."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = list(model.buffers())
        self._copies = [buffer.clone() for buffer in self._buffers]

    def keep(self) -> None:
        if self._buffers:
            torch._foreach_copy_(self._copies, self._buffers)

    def restore(self) -> None:
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._copies)
