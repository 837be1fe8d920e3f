"""Log the numbers of a run: on the terminal, in log.jsonl, TensorBoard, Weights & Biases and MLflow."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from covpool.errors import UsageError
from covpool.models.model import PooledClassifier
from covpool.processes import Processes
from covpool.storage.files import read_text, replace_file
from covpool.storage.folders import make_folder
from covpool.terminal import Progress, counted
from covpool.training.metrics import METRICS
from covpool.training.recipe import Recipe
from covpool.training.run_folder import RunFolder
from covpool.training.step import Outcome

LOGGER = logging.getLogger("covpool")
# Log lines per epoch, at most.
LINES = 100
# The file with the run's name for trackers.
TRACKER_ID = "tracker_id.txt"


class Journal:
    """The log of a run. The first process writes it; the others write nothing.

    Args:
        recipe: the recipe of the run.
        processes: the processes that train together.
        folder: the folder of the run.
        cursor: the step at which training starts. Log lines beyond it are removed.
        batches: steps per epoch.
        epochs: the number of epochs.
    """

    def __init__(
        self, recipe: Recipe, processes: Processes, folder: RunFolder, cursor: int, batches: int, epochs: int
    ) -> None:
        self.recipe, self.folder, self.batches, self.epochs = recipe, folder, batches, epochs
        self.processes, self.is_first = processes, processes.is_first
        self.progress = Progress(silent=not processes.is_first)
        self.progress.begin(cursor)
        self._trackers: list[Tracker] = []
        self._cursor = cursor
        self._every = -(-batches // LINES)
        # The steps of the first stage, in which the backbone is frozen; 0 if there is only one stage.
        alone = recipe.schedule.head_epochs * batches if recipe.weights.freeze is None else 0
        self._head_steps = alone if alone < epochs * batches else 0
        if self._head_steps:
            self._start_stage(cursor)
        self._since, self._steps = time.monotonic(), 0
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Journal:
        self._exit.enter_context(self.progress)
        self.processes.by_first(self._open)
        return self

    def __exit__(self, *exception: object) -> None:
        self._exit.close()

    def begin(self, model: PooledClassifier, images: int) -> None:
        """Log the start of a run, or that it resumes."""
        config, each = model.config, self.processes.world_size
        parameters = sum(parameter.numel() for parameter in model.parameters())
        dim = f" of {config.dim} channels" if config.dim is not None else ""
        self.progress.line(
            f"{config.backbone}, {config.pool}{dim}: {parameters / 1e6:.1f}M parameters, "
            f"{counted(images, 'image')} of {counted(config.num_classes, 'class')}, "
            f"{counted(self.batches, 'step')} per epoch, "
            f"{counted(each, 'process')} on {self.processes.device.type}"
        )
        if alone := self._head_steps // self.batches:
            self.progress.line(f"stage 1 of 2: epochs 1 to {alone}, pooling and classifier; backbone frozen")
            self.progress.line(f"stage 2 of 2: epochs {alone + 1} to {self.epochs}, all layers, slower")
        if self._cursor:
            epoch, step = divmod(self._cursor, self.batches)
            self.progress.line(f"resuming from epoch {epoch + 1}, step {step:,}")
            self.event("resumed", step=self._cursor, processes=each)

    def start_epoch(self) -> None:
        """Start to measure the speed of an epoch, or of the rest of one."""
        self._since, self._steps = time.monotonic(), 0

    def step(self, cursor: int, outcome: Outcome, lr: float) -> None:
        """Log a step."""
        if not self.is_first:
            return
        self._steps += 1
        rate = self.recipe.batch_size * self._steps / max(time.monotonic() - self._since, 1e-9)
        epoch, step = divmod(cursor - 1, self.batches)
        if self._head_steps and cursor == self._head_steps + 1:
            self._start_stage(cursor)
        is_alone = cursor <= self._head_steps
        self.progress(
            cursor - (0 if is_alone else self._head_steps),
            self._head_steps if is_alone else self.epochs * self.batches - self._head_steps,
            f"epoch {epoch + 1}/{self.epochs}, step {step + 1:,} of {self.batches:,}",
            f"loss {outcome.loss:.3f}, top-1 {100 * outcome.top1:.1f} %, {rate:,.0f} images/s, lr {lr:.2g}",
        )
        if cursor % self._every and cursor % self.batches:
            return
        values = {
            "loss": outcome.loss,
            "top1": outcome.top1,
            "lr": lr,
            "gradient_norm": outcome.gradient_norm,
            "images_per_second": rate,
        }
        self._log({"step": cursor, "epoch": epoch + 1, **values})
        self._track({f"train/{name}": value for name, value in values.items()}, cursor)
        self.start_epoch()

    def _start_stage(self, cursor: int) -> None:
        """Measure the speed of a stage by itself: a step is slower once the backbone trains."""
        is_alone = cursor < self._head_steps
        self.progress.left = f"left in stage {1 if is_alone else 2} of 2"
        self.progress.begin(cursor - (0 if is_alone else self._head_steps))

    def event(self, what: str, **details: Any) -> None:
        """Log something that happened, such as a skipped step."""
        if self.is_first:
            self._log({"event": what, **details})

    def end_epoch(self, row: Mapping[str, Any], is_best: bool) -> None:
        """Log an epoch that is finished and validated."""
        if self.is_first:
            self._track({f"val/{name}": row[name] for name in ("loss", *METRICS) if name in row}, row["step"])
            self.progress.line(_epoch_line(row, self.epochs, is_best))

    def _open(self) -> None:
        self.folder.cut_log(self._cursor)
        values = dataclasses.asdict(self.recipe)
        self._trackers = make_trackers(self.recipe.trackers, self.folder, self._cursor, values)
        for tracker in self._trackers:
            self._exit.callback(_close, tracker)

    def _log(self, line: Mapping[str, Any]) -> None:
        with _warn_on_failure("the log"):
            self.folder.append_log(line)

    def _track(self, values: Mapping[str, float], step: int) -> None:
        for tracker in self._trackers:
            with _warn_on_failure(type(tracker).__name__):
                tracker.add(values, step)


class Tracker(Protocol):
    """A service that records numbers."""

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Record the numbers of a step."""

    def close(self) -> None:
        """Send the rest."""


