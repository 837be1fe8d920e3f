from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from onnx import ModelProto

from covpool.export.exporting import ExportReport, export_model, trace_model
from covpool.export.formats import to_onnx
from covpool.export.graph import ExportGraph, Traced
from covpool.export.options import FORMATS, ExportOptions, Job, open_job
from covpool.models import load_model, save_model
from tests.data.pictures import SPARROWS
from tests.evaluate.birds import a_bundle, some_sparrows

OPTIONS = ExportOptions(formats=tuple(FORMATS), rounds=4, calibration=6, batch_size=4)
RECIPE = {"protocol": "by hand", "epochs": 3}


@dataclass(frozen=True)
class Prepared:
    """A small network in all of its forms: tracing takes long, so it is done once."""

    job: Job
    graph: ExportGraph
    traced: Traced
    model: ModelProto


@pytest.fixture(scope="session")
def birds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not SPARROWS.is_dir():
        pytest.skip("the sparrows are not beside the project")
    return some_sparrows(tmp_path_factory.mktemp("birds"), train=2, test=2)


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "bundle"
    return save_model(load_model(a_bundle(folder)), folder, recipe=RECIPE)


@pytest.fixture(scope="session")
def prepared(bundle: Path, birds: Path) -> Prepared:
    job = open_job(bundle, birds, OPTIONS)
    graph = ExportGraph(job.model, job.preprocessing)
    traced = trace_model(job, graph)
    return Prepared(job, graph, traced, to_onnx(traced))


def reuse(monkeypatch: pytest.MonkeyPatch, prepared: Prepared, model: ModelProto | None = None) -> None:
    """Export what is prepared, or another model in its place, instead of tracing anew."""
    monkeypatch.setattr("covpool.export.exporting.trace_model", lambda job, graph: prepared.traced)
    monkeypatch.setattr("covpool.export.formats.to_onnx", lambda traced: model or prepared.model)


@pytest.fixture(scope="session")
def exported(
    bundle: Path, birds: Path, prepared: Prepared, tmp_path_factory: pytest.TempPathFactory
) -> ExportReport:
    with pytest.MonkeyPatch.context() as monkeypatch:
        reuse(monkeypatch, prepared)
        return export_model(bundle, tmp_path_factory.mktemp("exports") / "new", data=birds, options=OPTIONS)
