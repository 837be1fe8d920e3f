"""``covpool svm``: table, JSON and error messages."""

from __future__ import annotations

import inspect
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from covpool.cli.heads import SvmArguments
from covpool.cli.main import main
from covpool.evaluate.svm import Passing, fit_svm
from covpool.models.bundle import load_model
from tests.data.pictures import needs_sparrows
from tests.evaluate.svm.samples import a_bundle, some_sparrows


def test_defaults_are_those_of_the_library() -> None:
    example, passing = SvmArguments(Path("net"), "set"), Passing()
    parameters = inspect.signature(fit_svm).parameters
    for name in ("split", "layout", "features", "c", "calibrate", "max_memory"):
        assert getattr(example, name) == parameters[name].default, name
    for name in ("batch_size", "workers", "precision", "device"):
        assert getattr(example, name) == getattr(passing, name), name


@needs_sparrows
def test_as_a_person_runs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bundle, data = str(a_bundle(tmp_path / "net")), str(some_sparrows(tmp_path / "data"))
    out = "runs/svm"
    assert main(["svm", bundle, data]) == 0
    captured = capsys.readouterr()
    first, own, svm, images, _, solved, saved = captured.out.splitlines()
    assert first.split() == ["top-1,", "%", "image", "image", "and", "flip"]
    assert own.startswith("own classifier")
    assert images == "on 18 test images; 0 unreadable"
    assert solved.startswith("3 SVMs on 36 rows of 36 values, with LinearSVC in ")
    assert saved == f"saved in {out}; you can delete the cached features in {out}.features"
    assert captured.err.splitlines()[0] == f"features take 5.18 kB in {out}.features"
    assert load_model(out).config.normalize == "l2"
    assert main(["svm", bundle, data, "--json", "--quiet"]) == 0
    quiet = capsys.readouterr()
    assert not quiet.err
    accuracy = json.loads(quiet.out)["accuracy"]
    assert f"{100 * accuracy['svm_flip']:.2f}" == svm.split()[-1]


def no_gpu(folder: Path) -> list[tuple[list[str], str]]:
    words = ["--out", str(folder / "new"), "--device", "cuda"]
    return (
        []
        if torch.cuda.is_available()
        else [(words, "--device is cuda, but torch sees no GPU here: pass cpu")]
    )


@pytest.mark.slow
def test_two_processes_are_refused(tmp_path: Path) -> None:
    for name in ("net", "set"):
        (tmp_path / name).mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "covpool", "svm", "net", "set", "--out", "new", "--device", "cpu"]
    both = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env={**os.environ, **group, "RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    errors = [process.communicate(timeout=300)[1] for process in both]
    sentence = "covpool svm: covpool svm uses one process: start it without torchrun"
    assert errors[0].splitlines()[-1] == sentence
    assert sentence not in errors[1], "the first tells it for both"
    assert [process.returncode for process in both] == [2, 2]


@needs_sparrows
def test_mistakes_are_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle, data = str(a_bundle(tmp_path / "net")), str(some_sparrows(tmp_path / "data"))
    for words, sentence in (
        (["--out", bundle], f"{bundle} is the input bundle: use another --out"),
        (
            ["--out", f"{data}/new"],
            "files of the new bundle would go into the images themselves, "
            f"as {data}/new is in {data}: give --out",
        ),
        (["--out", str(tmp_path / "new"), "--c", "0"], "--c must be above 0; got 0.0"),
        *no_gpu(tmp_path),
    ):
        assert main(["svm", bundle, data, *words]) == 2
        assert capsys.readouterr().err.splitlines()[-1] == f"covpool svm: {sentence}"
