"""``covpool eval`` and ``covpool retrieve``: tables, JSON and error messages."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from covpool.cli.main import command_of, main
from covpool.evaluate import accuracy, retrieval
from tests.data.pictures import needs_sparrows
from tests.evaluate.birds import CLASSES, a_bundle, draw_nothing, some_sparrows


@pytest.mark.parametrize(
    ("name", "function"), [("eval", accuracy.measure_accuracy), ("retrieve", retrieval.retrieve)]
)
def test_defaults_are_those_of_the_library(name: str, function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters
    verb: Any = command_of(name)
    options = [option for kind in (verb.Arguments, *verb.OPTIONS) for option in fields(kind)]
    of_galleries = {"images"} if name == "retrieve" else set()  # of a gallery of covpool embed
    assert {option.name for option in options} - of_galleries == parameters.keys() - {"progress"}
    for option in options:
        if option.name not in ("bundle", "data", "out", *of_galleries):
            assert option.default == parameters[option.name].default, option.name


@needs_sparrows
def test_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    some_sparrows(Path("birds"), train=1, test=3)
    bad = sorted(Path("birds/test", CLASSES[0]).iterdir())[0]
    bad.write_bytes(b"no image")
    a_bundle(Path("bundle"))
    assert main(["eval", "bundle", "birds", "--workers", "0"]) == 0
    out, err = capsys.readouterr()
    assert not err
    results = json.loads(Path("runs/evaluation/results.json").read_text())
    low, high = (f"{100 * end:5.1f}" for end in results["intervals"]["top1"])
    lines = out.splitlines()
    assert lines[0] == "17 images of test, 6 classes"
    assert f"top-1                     {100 * results['metrics']['top1']:6.1f}   {low} to {high}" in lines
    assert lines[-2:] == [
        "unreadable images: 1, left out; see runs/evaluation/bad_images.csv",
        "results: runs/evaluation/results.json",
    ]
    assert Path("runs/evaluation/confusion.png").read_bytes().startswith(b"\x89PNG")
    draw_nothing(monkeypatch)
    assert main(["eval", "bundle", "birds", "--workers", "0", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["folder"] == "runs/evaluation"
    assert again["results"]["metrics"] == results["metrics"]
    assert again["results"]["intervals"] == results["intervals"]
    bad.unlink()
    assert main(["eval", "bundle", "birds/test", "--workers", "0"]) == 0  # a folder of classes without splits
    assert capsys.readouterr().out.startswith("17 images of train, 6 classes\n")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["none", "birds"], "bundle 'none': there is no such folder"),
        (["bundle", "none"], "none: No such file or directory"),
        (["bundle", "birds", "--out", "bundle"], "bundle holds other files: use a new --out"),
        (["bundle", "birds"], "birds has 1 class that the bundle does not know, first 'crow'"),
    ],
)
def test_mistakes_of_eval(
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


@needs_sparrows
def test_retrieve(
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
    assert Path("found/neighbours.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_faiss_is_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(retrieval, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    for folder in ("bundle", "birds"):
        (tmp_path / folder).mkdir()
    assert main(["retrieve", "bundle", "birds", "--engine", "faiss"]) == 2
    assert capsys.readouterr().err == (
        "covpool retrieve: --engine faiss needs faiss: pip install 'covpool[faiss]'\n"
    )
