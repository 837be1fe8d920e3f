"""``covpool export``: table, JSON and error messages."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from covpool.cli.export import Exported, text
from covpool.cli.main import main
from covpool.export import ExportOptions, exporting
from covpool.export.exporting import Job
from covpool.export.graph import Traced
from tests.data.pictures import needs_sparrows
from tests.evaluate.birds import CLASSES, a_bundle, some_sparrows


@pytest.mark.slow
@needs_sparrows
def test_as_a_person_runs_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle, data = str(a_bundle(tmp_path / "net")), str(some_sparrows(tmp_path / "birds", train=1, test=2))
    out = tmp_path / "new"
    words = ["export", bundle, data, "--out", str(out), "--formats", "torch", "--rounds", "2"]
    assert main([*words, "--free-size", "false", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["results"] == json.loads((out / "results.json").read_text())
    lines = text(Exported(**found)).splitlines()
    assert lines[0] == f"12 images of the test split, {len(CLASSES)} classes"
    assert lines[2].split() == ["same", "class", "largest", "difference", "MB", "p50,", "ms", "p99,", "ms"]
    assert lines[3].split()[:3] == ["model.pt2", "100.00", "%"]
    assert lines[4].startswith("torch eager")
    assert lines[6] == "the files accept any number of images, of 64 pixels"
    assert lines[7].endswith("p50 and p99: one image per call, 1 thread")
    assert lines[-1] == f"files and results: {out}"


@pytest.mark.slow
@needs_sparrows
def test_a_refusal_is_a_sentence_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exported graph has different weights from the bundle."""
    original = exporting.trace_model

    def broken(job: Job) -> Traced:
        weight = job.model.head.classifier.weight
        traced = original(job)
        traced.program.state_dict["model.head.classifier.weight"] = nn.Parameter(-weight.detach())
        return traced

    monkeypatch.setattr(exporting, "trace_model", broken)
    bundle, data = str(a_bundle(tmp_path / "net")), str(some_sparrows(tmp_path / "birds", train=1, test=2))
    words = ["export", bundle, data, "--out", str(tmp_path / "new"), "--formats", "torch"]
    words += ["--rounds", "2", "--free-size", "false"]
    assert main(words) == 2
    out, error = capsys.readouterr()
    assert out == ""
    *_, sentence = error.splitlines()  # after lines of progress
    assert sentence.startswith("covpool export: model.pt2 predicts torch's top-1 class on ")
    assert sentence.endswith("No file was written; --force true writes the files anyway.")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["birds", "net"]
    assert main([*words, "--force", "true"]) == 0
    assert "kept despite: model.pt2 predicts torch's top-1 class on" in capsys.readouterr().out
    assert (tmp_path / "new" / "model.pt2").exists()


def test_the_default_folder_and_the_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []
    for folder in ("net", "birds"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path)

    def export_model(bundle: Path, data: str, out: Path, *, options: ExportOptions, **_: object) -> Any:
        limits.append(options.limit)
        return SimpleNamespace(folder=out, results={})

    monkeypatch.setattr("covpool.export.export_model", export_model)
    assert main(["export", "net", "birds", "--limit", "9", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"folder": "runs/export", "results": {}}
    assert limits == [9]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--out", "new"], "the following arguments are required: data"),
        (["birds", "--out", "new", "--formats", "onnx,coreml"], "formats must be one of"),
    ],
)
def test_mistakes(
    words: list[str],
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bundle = a_bundle(tmp_path / "net")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "birds").mkdir()
    assert main(["export", str(bundle), *words]) == 2
    assert sentence in capsys.readouterr().err
