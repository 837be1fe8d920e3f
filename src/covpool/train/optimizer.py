"""Optimizer and learning rate schedule of a recipe."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from covpool.models.create import parameter_groups
from covpool.models.model import PooledClassifier
from covpool.train.recipe import OptimizerOptions, ScheduleOptions

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


# Between the name of a parameter and that of what an optimiser keeps of it; no name of a parameter has it.
SEPARATOR = "|"


def make_optimizer(model: PooledClassifier, options: OptimizerOptions) -> Optimizer:
    """SGD or AdamW, with the recipe's rates in each group."""
    groups = parameter_groups(
        model,
        options.lr,
        weight_decay=options.weight_decay,
        classifier_factor=options.classifier_factor,
        layer_decay=options.layer_decay,
        decay_norms=options.decay_norms,
    )
    if options.name == "sgd":
        return SGD(groups, momentum=options.momentum)
    return AdamW(groups, betas=(options.momentum, 0.999))


def optimizer_tensors(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """What the optimiser keeps of every parameter, such as ``head.classifier.weight|momentum_buffer``."""
    return {
        f"{name}{SEPARATOR}{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def load_optimizer_tensors(optimizer: Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """The inverse. Rates and decays are the recipe's, so they are not part of it."""
    optimizer.state.clear()
    parameters = dict(model.named_parameters())
    for full_name, saved in tensors.items():
        name, _, key = full_name.rpartition(SEPARATOR)
        parameter = parameters[name]
        # In the memory format of the parameter, which need not be that of the file.
        like = parameter if saved.shape == parameter.shape else saved
        on = saved.device if key == "step" else parameter.device  # AdamW counts on the CPU
        kept = torch.empty_like(like, dtype=saved.dtype, device=on, requires_grad=False)
        optimizer.state[parameter][key] = kept.copy_(saved)
