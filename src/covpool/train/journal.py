"""What is told of training while it runs: the log, the metrics, the trackers and the bar on the terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from covpool.data.counts import counted
from covpool.models.model import PooledClassifier
from covpool.train.metrics import NAMES
from covpool.train.processes import Processes
from covpool.train.progress import TrainingProgress
from covpool.train.recipe import Recipe
from covpool.train.run_folder import RunFolder
from covpool.train.step import Outcome
from covpool.train.trackers import Tracker, make_trackers

LOGGER = logging.getLogger("covpool")
# Lines of the log in an epoch, at most.
LINES = 100


class Journal:
    """Of the first process; that of the others says nothing.

    Args:
        recipe: of the run.
        processes: that train together.
        folder: of the run.
        cursor: where training begins; what the log has beyond it is about to come again.
        batches: steps in an epoch.
        epochs: in all.
    """

    def __init__(
        self, recipe: Recipe, processes: Processes, folder: RunFolder, cursor: int, batches: int, epochs: int
    ) -> None:
        self.recipe, self.folder, self.batches, self.epochs = recipe, folder, batches, epochs
        self.processes, self.is_first = processes, processes.is_first
        self.progress = TrainingProgress(processes.rank)
        self._trackers: list[Tracker] = []
        self._cursor = cursor
        self._every = -(-batches // LINES)
        self._since = time.monotonic()
        self._steps = 0
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Journal:
        self._exit.enter_context(self.progress)
        self.processes.by_first(self._open)
        return self

    def _open(self) -> None:
        self.folder.cut_log(self._cursor)
        values = dataclasses.asdict(self.recipe)
        self._trackers = make_trackers(self.recipe.trackers, self.folder, self._cursor, values)
        for tracker in self._trackers:
            self._exit.callback(_close, tracker)

    def __exit__(self, *exception: object) -> None:
        self._exit.close()

    def begin(self, model: PooledClassifier, images: int) -> None:
        """Training begins, or goes on."""
        config, each = model.config, self.processes.world_size
        parameters = sum(parameter.numel() for parameter in model.parameters())
        dim = f" of {config.dim} channels" if config.dim is not None else ""
        self.progress.line(
            f"{config.backbone}, {config.pool}{dim}: {parameters / 1e6:.1f}M parameters, "
            f"{counted(images, 'image')} of {counted(config.num_classes, 'class')}, "
            f"{counted(self.batches, 'step')} an epoch, "
            f"{counted(each, 'process')} on {self.processes.device.type}"
        )
        if self._cursor:
            epoch, step = divmod(self._cursor, self.batches)
            self.progress.line(f"going on from epoch {epoch + 1}, step {step:,}")
            self.event("resumed", step=self._cursor, processes=each)

    def start_epoch(self, epoch: int, done: int) -> None:
        """An epoch begins, or goes on after some steps."""
        self.progress.start(epoch, self.epochs, self.batches, done)
        self._since, self._steps = time.monotonic(), 0

    def step(self, cursor: int, outcome: Outcome, lr: float) -> None:
        """A step is done."""
        if not self.is_first:
            return
        self._steps += 1
        rate = self.recipe.batch_size * self._steps / max(time.monotonic() - self._since, 1e-9)
        self.progress.step(outcome.loss, outcome.top1, rate, lr)
        if cursor % self._every and cursor % self.batches:
            return
        values = {
            "loss": outcome.loss,
            "top1": outcome.top1,
            "lr": lr,
            "gradient_norm": outcome.gradient_norm,
            "images_per_second": rate,
        }
        self._log({"step": cursor, "epoch": (cursor - 1) // self.batches + 1, **values})
        self._track({f"train/{name}": value for name, value in values.items()}, cursor)
        self._since, self._steps = time.monotonic(), 0

    def event(self, what: str, **details: Any) -> None:
        """Something happened that someone may want to know later."""
        if self.is_first:
            self._log({"event": what, **details})

    def end_epoch(self, history: Sequence[Mapping[str, Any]], is_best: bool) -> None:
        """An epoch is done and validated."""
        if not self.is_first:
            return
        row = history[-1]
        self._track({f"val/{name}": row[name] for name in NAMES if name in row}, row["step"])
        self.progress.line(_epoch_line(row, self.epochs, is_best))

    def _log(self, line: Mapping[str, Any]) -> None:
        with _not_worth_a_run("the log"):
            self.folder.append_log(line)

    def _track(self, values: Mapping[str, float], step: int) -> None:
        for tracker in self._trackers:
            with _not_worth_a_run(type(tracker).__name__):
                tracker.add(values, step)


def _close(tracker: Tracker) -> None:
    with _not_worth_a_run(type(tracker).__name__):
        tracker.close()


@contextlib.contextmanager
def _not_worth_a_run(what: str) -> Iterator[None]:
    """A full disk or a server that is gone costs a line, not the training; a checkpoint will tell."""
    try:
        yield
    except Exception as error:
        LOGGER.warning("%s takes nothing: %s", what, error)


def _epoch_line(row: Mapping[str, Any], epochs: int, is_best: bool) -> str:
    told = f"epoch {row['epoch']}/{epochs}"
    if row["train_loss"] is None:
        told += "  every step was skipped"
    else:
        told += f"  train loss {row['train_loss']:.3f} top-1 {100 * row['train_top1']:.1f}"
    if "top1" in row:
        told += f"  val loss {row['loss']:.3f} top-1 {100 * row['top1']:.1f}"
        told += "  best so far" if is_best else ""
    return f"{told}  {row['images_per_second']:.0f} images/s"
