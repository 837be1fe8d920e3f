"""Observe the pooling during training: eigenvalues before and after it, and the gradient.

A batch of validation images is evaluated with the weights of every epoch, including the initial weights.
Shape suffixes: B images, d channels of the covariance.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from covpool.data.decode import decode
from covpool.data.transforms import Preprocessing, evaluation_transform
from covpool.explain.diagnosis import medians, summed_up
from covpool.explain.evidence import watched_pooling
from covpool.functional import covariance, triu_unvec
from covpool.models.model import PooledClassifier
from covpool.processes import joined_processes
from covpool.storage.remote import trust_rows
from covpool.training.checkpoint import list_checkpoints, read_checkpoint
from covpool.training.network import make_model
from covpool.training.splits import open_data
from lab.bench.timing import MakeProgress, Schedule, Timing, silence, time_interleaved
from lab.reproduce.networks import Configuration, Scale

IMAGES = 64
# Pairs of eigenvalues (before, after) saved for the last epoch: as many as a figure can show.
PAIRS = 400
# Relative eigenvalues below this are rounding errors: features are float32.
ZERO = 1e-7


def observed(configuration: Configuration, scale: Scale, data: Path, runs: Path) -> list[dict[str, Any]]:
    """Return one dictionary per epoch of a finished run, starting with the initial weights."""
    recipe = configuration.recipe(scale, data, runs)
    with trust_rows():  # this program wrote the table, whose paths go through a link
        splits = open_data(recipe.data, recipe.seed)
    assert splits.val is not None
    with joined_processes("cpu") as processes:
        model = make_model(recipe, splits.train.classes, processes)
        transform = evaluation_transform(Preprocessing.of(model.pretrained_cfg))
        chosen = range(0, len(splits.val), max(len(splits.val) // IMAGES, 1))[:IMAGES]
        images = torch.stack([transform(decode(splits.val.read(i))) for i in chosen])
        labels = torch.tensor([splits.val.label(i) for i in chosen])
        epochs = [{"epoch": 0} | _look(model, images, labels)]
        for number, weights in _weights(Path(recipe.out)):
            model.load_state_dict(weights)
            epochs.append({"epoch": number} | _look(model, images, labels))
    return _last_pairs_only(epochs)


def _weights(run: Path) -> Iterator[tuple[int, Any]]:
    """Yield each epoch and its weights; skip checkpoints from the middle of an epoch."""
    with (run / "metrics.csv").open(encoding="utf-8", newline="") as lines:
        epochs = {int(row["step"]): int(row["epoch"]) for row in csv.DictReader(lines)}
    for path in list_checkpoints(run / "checkpoints"):
        checkpoint = read_checkpoint(path)
        if checkpoint.step in epochs:
            yield epochs[checkpoint.step], checkpoint.tensors["model"]


def _look(model: PooledClassifier, images: Tensor, labels: Tensor) -> dict[str, Any]:
    """Observe the pooling in training mode, as in a training step, and restore BatchNorm's statistics."""
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    with watched_pooling(model) as seen:
        loss = nn.functional.cross_entropy(model.train()(images), labels)
    (gradient,) = torch.autograd.grad(loss, seen.received)
    model.load_state_dict(kept)
    return {
        "loss": loss.item(),
        "gradient_rms": float(gradient.pow(2).mean().sqrt()),
        **_spectrum(seen.received.detach(), seen.given.detach()),
    }


def _spectrum(x_Bdn: Tensor, vector: Tensor) -> dict[str, Any]:
    """Return medians over images of the eigenvalues of the covariance and of the pooled matrix."""
    a_Bdd = covariance(x_Bdn.double())
    values, vectors = torch.linalg.eigh(a_Bdd)
    traces = values.sum(1, keepdim=True)
    before = values / traces
    result: dict[str, Any] = {"before": _medians(before), "after": None, "pairs": []}
    channels = a_Bdd.shape[-1]
    if vector.shape[1] == channels * (channels + 1) // 2:
        c_Bdd = triu_unvec(vector.double())
        after = (vectors * (c_Bdd @ vectors)).sum(1) / traces.sqrt()
        # In float32 a zero eigenvalue becomes a rounding error of either sign.
        zero = before <= ZERO
        result["after"] = _medians(after.masked_fill(zero, 0.0))
        before, after = before[~zero], after[~zero]
        pairs = torch.stack([before.flatten(), after.flatten()], 1)
        result["pairs"] = pairs[:: max(len(pairs) // PAIRS, 1)][:PAIRS].tolist()
    return result


def _medians(values: Tensor) -> dict[str, float | None]:
    return medians([summed_up(row) for row in values])


def _last_pairs_only(epochs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [epoch | {"pairs": []} for epoch in epochs[:-1]] + epochs[-1:]


SCHEDULE = Schedule(rounds=30, warmup=1)


def timed(
    configurations: Mapping[str, Configuration],
    scale: Scale,
    reference: str,
    progress: MakeProgress = silence,
) -> dict[str, Any]:
    """Return, by label, milliseconds per image and the ratio to the reference in the same round.

    Times are in float32, because bfloat16 speeds up some methods more than others.
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
        timings_of = {}
        for what, runs in (("both", both), ("forward", forward)):
            with progress(f"rounds of timing, {what}") as log:
                timings_of[what] = time_interleaved(
                    runs, reference=reference, schedule=SCHEDULE, seed=0, log=log
                )
    return {
        label: {what: _figures(timings[label], batch) for what, timings in timings_of.items()}
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
        "rounds": timing.ratio.count,
    }
