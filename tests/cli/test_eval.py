"""``covpool eval``: its table, its JSON, and what it says of mistakes."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields
from pathlib import Path

import pytest

from covpool.cli import eval as verb
from covpool.cli.main import main
from covpool.evaluate.accuracy import evaluate
from tests.data.pictures import needs_sparrows
from tests.evaluate.birds import CLASSES, a_bundle, some_sparrows


def test_options_are_those_of_the_library() -> None:
    parameters = inspect.signature(evaluate).parameters
    for field in fields(verb.Arguments):
        if field.name not in ("bundle", "data", "out"):
            assert field.default == parameters[field.name].default, field.name


@needs_sparrows
def test_as_a_person_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    some_sparrows(Path("birds"), train=1, test=3)
    bad = sorted(Path("birds/test", CLASSES[0]).iterdir())[0]
    bad.write_bytes(b"no image")
    a_bundle(Path("bundle"))
    assert main(["eval", "bundle", "birds", "--workers", "0"]) == 0
    out, err = capsys.readouterr()
    assert not err
    results = json.loads(Path("evaluation/results.json").read_text())
    low, high = (f"{100 * end:5.1f}" for end in results["intervals"]["top1"])
    lines = out.splitlines()
    assert lines[0] == "17 images of test, 6 classes"
    assert f"top-1                     {100 * results['metrics']['top1']:6.1f}   {low} to {high}" in lines
    assert lines[-2:] == [
        "bad images: 1, left out; evaluation/bad_images.csv says why",
        "results: evaluation/results.json",
    ]
    assert main(["eval", "bundle", "birds", "--workers", "0", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["folder"] == "evaluation"
    assert again["results"]["metrics"] == results["metrics"]
    assert again["results"]["intervals"] == results["intervals"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["none", "birds"], "bundle 'none': there is no such folder"),
        (["bundle", "none"], "none: No such file or directory"),
        (["bundle", "birds", "--out", "bundle"], "bundle holds other things: give a new --out"),
        (["bundle", "birds"], "birds has 1 class that the bundle does not know, first 'crow'"),
    ],
)
def test_mistakes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("birds/test/crow").mkdir(parents=True)
    Path("birds/test/crow/a.jpg").write_bytes(b"no image")
    a_bundle(Path("bundle"))
    assert main(["eval", *words]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(f"covpool eval: {sentence}")
    assert err.count("\n") == 1
