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

from covpool.data.image_set import ImageSet, class_counts
from covpool.data.loader import Batch
from covpool.data.order import number
from covpool.device import autocast
from covpool.errors import UsageError
from covpool.models.model import PooledClassifier
from covpool.nn.divided import DividedLinear, Losses
from covpool.processes import Processes
from covpool.training.network import Schedule, make_optimizer, make_parallel
from covpool.training.recipe import LossOptions, Recipe, ScheduleOptions


class Targets(NamedTuple):
    """The targets of images: few classes each, whatever their number in total.

    Attributes:
        classes: ``(B, n)``, the class of the largest share first; classes may repeat.
        shares: ``(B, n)``, 1 in total.
    """

    classes: Tensor
    shares: Tensor


# Options of the loss that also work with a classifier whose classes are divided over processes.
DIVISIBLE = ("label_smoothing", "mixup", "cutmix")


class Objective:
    """The loss of each image.

    Args:
        options: the section ``loss`` of the recipe.
        class_weights: the weight of each class; ``None`` for equal weights.
        classifier: the classifier, if its classes are divided over processes.

    Raises:
        UsageError: if an option is set that such a classifier does not support.
    """

    def __init__(
        self,
        options: LossOptions,
        class_weights: Tensor | None = None,
        classifier: DividedLinear | None = None,
    ) -> None:
        for field in dataclasses.fields(options) if classifier is not None else ():
            if field.name not in DIVISIBLE and getattr(options, field.name) != field.default:
                raise UsageError(
                    f"loss.{field.name} does not work with classes divided over processes: leave it out, or "
                    "train with a whole classifier"
                )
        self.classifier = classifier
        self.smoothing = options.label_smoothing
        self.class_weights = class_weights
        kinds = ((v2.MixUp, options.mixup), (v2.CutMix, options.cutmix))
        mixes = [kind(alpha=alpha) for kind, alpha in kinds if alpha > 0]
        self._mix = v2.RandomChoice(mixes) if mixes else None

    def mixed(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Targets]:
        """Return images and targets: one class per image, or two if images are mixed."""
        if self._mix is None:
            return images, Targets(labels[:, None], torch.ones(len(labels), 1, device=labels.device))
        # The images of the batch stand for classes, which may be far more.
        images, parts_BB = self._mix(images, torch.eye(len(labels), device=labels.device))
        shares_Bn, places_Bn = parts_BB.topk(min(2, len(labels)), dim=1)
        missing = 2 - shares_Bn.shape[1]  # a single image is mixed with itself
        return images, Targets(labels[F.pad(places_Bn, (0, missing))], F.pad(shares_Bn, (0, missing)))

    def __call__(self, outputs: Tensor, targets: Targets) -> Losses:
        """Return losses in float32, predictions and targets of this process's images.

        With a divided classifier they are of the images of all processes.

        Args:
            outputs: logits ``(B, K)``, or the input of a divided classifier.
            targets: targets of this process's images.
        """
        if self.classifier is None:
            log_BK = outputs.float().log_softmax(dim=1)
            losses_B = -(log_BK.gather(1, targets.classes) * targets.shares).sum(dim=1)
            if self.smoothing:
                losses_B = (1 - self.smoothing) * losses_B - self.smoothing * log_BK.mean(dim=1)
            losses = Losses(losses_B, outputs.detach().argmax(dim=1), *targets)
        else:
            losses = self.classifier.loss(outputs, *targets, label_smoothing=self.smoothing, averaged=True)
        if self.class_weights is None:
            return losses
        factors_B = (self.class_weights[losses.classes] * losses.shares).sum(dim=1)
        return losses._replace(losses=losses.losses * factors_B)


def make_objective(recipe: Recipe, images: ImageSet, model: PooledClassifier) -> Objective:
    """Make the loss of a recipe for its training images and its model."""
    is_weighted = recipe.data.balance == "weights"
    weights = balancing_weights(images).to(next(model.parameters()).device) if is_weighted else None
    classifier = model.head.classifier
    return Objective(recipe.loss, weights, classifier if isinstance(classifier, DividedLinear) else None)


def balancing_weights(images: ImageSet) -> Tensor:
    """Return class weights inverse to the number of images, of mean 1 over images; 0 without images."""
    counts = class_counts(images)
    present = counts > 0
    weights = np.where(present, len(images) / (present.sum() * np.maximum(counts, 1)), 0.0)
    return torch.from_numpy(weights.astype(np.float32))


class Outcome(NamedTuple):
    """The result of a step, over all processes.

    Attributes:
        loss: the mean over the batch.
        top1: the top-1 accuracy.
        gradient_norm: the norm before clipping.
        skipped: whether the loss or the gradient was not finite, and nothing was changed.
        counts: whether a skipped step counts as a fault. A float16 overflow does not.
    """

    loss: float
    top1: float
    gradient_norm: float
    skipped: bool
    counts: bool


