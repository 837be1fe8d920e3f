"""``covpool retrieve``: its table, and a missing faiss."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields
from pathlib import Path

import pytest

from covpool.cli import retrieve as verb
from covpool.cli.main import main
from covpool.evaluate import retrieval
from tests.data.pictures import needs_sparrows
from tests.evaluate.birds import a_bundle, some_sparrows


def test_options_are_those_of_the_library() -> None:
    parameters = inspect.signature(retrieval.retrieve).parameters
    for field in fields(verb.Arguments):
        if field.name not in ("bundle", "data", "out"):
            assert field.default == parameters[field.name].default, field.name


@needs_sparrows
def test_as_a_person_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    some_sparrows(Path("birds"), train=1, test=2)
    a_bundle(Path("bundle"))
    words = ["retrieve", "bundle", "birds", "--workers", "0", "--gallery", "train", "--at", "[1, 6]"]
    assert main([*words, "--out", "found"]) == 0
    out, err = capsys.readouterr()
    assert not err
    metrics = json.loads(Path("found/results.json").read_text())["metrics"]
    assert out.splitlines() == [
        "12 images of test searched for their class among 6 images of train",
        "",
        "                    %",
        f"recall at 1    {100 * metrics['recall']['1']:6.1f}",
        "recall at 6     100.0",
        f"mAP            {100 * metrics['map']:6.1f}",
        f"mAP at R       {100 * metrics['map_at_r']:6.1f}",
        "",
        "results: found/results.json",
    ]


def test_a_missing_faiss_is_told_before_the_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(retrieval, "find_spec", lambda name: None)
    assert main(["retrieve", "bundle", "birds", "--engine", "faiss"]) == 2
    assert capsys.readouterr().err == (
        "covpool retrieve: --engine faiss needs faiss: pip install 'covpool[faiss]'\n"
    )
