"""Build the network of a recipe, its optimizer and its learning rate schedule."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import math
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from timm.layers import convert_sync_batchnorm
from timm.optim import create_optimizer_v2, get_optimizer_class, list_optimizers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from covpool.data.order import number
from covpool.device import SYNC_BATCHNORM, forked_rng
from covpool.errors import UsageError
from covpool.models.bundle import load_model
from covpool.models.create import build_model, parameter_groups
from covpool.models.model import PooledClassifier
from covpool.nn.divided import DividedLinear
from covpool.processes import Processes
from covpool.training.recipe import OptimizerOptions, Recipe, ScheduleOptions

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
# Keys of a config that change the output of a network, but not always the shapes of its weights.
SAME_NETWORK = ("pool", "dim", "keep_resolution", "features", "join", "normalize")


def make_model(recipe: Recipe, classes: Sequence[str], processes: Processes) -> PooledClassifier:
    """Make the model on its device, with its initial weights; the same in every process."""
    weights = recipe.weights
    torch.manual_seed(number("weights", recipe.seed))
    is_divided = recipe.loop.divide_classes
    model = build_model(
        dataclasses.replace(recipe.model, num_classes=0 if is_divided else len(classes)),
        pretrained=weights.pretrained,
        checkpoint_path=weights.path,
        key_map=weights.key_map,
    )
    if is_divided:
        _divide_classifier(model, len(classes))
    model.classes = tuple(classes)
    if weights.bundle is not None:
        _load_bundle(model, weights.bundle)
    if weights.keep_statistics and not (weights.pretrained or weights.path or weights.bundle):
        raise UsageError(
            "BatchNorms can only keep statistics that come with weights: use --pretrained, "
            "--weights FILE or --bundle, or --weights.keep-statistics false"
        )
    model.keep_statistics = weights.keep_statistics
    if weights.freeze is not None:
        model.freeze(weights.freeze)
    if recipe.loop.sync_batchnorm:
        if processes.device.type not in SYNC_BATCHNORM:
            raise UsageError(f"sync_batchnorm needs a GPU; the device is {processes.device.type}")
        model = convert_sync_batchnorm(model)
    if recipe.loop.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's own way
    return model.to(processes.device).train()


def _load_bundle(model: PooledClassifier, bundle: str) -> None:
    """Load the weights of a bundle; the classifier too if the classes are the same."""
    source = load_model(bundle)
    _check_same_network(model, source, bundle)
    model.initial_weights = source.initial_weights
    weights, initial = source.state_dict(), model.state_dict()
    classifiers = model.get_classifier()
    classifier = {
        id(parameter)
        for layer in (classifiers if isinstance(classifiers, tuple) else (classifiers,))
        for parameter in layer.parameters()
    }
    names = {name for name, parameter in model.named_parameters() if id(parameter) in classifier}
    if source.classes != model.classes:
        weights |= {name: initial[name] for name in names}
    elif isinstance(classifiers, DividedLinear):
        rows = classifiers.rows
        weights |= {name: weights[name][rows.start : rows.stop] for name in names}
    for name in sorted(weights.keys() ^ initial.keys()) or [
        name for name in initial if initial[name].shape != weights[name].shape
    ]:
        raise UsageError(f"{bundle} is not of the recipe's network: they differ in {name}")
    model.load_state_dict(weights)


def _check_same_network(model: PooledClassifier, source: PooledClassifier, bundle: str) -> None:
    """Raise if the weights of a bundle fit, but its network computes something else."""
    pairs = {name: (getattr(source.config, name), getattr(model.config, name)) for name in SAME_NETWORK}
    for name in ("mean", "std"):
        theirs, ours = (tuple(network.pretrained_cfg[name]) for network in (source, model))
        pairs[f"preprocessing's {name}"] = theirs, ours
    differing = [f"{name} {theirs}, not {ours}" for name, (theirs, ours) in pairs.items() if theirs != ours]
    if differing:
        raise UsageError(
            f"{bundle} is not of the recipe's network: it has {'; '.join(differing)}; give the same"
        )


class Trunk(nn.Module):
    """A model without its divided classifier: images to the input of the classifier."""

    def __init__(self, model: PooledClassifier) -> None:
        super().__init__()
        self.parts = nn.ModuleList([*model.backbone_parts(), model.pool, model.head.hidden])
        self._model = (model,)  # in a tuple, it is not a submodule: DDP must not see the classifier

    def forward(self, images: Tensor) -> Tensor:
        """Images ``(B, 3, H, W)`` to features ``(B, head_hidden_size)``."""
        return self._model[0].forward_head(self._model[0].forward_features(images), pre_logits=True)


def make_parallel(model: PooledClassifier, processes: Processes) -> nn.Module:
    """Wrap the model in DistributedDataParallel if there are several processes; a divided classifier not."""
    network = Trunk(model) if isinstance(model.head.classifier, DividedLinear) else model
    if processes.world_size == 1 or not any(p.requires_grad for p in network.parameters()):
        return network
    return DistributedDataParallel(network, gradient_as_bucket_view=True)  # no second copy of the gradients


def _divide_classifier(model: PooledClassifier, classes: int) -> None:
    """Give a model without a classifier one that is divided over the processes."""
    if model.config.join is not None:
        raise UsageError("--loop.divide-classes has one classifier only: use --model.join none")
    like = next(model.parameters())
    model.head.classifier = DividedLinear(
        model.head.hidden_size, classes, device=like.device, dtype=like.dtype
    )
    model.num_classes = classes
    model.config = dataclasses.replace(model.config, num_classes=classes)
    model.pretrained_cfg["num_classes"] = classes


@contextlib.contextmanager
def own_state(processes: Processes, deterministic: bool) -> Iterator[None]:
    """Give training its own random numbers and deterministic mode; restore the caller's at the end.

    Args:
        processes: their device selects the generators to restore.
        deterministic: make torch refuse operations that may differ from run to run.
    """
    cublas, cudnn = os.environ.get(CUBLAS), torch.backends.cudnn.benchmark
    mode = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    with forked_rng(processes.device):
        try:
            if deterministic:
                os.environ.setdefault(CUBLAS, ":4096:8")  # cuBLAS refuses to be deterministic without it
                torch.use_deterministic_algorithms(True)
                torch.backends.cudnn.benchmark = False
            yield
        finally:
            torch.use_deterministic_algorithms(mode, warn_only=warn_only)
            torch.backends.cudnn.benchmark = cudnn
            if cublas is None:
                os.environ.pop(CUBLAS, None)


# The part of the head's cycle in which the learning rate rises.
RISE = 0.3
# Between the name of a parameter and that of its state. Neither contains it.
SEPARATOR = "|"
# Optimizers of timm that need second derivatives, or whose state is no tensors and numbers.
UNSUPPORTED = {"adahessian", "kron", "kronc", "kronw"}
# Optimizers that treat every weight by itself. Others compute norms or products of a whole matrix.
ELEMENTWISE = {"adam", "adamw", "lion", "momentum", "nadam", "nadamw", "nesterov", "radam", "rmsprop", "sgd"}
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
    known = [str(optimizer) for optimizer in list_optimizers() if optimizer not in UNSUPPORTED]
    if name not in known:
        near = difflib.get_close_matches(name, known)
        raise UsageError(
            f"--optimizer.name is {options.name!r}, which covpool does not support: use "
            f"{' or '.join(near or ('sgd', 'adamw', 'lamb'))} (timm.optim.list_optimizers() lists all)"
        )
    if isinstance(model.head.classifier, DividedLinear) and name not in ELEMENTWISE:
        raise UsageError(
            f"--optimizer.name {options.name} needs the whole matrix of the divided classifier: use "
            f"{', '.join(sorted(ELEMENTWISE))}, or --loop.divide-classes false"
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
    tensors = {}
    for name, state in states.items():
        for key, value in state.items():
            full_name = f"{name}{SEPARATOR}{key}"
            if isinstance(value, Tensor):
                tensors[full_name] = value
            elif isinstance(value, bool | int | float):
                dtype = torch.float64 if isinstance(value, float) else None
                tensors[f"{full_name}{SEPARATOR}number"] = torch.tensor(value, dtype=dtype)
    return tensors


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
