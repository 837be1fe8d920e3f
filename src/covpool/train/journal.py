"""Log the numbers of a run: CSV, TensorBoard, Weights & Biases, MLflow."""

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

from covpool.durable import replace_file
from covpool.errors import UsageError
from covpool.models.model import PooledClassifier
from covpool.processes import Processes
from covpool.train.metrics import NAMES
from covpool.train.progress import TrainingProgress
from covpool.train.recipe import Recipe
from covpool.train.run_folder import RunFolder
from covpool.train.step import Outcome
from covpool.wording import counted

# The run's name to trackers that ask for one.
TRACKER_ID = "tracker_id.txt"


class Tracker(Protocol):
    """What takes numbers."""

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Numbers of a step."""

    def close(self) -> None:
        """Send what was kept back."""


class TensorBoard:
    """Events in the run's folder, which ``tensorboard --logdir`` shows.

    Args:
        folder: for the events.
        step: what came after it in a run that is resumed is no more.
    """

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(folder, purge_step=step + 1)

    def add(self, values: Mapping[str, float], step: int) -> None:
        """One curve a number."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write the events."""
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases by the name of the folder; resumed where the run is."""

    def __init__(self, folder: Path, recipe: Mapping[str, Any]) -> None:
        self._run = _imported("wandb").init(
            dir=folder,
            project="covpool",
            name=folder.resolve().name,
            id=_identifier(folder),
            resume="allow",
            config=recipe,
        )

    def add(self, values: Mapping[str, float], step: int) -> None:
        """One curve a number."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Upload."""
        self._run.finish()


class MLflow:
    """A run of MLflow by the name of the folder; resumed where the run is.

    Where it goes, and to which experiment, is for MLflow's own variables, as ``MLFLOW_TRACKING_URI``.
    """

    def __init__(self, folder: Path, recipe: Mapping[str, Any]) -> None:
        mlflow = self._mlflow = _imported("mlflow")
        found = mlflow.search_runs(
            filter_string=f"tags.covpool = '{_identifier(folder)}'", output_format="list"
        )
        mlflow.start_run(found[0].info.run_id if found else None, run_name=folder.resolve().name)
        if not found:
            mlflow.set_tag("covpool", _identifier(folder))
            mlflow.log_dict(dict(recipe), "recipe.json")

    def add(self, values: Mapping[str, float], step: int) -> None:
        """One curve a number."""
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()


def make_trackers(
    names: Sequence[str], folder: RunFolder, step: int, recipe: Mapping[str, Any]
) -> list[Tracker]:
    """The trackers of a recipe, by name."""
    make: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoard(folder.tensorboard, step),
        "wandb": lambda: WeightsAndBiases(folder.path, recipe),
        "mlflow": lambda: MLflow(folder.path, recipe),
    }
    return [make[name]() for name in names]


def _identifier(folder: Path) -> str:
    """The same for a run that is resumed or moved, and for no other; of letters that any tracker takes.

    A run in a folder that was emptied, or of the same name on another machine, is another run.
    """
    file = folder / TRACKER_ID
    if not file.exists():
        replace_file(file, secrets.token_hex(16).encode())
    return file.read_text()


def _imported(name: str) -> Any:
    """A package that comes by an extra of its own name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise UsageError(f"{name} is missing: pip install 'covpool[{name}]'") from error


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
