"""The optimiser of a recipe, and its state by the names of parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from covpool.models.model import PooledClassifier
from covpool.models.parameter_groups import parameter_groups
from covpool.train.recipe import OptimizerOptions

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
