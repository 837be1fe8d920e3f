"""Milliseconds an image of whole networks, forward and backward and forward alone, taken in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from covpool.bench.timing import MakeProgress, Schedule, Timing, silence, time_interleaved
from covpool.models.model import PooledClassifier
from covpool.processes import joined_processes
from covpool.reproduce.miniature.configuration import Configuration, Scale
from covpool.train.network import make_model

SCHEDULE = Schedule(rounds=7, warmup=1, slow_rounds=5)


def timed(
    configurations: Mapping[str, Configuration],
    scale: Scale,
    reference: str,
    progress: MakeProgress = silence,
) -> dict[str, Any]:
    """By label: milliseconds an image, and times those of the reference in the same round.

    In float32: what rivals cost is not to depend on what bfloat16 speeds up.
    """
    batch = scale.timed
    both, forward = {}, {}
    with joined_processes("cpu") as processes:
        for label, configuration in configurations.items():
            recipe = configuration.recipe(scale, Path(), Path())
            model = make_model(recipe, [str(i) for i in range(scale.classes)], processes)
            size = model.pretrained_cfg["input_size"][-1]
            images = torch.randn(batch, 3, size, size).to(memory_format=torch.channels_last)
            both[label], forward[label] = _step(model, images), _value(model, images)
        found = {}
        for what, runs in (("both", both), ("forward", forward)):
            with progress(f"rounds of timing, {what}") as tell:
                found[what] = time_interleaved(
                    runs, reference=reference, schedule=SCHEDULE, seed=0, tell=tell
                )
    return {
        label: {what: _figures(timings[label], batch) for what, timings in found.items()}
        for label in configurations
    }


def _step(model: PooledClassifier, images: torch.Tensor) -> Callable[[], object]:
    labels = torch.arange(len(images)) % model.num_classes

    def run() -> None:
        model.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(images), labels).backward()

    return run


def _value(model: PooledClassifier, images: torch.Tensor) -> Callable[[], object]:
    @torch.no_grad()
    def run() -> None:
        model(images)

    return run


def _figures(timing: Timing, batch: int) -> dict[str, Any]:
    seconds = asdict(timing.seconds)
    return {
        "milliseconds": {key: 1e3 * seconds[key] / batch for key in ("median", "q1", "q3")},
        "ratio": {key: asdict(timing.ratio)[key] for key in ("median", "q1", "q3")},
    }