def make_trackers(
    names: Sequence[str], folder: RunFolder, step: int, recipe: Mapping[str, Any]
) -> list[Tracker]:
    """Return the trackers of a recipe; a resumed run drops what came after ``step``."""
    make: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: _TensorBoard(folder.tensorboard, step),
        "wandb": lambda: _WeightsAndBiases(folder.path, recipe),
        "mlflow": lambda: _MLflow(folder.path, recipe),
    }
    return [make[name]() for name in names]


class _TensorBoard:
    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(make_folder(folder), purge_step=step + 1)
        self.close = self._writer.close

    def add(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)


class _WeightsAndBiases:
    def __init__(self, folder: Path, recipe: Mapping[str, Any]) -> None:
        self._run = _imported("wandb").init(
            dir=folder,
            project="covpool",
            name=folder.resolve().name,
            id=_identifier(folder),
            resume="allow",
            config=recipe,
        )
        self.close = self._run.finish

    def add(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)


class _MLflow:
    """MLflow's own variables, such as ``MLFLOW_TRACKING_URI``, choose the server and the experiment."""

    def __init__(self, folder: Path, recipe: Mapping[str, Any]) -> None:
        mlflow = self._mlflow = _imported("mlflow")
        runs = mlflow.search_runs(
            filter_string=f"tags.covpool = '{_identifier(folder)}'", output_format="list"
        )
        mlflow.start_run(runs[0].info.run_id if runs else None, run_name=folder.resolve().name)
        if not runs:
            mlflow.set_tag("covpool", _identifier(folder))
            mlflow.log_dict(dict(recipe), "recipe.json")
        self.close = mlflow.end_run

    def add(self, values: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(values), step=step)


def _identifier(folder: Path) -> str:
    """Return a random name for a run, the same when it is resumed or its folder is moved."""
    file = folder / TRACKER_ID
    if not file.exists():
        replace_file(file, secrets.token_hex(16).encode())
    return read_text(file, 100)


def _imported(name: str) -> Any:
    """Import a package whose extra has the same name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise UsageError(f"{name} is missing: pip install 'covpool[{name}]'") from error


def _close(tracker: Tracker) -> None:
    with _warn_on_failure(type(tracker).__name__):
        tracker.close()


@contextlib.contextmanager
def _warn_on_failure(what: str) -> Iterator[None]:
    """Warn, and let training continue, if a disk is full or a server does not answer."""
    try:
        yield
    except Exception as error:
        LOGGER.warning("%s failed: %s", what.lstrip("_"), error)


def _epoch_line(row: Mapping[str, Any], epochs: int, is_best: bool) -> str:
    text = f"epoch {row['epoch']}/{epochs}"
    if row["train_loss"] is None:
        text += "  every step was skipped"
    else:
        text += f"  train loss {row['train_loss']:.3f} top-1 {100 * row['train_top1']:.1f}"
    if "top1" in row:
        text += f"  val loss {row['loss']:.3f} top-1 {100 * row['top1']:.1f}"
        text += "  best so far" if is_best else ""
    return f"{text}  {row['images_per_second']:.0f} images/s"
