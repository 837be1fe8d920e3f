"""Where the numbers of a run go besides its folder: TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from covpool.durable.replacing import replace_file
from covpool.train.run_folder import RunFolder

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
        raise ValueError(f"{name} is missing: pip install 'covpool[{name}]'") from error
