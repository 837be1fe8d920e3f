"""The network of a recipe, as training needs it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

import torch
from timm.layers import convert_sync_batchnorm
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from covpool.data.randomness import number
from covpool.models.create import build_model
from covpool.models.model import PooledClassifier
from covpool.train.processes import Processes
from covpool.train.recipe import Recipe


def make_model(recipe: Recipe, classes: Sequence[str], processes: Processes) -> PooledClassifier:
    """The model on its device, with its first weights; the same in every process."""
    torch.manual_seed(number("weights", recipe.seed))
    model = build_model(
        dataclasses.replace(recipe.model, num_classes=len(classes)),
        pretrained=recipe.weights.pretrained,
        checkpoint_path=recipe.weights.path,
        key_map=recipe.weights.key_map,
    )
    model.classes = tuple(classes)
    if recipe.weights.freeze is not None:
        model.freeze(recipe.weights.freeze)
    if recipe.loop.sync_batchnorm:
        if processes.device.type != "cuda":
            raise ValueError("sync_batchnorm needs GPUs: torch has it for them alone")
        model = convert_sync_batchnorm(model)
    if recipe.loop.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's own way
    return model.to(processes.device).train()


def make_parallel(model: PooledClassifier, recipe: Recipe, processes: Processes) -> nn.Module:
    """What a step calls: the model in DistributedDataParallel, or as it is where one process trains."""
    if processes.world_size == 1:
        return model
    return DistributedDataParallel(
        model,
        # Otherwise buckets are made anew after the first step of a process. On three processes or more that
        # changes in which order gradients are added, and so a run that was resumed, in its last bits.
        find_unused_parameters=recipe.loop.deterministic,
        gradient_as_bucket_view=True,
    )


def make_deterministic() -> None:
    """Make torch refuse what may differ from run to run."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS refuses to be deterministic
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
