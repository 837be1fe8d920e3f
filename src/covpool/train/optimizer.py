"""Optimizer and learning rate schedule of a recipe."""

from __future__ import annotations

import difflib
import inspect
import math
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

import torch
from timm.optim import create_optimizer_v2, get_optimizer_class, list_optimizers
from torch import Tensor, nn
from torch.optim import Optimizer

from covpool.errors import UsageError
from covpool.models.create import parameter_groups
from covpool.models.model import PooledClassifier
from covpool.train.recipe import OptimizerOptions, ScheduleOptions

# The part of the head's cycle in which the learning rate rises.
RISE = 0.3
# Between the name of a parameter and that of its state. Neither contains it.
SEPARATOR = "|"
# Optimizers of timm that need second derivatives, or whose state is no tensors and numbers.
UNSUPPORTED = {"adahessian", "kron", "kronc", "kronw"}
# Optimizer state that torch keeps on the CPU.
ON_CPU = {"step", "mu_product"}


def make_optimizer(model: PooledClassifier, options: OptimizerOptions) -> Optimizer:
    """Create an optimizer of timm by name, with the recipe's learning rate and decay in each group.

    Raises:
        UsageError: if there is no such optimizer, or it does not work here.
    """
    groups = parameter_groups(
        model,
        options.lr,
        weight_decay=options.weight_decay,
        classifier_factor=options.classifier_factor,
        layer_decay=options.layer_decay,
        decay_norms=options.decay_norms,
    )
    name = options.name.lower()
    known = [str(one) for one in list_optimizers() if one not in UNSUPPORTED]
    if name not in known:
        near = difflib.get_close_matches(name, known)
        raise UsageError(
            f"--optimizer.name is {options.name!r}, which covpool does not support: use "
            f"{' or '.join(near or ('sgd', 'adamw', 'lamb'))} (timm.optim.list_optimizers() lists all)"
        )
    # In timm, sgd has Nesterov momentum; in recipes it never had. timm's "nesterov" is that one.
    more: dict[str, Any] = {"nesterov": False} if name == "sgd" else {}
    try:
        signature = inspect.signature(get_optimizer_class(name, bind_defaults=False)).parameters
        betas: Any = signature["betas"].default if "betas" in signature else ()
        if len(betas) == 2:
            more["betas"] = (options.momentum, betas[1])
        return create_optimizer_v2(groups, name, lr=options.lr, momentum=options.momentum, **more)
    except (AssertionError, ImportError) as error:  # apex and bitsandbytes need a GPU and their packages
        raise UsageError(f"--optimizer.name {options.name} is not available here: {error}") from error


def optimizer_tensors(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the optimizer's state by names such as ``head.classifier.weight|momentum_buffer``.

    A Python number becomes a tensor whose name ends in ``|number``. Some optimizers of timm count the steps
    of a group: ``group 0|step``.
    """
    states: dict[str, Mapping[str, Any]] = {
        name: optimizer.state.get(parameter, {}) for name, parameter in model.named_parameters()
    }
    for place, group in enumerate(optimizer.param_groups):
        states[f"group {place}"] = {"step": group["step"]} if "step" in group else {}
    found = {}
    for name, state in states.items():
        for key, value in state.items():
            full_name = f"{name}{SEPARATOR}{key}"
            if isinstance(value, Tensor):
                found[full_name] = value
            elif isinstance(value, bool | int | float):
                dtype = torch.float64 if isinstance(value, float) else None
                found[f"{full_name}{SEPARATOR}number"] = torch.tensor(value, dtype=dtype)
    return found


def load_optimizer_tensors(optimizer: Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Restore the state of :func:`optimizer_tensors`. Learning rates and decay are the recipe's."""
    optimizer.state.clear()
    parameters = dict(model.named_parameters())
    for full_name, saved in tensors.items():
        name, key, *number = full_name.split(SEPARATOR)
        if name.startswith("group "):
            state = optimizer.param_groups[int(name.removeprefix("group "))]
            state[key] = saved.item() if number else saved.clone()
            continue
        parameter = parameters[name]
        # The memory format is the parameter's, which may differ from the file's.
        like = parameter if saved.shape == parameter.shape else saved
        on = saved.device if key in ON_CPU else parameter.device
        kept = torch.empty_like(like, dtype=saved.dtype, device=on, requires_grad=False)
        optimizer.state[parameter][key] = saved.item() if number else kept.copy_(saved)


class Schedule:
    """The learning rate of each step, as a factor of the highest.

    Args:
        options: the section ``schedule`` of the recipe.
        lr: the highest learning rate; ``final_lr`` and ``head_lr`` are divided by it.
        batches: steps per epoch.
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
        """Return the factor of a step, counted from 0."""
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
        return 0.1 ** bisect_right(self.milestones, step)  # "constant" has no milestones

    def set_rates(self, optimizer: Optimizer, step: int) -> None:
        """Set the learning rate of every parameter group."""
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * self.factor(step)


def _cycle(done: float) -> float:
    """Rise linearly, then fall by a cosine."""
    return done / RISE if done < RISE else (1 + math.cos(math.pi * (done - RISE) / (1 - RISE))) / 2
