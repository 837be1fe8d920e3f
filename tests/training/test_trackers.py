"""Trackers: curves continue when a run resumes.

Weights & Biases and MLflow keep state in their modules and warn when imported, so they run in separate
processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import covpool
from covpool.training.journal import make_trackers
from covpool.training.run_folder import RunFolder


def is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


needs_wandb = pytest.mark.skipif(not is_installed("wandb"), reason="wandb is an extra")
needs_mlflow = pytest.mark.skipif(not is_installed("mlflow"), reason="mlflow is an extra")

# A run that is interrupted and resumed from step 2.
RUN = """
import dataclasses, json, sys
from pathlib import Path
from covpool.training.recipe_files import read_recipe
from covpool.training.run_folder import RunFolder
from covpool.training.journal import make_trackers
recipe = dataclasses.asdict(read_recipe())
def live(name, begin, steps):
    [tracker] = make_trackers([name], RunFolder(Path(sys.argv[1])), begin, recipe)
    for step in steps:
        tracker.add({"train/loss": 1 / step, "train/lr": 0.1}, step)
    tracker.add({"val/top1": step / 10}, step)
    return tracker
"""
# The records that `wandb sync` would send.
WANDB = """
from wandb.proto.wandb_internal_pb2 import Record
from wandb.sdk.internal.datastore import DataStore
runs = []
for begin, steps in ((0, (1, 2, 3)), (2, (3, 4))):
    tracker = live("wandb", begin, steps)
    run = tracker._run
    runs.append({"id": run.id, "name": run.name, "seed": run.config["seed"], "rows": []})
    tracker.close()
    [file] = Path(run.dir).parent.glob("*.wandb")
    store = DataStore()
    store.open_for_scan(str(file))
    while data := store.scan_data():
        items = Record.FromString(data).history.item
        row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
        if row:
            runs[-1]["rows"].append([row["_step"], row["train/loss"], row.get("val/top1")])
print("told", json.dumps(runs))
"""
MLFLOW = """
import mlflow
for begin, steps in ((0, (1, 2, 3)), (2, (3, 4))):
    live("mlflow", begin, steps).close()
Path(sys.argv[1], "tracker_id.txt").unlink()  # the folder is emptied, and another run begins in it
live("mlflow", 0, (1,)).close()
client = mlflow.MlflowClient()
other, run = client.search_runs(["0"])  # the newest first
history = client.get_metric_history(run.info.run_id, "train/loss")
artifact = mlflow.artifacts.load_dict(f"{run.info.artifact_uri}/recipe.json")
print("told", json.dumps({
    "name": run.info.run_name,
    "status": run.info.status,
    "losses": sorted((metric.step, metric.value) for metric in history),
    "last": run.data.metrics["val/top1"],
    "batch_size": artifact["batch_size"],
    "other": other.data.metrics["val/top1"],
}))
"""


def told(script: str, folder: Path, **environment: str) -> Any:
    folder.mkdir(parents=True)
    paths = [str(Path(covpool.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    run = subprocess.run(
        [sys.executable, "-c", RUN + script, str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder.parent,
        env={**os.environ, **environment},
    )
    assert run.returncode == 0, run.stderr
    [line] = [line for line in run.stdout.splitlines() if line.startswith("told ")]
    return json.loads(line.removeprefix("told "))


# A typical folder name that is not an identifier.
NAME = "it's #1: birds, 50%?"


@pytest.mark.slow
@needs_wandb
def test_weights_and_biases(tmp_path: Path) -> None:
    first, second = told(WANDB, tmp_path / NAME, WANDB_MODE="offline", WANDB_SILENT="true")
    assert first["id"] == second["id"]
    assert (first["name"], first["seed"]) == (NAME, 0)
    assert first["rows"] == [[1, 1.0, None], [2, 0.5, None], [3, pytest.approx(1 / 3), 0.3]]
    assert second["rows"] == [[3, pytest.approx(1 / 3), None], [4, 0.25, 0.4]]


@pytest.mark.slow
@needs_mlflow
def test_mlflow(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/mlflow.db"
    found = told(MLFLOW, tmp_path / NAME, MLFLOW_TRACKING_URI=store)
    assert (found["name"], found["status"], found["last"]) == (NAME, "FINISHED", 0.4)
    assert found["losses"] == [[step, pytest.approx(1 / step)] for step in (1, 2, 3, 3, 4)]
    assert (found["batch_size"], found["other"]) == (64, 0.1)


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = RunFolder(tmp_path)
    for begin, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        [tracker] = make_trackers(["tensorboard"], folder, begin, {})
        for step in steps:
            tracker.add({"train/loss": begin + 1 / step}, step)
        tracker.close()
    events = EventAccumulator(str(folder.tensorboard)).Reload().Scalars("train/loss")
    # The steps of the first part after its checkpoint are gone.
    assert [(event.step, event.value) for event in events] == [
        (1, 1.0),
        (2, 0.5),
        (3, pytest.approx(2 + 1 / 3)),
        (4, 2.25),
    ]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_package_that_is_missing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=rf"^{name} is missing: pip install 'covpool\[{name}\]'$"):
        make_trackers([name], RunFolder(tmp_path), 0, {})
