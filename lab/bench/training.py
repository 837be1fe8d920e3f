"""Benchmark the training loop: its overhead, shards against folders, two processes against one.

    python -m lab training IMAGES    # images with a train split; writes a JSON under results/

It measures three ratios of medians, each from alternating runs:

- the training loop against a bare loop of forward, backward and step;
- reading shards against reading the same images from a folder;
- two processes of one thread each against one process.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from covpool.data.image_set import ImageSet
from covpool.data.loader import Batch, TrainingLoader
from covpool.data.order import FolderOrder, ShardOrder
from covpool.data.shards.reader import open_shards
from covpool.data.shards.write import write_shards
from covpool.data.sources import open_images
from covpool.data.transforms import Augmentation, Preprocessing, training_transform
from covpool.processes import Processes
from covpool.training.network import make_model
from covpool.training.recipe import Recipe
from covpool.training.recipe_files import read_recipe
from covpool.training.step import Learner, Objective
from lab.bench.steps import from_two_processes
from lab.record import RESULTS, new_record, record_file, write_record

CLASSES, SIDE = 10, 96
# A step takes about half a second on two cores; the training loop adds milliseconds.
PACKAGES = ("functional", "nn", "models", "data", "training", "lab/bench")
RECIPE: dict[str, Any] = {
    "model.backbone": "resnet18",
    "model.dim": 64,
    "model.image_size": SIDE,
    "batch_size": 32,
    "optimizer.name": "sgd",
    "loss.mixup": 0.0,
    "loop.ema": None,
}


def loop_against_bare(rounds: int) -> dict[str, Any]:
    """Compare the speed of the training loop with that of a bare loop, on batches in memory."""
    processes = Processes(0, 1, torch.device("cpu"))
    recipe = read_recipe(None, RECIPE)
    batch = _batch(recipe.batch_size)
    learner = _learner(recipe, processes)
    model = make_model(recipe, [str(i) for i in range(CLASSES)], processes)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4)

    def bare() -> None:
        loss = F.cross_entropy(model(batch.images), batch.labels, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    seconds = _in_turns({"loop": lambda: learner.step(batch, 0), "bare": bare}, rounds)
    return {"ratio": seconds["bare"] / seconds["loop"], "seconds": seconds, "rounds": rounds}


def shards_against_folder(images: ImageSet, rounds: int) -> dict[str, Any]:
    """Compare the speed of reading shards with that of reading files: bytes alone, and batches."""
    with tempfile.TemporaryDirectory() as folder:
        index = write_shards(images, Path(folder) / "shards", shard_bytes=4_000_000, seed=0)
        shards = open_shards(Path(folder) / "shards")
        orders = FolderOrder(len(images), 32, 0), ShardOrder(index.counts, 32, 0, window=4)
        files, tars = _epochs(images, orders[0]), _epochs(shards, orders[1])
        seconds = _in_turns(
            {
                "shards": lambda: _read(shards, orders[1]),
                "folder": lambda: _read(images, orders[0]),
                "batches of shards": lambda: next(tars),
                "batches of the folder": lambda: next(files),
            },
            rounds,
        )
    return {
        "ratio": seconds["folder"] / seconds["shards"],
        "ratio of batches": seconds["batches of the folder"] / seconds["batches of shards"],
        "seconds": seconds,
        "rounds": rounds,
    }


def two_processes_against_one(rounds: int) -> dict[str, Any]:
    """Compare the speed of two processes with that of one; each process has one thread."""
    (seconds,) = from_two_processes(_alone_and_together, rounds)
    return {"ratio": seconds["one"] / seconds["two"], "seconds": seconds, "rounds": rounds}


def _alone_and_together(both: Processes, rounds: int) -> Iterator[dict[str, float]]:
    """Yield the median seconds per step of one process while the other waits, and of both, in turns."""
    recipe = read_recipe(None, RECIPE)
    whole, half = _batch(recipe.batch_size), _batch(recipe.batch_size // 2)
    alone = _learner(recipe, Processes(0, 1, torch.device("cpu")))
    together = _learner(recipe, both)
    seconds: dict[str, list[float]] = {"one": [], "two": []}
    for _ in range(rounds + 1):  # the first round is a warm-up
        torch.distributed.barrier()
        if both.is_first:
            seconds["one"].append(_seconds(lambda: alone.step(whole, 0)))
        torch.distributed.barrier()
        seconds["two"].append(_seconds(lambda: together.step(half, 0)))
    if both.is_first:
        yield {name: statistics.median(times[1:]) for name, times in seconds.items()}


def _learner(recipe: Recipe, processes: Processes) -> Learner:
    model = make_model(recipe, [str(i) for i in range(CLASSES)], processes)
    return Learner(model, recipe, processes, Objective(recipe.loss), batches=1000)


def _batch(size: int) -> Batch:
    return Batch(torch.randn(size, 3, SIDE, SIDE), torch.arange(size) % CLASSES, torch.arange(size), ())


def _read(images: ImageSet, order: FolderOrder | ShardOrder) -> int:
    """Read an epoch in the order of training, and return the number of bytes."""
    ids = (i for step in range(order.batches(0)) for i in order.batch(0, step).tolist())
    return sum(len(images.read(i)) for i in ids)


def _epochs(images: ImageSet, order: FolderOrder | ShardOrder) -> Iterator[int]:
    """Load one epoch for each value of the iterator."""
    loader = TrainingLoader(images, order, training_transform(Preprocessing(64), Augmentation()))
    cursor = 0
    while True:
        cursor += sum(1 for _ in loader.from_cursor(cursor))
        yield cursor


def _in_turns(what: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Call the functions in turns, and return the median seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in what}
    for _ in range(rounds + 1):  # the first round is a warm-up
        for name, act in what.items():
            seconds[name].append(_seconds(act))
    return {name: statistics.median(times[1:]) for name, times in seconds.items()}


def _seconds(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def main(images: Path, out: Path = RESULTS, rounds: int = 15) -> None:
    """Measure the overhead of the training loop, shards against folders, and two processes against one.

    Args:
        images: folder or shards of images with a train split.
        out: results folder.
        rounds: number of rounds; reading uses a third of them, and at least 3.
    """
    record = new_record("training", PACKAGES, {"rounds": rounds}) | {
        "recipe": RECIPE,
        "loop_over_bare": loop_against_bare(rounds),
        "shards_over_folder": shards_against_folder(open_images(images, "train"), max(rounds // 3, 3)),
        "two_processes_over_one": two_processes_against_one(rounds),
    }
    path = record_file(record, out)
    write_record(path, record)
    print(path)
