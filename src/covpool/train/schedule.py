"""The learning rate as a function of the step alone, so that there is no state of a schedule to keep.

timm's schedulers are functions of the step too, but they begin a warm-up and end a cosine at one rate for
all groups, whatever the rates of the groups: under layer-wise decay the first layers would warm up from
above. Here one factor goes for every group, so that their ratios last.
"""

from __future__ import annotations

import math
from bisect import bisect_right

from torch.optim import Optimizer

from covpool.train.recipe import ScheduleOptions

# Of the cycle in which the head learns alone, the part in which the rate rises.
RISE = 0.3


class Schedule:
    """What the rates are multiplied by.

    Args:
        options: of the recipe.
        lr: the rate that ``final_lr`` is compared with.
        batches: steps in an epoch.
    """

    def __init__(self, options: ScheduleOptions, lr: float, batches: int) -> None:
        self.kind = options.kind
        self.head_steps = options.head_epochs * batches
        self.head_lr = (options.head_lr or lr) / lr
        self.steps = options.epochs * batches - self.head_steps
        self.warmup = round(options.warmup * batches)
        self.milestones = [round(milestone * batches) for milestone in options.milestones]
        self.final = options.final_lr / lr

    def factor(self, step: int) -> float:
        """Of a step, counted from 0."""
        if step < self.head_steps:
            return self.head_lr * _cycle((step + 1) / (self.head_steps + 1))
        step -= self.head_steps
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        done = step / self.steps
        if self.kind == "cosine":
            return self.final + (1 - self.final) * (1 + math.cos(math.pi * done)) / 2
        if self.kind == "exponential":
            return float(self.final**done)
        return 0.1 ** bisect_right(self.milestones, step)  # of "constant" there are none

    def set_rates(self, optimizer: Optimizer, step: int) -> None:
        """Give every group its rate."""
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * self.factor(step)


def _cycle(done: float) -> float:
    """Up in a straight line, and down by a cosine."""
    return done / RISE if done < RISE else (1 + math.cos(math.pi * (done - RISE) / (1 - RISE))) / 2
