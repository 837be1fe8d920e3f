"""Make the network of a recipe, and set up torch for training."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence

import torch
from timm.layers import convert_sync_batchnorm
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from covpool.data.order import number
from covpool.errors import UsageError
from covpool.models.bundle import load_model
from covpool.models.create import build_model
from covpool.models.model import PooledClassifier
from covpool.processes import Processes
from covpool.train.recipe import Recipe

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
# Keys of a config that change the output of a network, but not always the shapes of its weights.
SAME_NETWORK = ("pool", "dim", "keep_resolution", "features", "join", "normalize")


def make_model(recipe: Recipe, classes: Sequence[str], processes: Processes) -> PooledClassifier:
    """Make the model on its device, with its initial weights; the same in every process."""
    weights = recipe.weights
    torch.manual_seed(number("weights", recipe.seed))
    model = build_model(
        dataclasses.replace(recipe.model, num_classes=len(classes)),
        pretrained=weights.pretrained,
        checkpoint_path=weights.path,
        key_map=weights.key_map,
    )
    model.classes = tuple(classes)
    if weights.bundle is not None:
        _load_all_but_classifier(model, weights.bundle)
    if weights.keep_statistics and not (weights.pretrained or weights.path or weights.bundle):
        raise UsageError(
            "BatchNorms can only keep statistics that come with weights: use --pretrained true, "
            "--weights.path or --bundle, or --weights.keep-statistics false"
        )
    model.keep_statistics = weights.keep_statistics
    if weights.freeze is not None:
        model.freeze(weights.freeze)
    if recipe.loop.sync_batchnorm:
        if processes.device.type != "cuda":
            raise UsageError("sync_batchnorm needs a GPU")
        model = convert_sync_batchnorm(model)
    if recipe.loop.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's own way
    return model.to(processes.device).train()


def _load_all_but_classifier(model: PooledClassifier, bundle: str) -> None:
    """Load backbone, pooling and hidden layers of a bundle, which has other classes."""
    source = load_model(bundle)
    _check_same_network(model, source, bundle)
    source.reset_classifier(model.num_classes)
    weights, own = source.state_dict(), model.state_dict()
    for name in sorted(weights.keys() ^ own.keys()) or [
        name for name in own if own[name].shape != weights[name].shape
    ]:
        raise UsageError(f"{bundle} is not of the recipe's network: they differ in {name}")
    classifiers = model.get_classifier()
    new = {
        id(parameter)
        for classifier in (classifiers if isinstance(classifiers, tuple) else (classifiers,))
        for parameter in classifier.parameters()
    }
    fresh = {name for name, parameter in model.named_parameters() if id(parameter) in new}
    model.load_state_dict({name: own[name] if name in fresh else weights[name] for name in own})


def _check_same_network(model: PooledClassifier, source: PooledClassifier, bundle: str) -> None:
    """Raise if the weights of a bundle fit, but its network computes something else."""
    pairs = {name: (getattr(source.config, name), getattr(model.config, name)) for name in SAME_NETWORK}
    for name in ("mean", "std"):
        theirs, ours = (tuple(one.pretrained_cfg[name]) for one in (source, model))
        pairs[f"preprocessing's {name}"] = theirs, ours
    differing = [f"{name} {theirs}, not {ours}" for name, (theirs, ours) in pairs.items() if theirs != ours]
    if differing:
        raise UsageError(
            f"{bundle} is not of the recipe's network: it has {'; '.join(differing)}; give the same"
        )


def make_parallel(model: PooledClassifier, processes: Processes) -> nn.Module:
    """Wrap the model in DistributedDataParallel if there are several processes."""
    if processes.world_size == 1:
        return model
    return DistributedDataParallel(model, gradient_as_bucket_view=True)  # no second copy of the gradients


@contextlib.contextmanager
def own_state(processes: Processes, deterministic: bool) -> Iterator[None]:
    """Give training its own random numbers and deterministic mode; restore the caller's at the end.

    Args:
        processes: their device tells which generators to restore.
        deterministic: make torch refuse operations that may differ from run to run.
    """
    on_gpus = processes.device.type == "cuda" or torch.cuda.is_initialized()
    cublas, cudnn = os.environ.get(CUBLAS), torch.backends.cudnn.benchmark
    mode = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count() if on_gpus else 0)):
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
