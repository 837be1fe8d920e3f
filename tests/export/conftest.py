from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from onnx import ModelProto

from covpool.export import ExportOptions
from covpool.export.exporting import ExportReport, Job, export_model, open_job, trace_model
from covpool.export.graph import Runner, Traced, to_onnx
from covpool.export.targets import TARGETS
from covpool.models import load_model, save_model
from tests.data.pictures import SPARROWS
from tests.evaluate.birds import a_bundle, some_sparrows

# With a fixed image size, tracing and converting take a third of the time.
OPTIONS = ExportOptions(formats=tuple(TARGETS), rounds=4, calibration=6, batch_size=4, free_size=False)
RECIPE = {"protocol": "by hand", "epochs": 3}


@dataclass(frozen=True)
class Prepared:
    """A small network, traced and converted once per session."""

    job: Job
    traced: Traced
    model: ModelProto


@pytest.fixture(scope="session")
def birds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not SPARROWS.is_dir():
        pytest.skip("the sparrows data set is missing")
    return some_sparrows(tmp_path_factory.mktemp("birds"), train=2, test=2)


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "bundle"
    return save_model(load_model(a_bundle(folder)), folder, recipe=RECIPE)


@pytest.fixture(scope="session")
def prepared(bundle: Path, birds: Path) -> Prepared:
    job = open_job(bundle, birds, OPTIONS)
    traced = trace_model(job)
    return Prepared(job, traced, to_onnx(traced))


def reuse(monkeypatch: pytest.MonkeyPatch, prepared: Prepared, model: ModelProto | None = None) -> None:
    """Export the prepared network, or another ONNX model in its place, without tracing it again."""
    monkeypatch.setattr("covpool.export.exporting.trace_model", lambda job: prepared.traced)
    monkeypatch.setattr("covpool.export.targets.to_onnx", lambda traced: model or prepared.model)


@pytest.fixture(scope="session")
def runners(exported: ExportReport) -> dict[str, Runner]:
    """The exported files, loaded once."""
    return {name: target.load(exported.folder / target.file) for name, target in TARGETS.items()}


@pytest.fixture(scope="session")
def exported(
    bundle: Path, birds: Path, prepared: Prepared, tmp_path_factory: pytest.TempPathFactory
) -> ExportReport:
    with pytest.MonkeyPatch.context() as monkeypatch:
        reuse(monkeypatch, prepared)
        return export_model(bundle, birds, tmp_path_factory.mktemp("exports") / "new", options=OPTIONS)
