"""The learning rate as a function of the step alone: timm's schedulers, which keep no state."""

from __future__ import annotations

from typing import Any

from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler, StepLRScheduler
from timm.scheduler.scheduler import Scheduler
from torch.optim import Optimizer

from covpool.train.recipe import ScheduleOptions


def make_schedule(optimizer: Optimizer, options: ScheduleOptions, lr: float, batches: int) -> Scheduler:
    """A scheduler whose ``step_update(step)`` sets the rate of every group.

    Args:
        optimizer: each group's rate is where the schedule begins, so their ratios last.
        options: of the recipe.
        lr: the rate that ``final_lr`` is compared with.
        batches: steps in an epoch.
    """
    steps = options.epochs * batches
    warmup = round(options.warmup * batches)
    # The first step of a warm-up does not have the rate 0, or it would be wasted.
    shared: dict[str, Any] = {"warmup_t": warmup, "warmup_lr_init": lr / (warmup + 1), "t_in_epochs": False}
    if options.kind == "cosine":
        return CosineLRScheduler(optimizer, t_initial=max(steps, 2), lr_min=options.final_lr, **shared)
    if options.kind == "steps":
        # timm's decays a step before each of them, and ours begins the epoch of a milestone.
        milestones = [round(milestone * batches) + 1 for milestone in options.milestones]
        return MultiStepLRScheduler(optimizer, decay_t=milestones, decay_rate=0.1, **shared)
    rate = (options.final_lr / lr) ** (1 / steps) if options.kind == "exponential" else 1.0
    return StepLRScheduler(optimizer, decay_t=1, decay_rate=rate, **shared)
