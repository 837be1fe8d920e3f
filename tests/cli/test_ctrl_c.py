"""Ctrl-C, to a real process: it leaves with 130, says the command that goes on, and that command does."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from covpool.cli.main import main
from tests.cli.test_mistakes import FEW
from tests.data.pictures import encode, photo
from tests.data.trees import write
from tests.evaluate.birds import a_bundle

GOES_ON = "stopped, and the work so far is saved; to resume: "


def interrupted(command: str, sign: str) -> tuple[str, str]:
    """What a process printed that got Ctrl-C as soon as a file was there, of its output and of its errors."""
    process = subprocess.Popen(
        [sys.executable, "-m", *command.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # What runs in the background of a shell has Ctrl-C ignored, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        give_up = time.monotonic() + 240
        while not list(Path().glob(sign)):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < give_up, "it did not begin"
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    return out, err


def command_told(err: str) -> list[str]:
    """The words of the command that goes on, after the name of the program."""
    _, _, command = err.splitlines()[-1].partition(GOES_ON)
    program, *words = shlex.split(command)
    assert program == "covpool"
    return words


def test_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    picture = encode(photo((48, 40)), "JPEG")
    for number in range(64):
        write(tmp_path / f"birds/{('jay', 'tit')[number % 2]}/{number}.jpg", picture)
    command = f"covpool train --data birds {FEW} --epochs 2 --checkpoint-steps 1 --trackers []"
    out, err = interrupted(command, "run/checkpoints/step-*")
    assert out.startswith("stopped at step ")
    words = command_told(err)
    assert words == command.split()[1:]
    assert main(words) == 0
    told = capsys.readouterr()
    assert "resuming from epoch" in told.err
    assert "after 2 epochs" in told.out


@pytest.mark.slow
def test_predict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    a_bundle(tmp_path / "bundle")
    picture = encode(photo((48, 40)), "JPEG")
    for number in range(400):
        write(tmp_path / f"photos/{number:03d}.jpg", picture)
    command = "covpool predict bundle photos --workers 1 --rows-per-file 8 --batch-size 8"
    _, err = interrupted(command, "predictions/*.parquet")
    words = command_told(err)
    kept = {path: path.stat().st_mtime_ns for path in Path("predictions").glob("*.parquet")}
    assert 0 < len(kept) < 50
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("predictions: 400 rows in 50 files")
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert sum(pq.read_metadata(path).num_rows for path in Path("predictions").glob("*.parquet")) == 400