class Learner:
    """A model, its optimizer and its average. These and the cursor are the state of training.

    Each step seeds the random numbers of dropout and mixing by the seed, the cursor and the rank. So
    checkpoints need no state of generators.
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
        self.classifier = objective.classifier
        self.optimizer = make_optimizer(model, recipe.optimizer)
        self.schedule = Schedule(_stages(recipe), recipe.optimizer.lr, batches)
        # The warmup keeps the average from staying near the initial weights.
        self.ema = ModelEmaV3(model, decay=recipe.loop.ema, use_warmup=True) if recipe.loop.ema else None
        self.scaler = torch.GradScaler(processes.device.type, enabled=recipe.loop.precision == "float16")
        self._buffers = _Kept(model)
        self._head_steps = 0 if recipe.weights.freeze else self.schedule.head_steps
        self._head_alone = False
        self._make_network()

    @property
    def best_weights(self) -> PooledClassifier:
        """The model that is validated and saved: the average of the weights, if there is one."""
        return self.model if self.ema is None else self.ema.module

    @property
    def lr(self) -> float:
        """The learning rate of the pooling and of the last layers of the backbone."""
        group = self.optimizer.param_groups[0]
        rate: float = group["lr"] / group.get("initial_lr", group["lr"]) * self.recipe.optimizer.lr
        return rate

    def step(self, batch: Batch, cursor: int) -> Outcome:
        """Train on this process's share of a global batch."""
        self._begin_stage(cursor)
        torch.manual_seed(number("step", self.recipe.seed, cursor, self.processes.rank))
        self.schedule.set_rates(self.optimizer, cursor)
        self._buffers.keep()
        loss, hits = self._backward(batch)
        norm = self._clip()
        # One exchange and one synchronization per step: all processes must decide the same.
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

    def _clip(self) -> Tensor:
        """Divide gradients by the loss scale, clip them, and return the norm before clipping."""
        limit = self.recipe.optimizer.clip or math.inf
        if self.classifier is None:
            self.scaler.unscale_(self.optimizer)
            return nn.utils.clip_grad_norm_(self._parameters, limit)
        # Before unscaling: each process looks for overflows in its own gradients, and all must find the same.
        squares = self.classifier.squared_gradient() / self.scaler.get_scale() ** 2
        self.scaler.unscale_(self.optimizer)
        classifier = {id(parameter) for parameter in self.classifier.parameters()}
        copies = [p.grad for p in self._parameters if id(p) not in classifier and p.grad is not None]
        norm = (nn.utils.get_total_norm(copies) ** 2 + squares).sqrt()
        nn.utils.clip_grads_with_norm_(self._parameters, limit, norm)
        return norm

    def _begin_stage(self, cursor: int) -> None:
        """Freeze the backbone in the epochs of the head alone, and unfreeze it after them."""
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
        """Wrap the network. DDP reads only once which parameters train, so each stage needs its own."""
        self.parallel = make_parallel(self.model, self.processes)
        self._network = torch.compile(self.parallel) if self.recipe.loop.compile else self.parallel
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        if self.recipe.loop.deterministic and self.processes.world_size > 2:
            self._settle_buckets()

    def _backward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute gradients, and return this process's part of the loss and of the top-1 accuracy."""
        device, loop = self.processes.device, self.recipe.loop
        layout = torch.channels_last if loop.channels_last else torch.preserve_format
        images = batch.images.to(device, non_blocking=True, memory_format=layout)
        images, targets = self.objective.mixed(images, batch.labels.to(device, non_blocking=True))
        loss, hits = torch.zeros(2, device=device)
        # Every process has the same number of parts: SyncBatchNorm exchanges in each.
        count = min(loop.accumulate, self.recipe.batch_size // self.processes.world_size)
        split = (images.tensor_split(count), *(part.tensor_split(count) for part in targets))
        for place, (x, *y) in enumerate(zip(*split, strict=True), start=1):
            with self._gradients_stay_here() if place < count else contextlib.nullcontext():
                part, right = self._forward(x, Targets(*y))
                # DDP averages, hence the number of processes.
                self.scaler.scale(part * self.processes.world_size).backward()
            loss += part.detach()
            hits += right
        return loss, hits

    def _forward(self, x: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """Return this process's part of the loss and of the top-1 accuracy of a global batch."""
        # Shares may differ by an image, so each part is divided by the global batch size.
        size = self.recipe.batch_size
        with autocast(self.processes.device, self.recipe.loop.precision):
            losses = self.objective(self._network(x), targets)
        if self.classifier is not None:  # every process has the losses of all images
            size *= self.processes.world_size
        return losses.losses.sum() / size, (losses.predicted == losses.classes[:, 0]).sum() / size

    def _settle_buckets(self) -> None:
        """Let DDP rebuild its gradient buckets, which it does after the first step of a process.

        With three processes or more, the buckets decide the order in which gradients are added. The first
        step of a resumed run would differ in its last bits.
        """
        self._buffers.keep()
        size = self.model.pretrained_cfg["input_size"]
        self.parallel(torch.zeros(2, *size, device=self.processes.device)).sum().backward()
        self.optimizer.zero_grad()
        self._buffers.restore()

    def _gradients_stay_here(self) -> contextlib.AbstractContextManager[None]:
        """Delay the exchange of gradients until the last part of a share."""
        if isinstance(self.parallel, DistributedDataParallel):
            return self.parallel.no_sync()
        return contextlib.nullcontext()


def _stages(recipe: Recipe) -> ScheduleOptions:
    """If the backbone never trains, all epochs are the head's."""
    if recipe.weights.freeze is None or not recipe.schedule.head_first:
        return recipe.schedule
    return dataclasses.replace(recipe.schedule, head_first=1.0)


class _Kept:
    """A copy of the buffers: a NaN in a forward pass would stay in the BatchNorm statistics."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = list(model.buffers())
        self._copies = [buffer.clone() for buffer in self._buffers]

    def keep(self) -> None:
        if self._buffers:
            torch._foreach_copy_(self._copies, self._buffers)

    def restore(self) -> None:
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._copies)
