"""Ctrl-C in a real process: it exits with 130 and prints a command that resumes the work."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from covpool.cli.main import main
from tests.cli.test_mistakes import FEW
from tests.data.pictures import encode, photo
from tests.data.trees import write
from tests.evaluate.birds import a_bundle
from tests.forked import command, errors, send_when

GOES_ON = "stopped, and the work so far is saved; to resume: "


def interrupted(words: str, sign: str) -> tuple[str, str]:
    """Return the output and the errors of a process that gets Ctrl-C once a file matches ``sign``."""
    log = Path("log")
    process = command(*words.split()[1:], log=log)
    send_when(process, lambda: list(Path().glob(sign)), log, signal.SIGINT)
    assert process.exitcode == 130, errors(log)
    assert "Traceback" not in errors(log)
    return log.read_text(), errors(log)


def command_told(err: str) -> list[str]:
    """Return the arguments of the printed resume command."""
    _, _, command = err.splitlines()[-1].partition(GOES_ON)
    program, *words = shlex.split(command)
    assert program == "covpool"
    return words


def test_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    picture = encode(photo((48, 40)), "JPEG")
    for number in range(64):
        write(tmp_path / f"birds/{('jay', 'tit')[number % 2]}/{number}.jpg", picture)
    typed = f"covpool train birds {FEW} --epochs 2 --checkpoint-steps 1 --trackers []"
    out, err = interrupted(typed, "runs/train/checkpoints/step-*")
    assert out.startswith("stopped at step ")
    words = command_told(err)
    assert words == typed.split()[1:]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert "resuming from epoch" in captured.err
    assert "after 2 epochs" in captured.out


@pytest.mark.slow
def test_predict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    a_bundle(tmp_path / "bundle")
    picture = encode(photo((48, 40)), "JPEG")
    for number in range(400):
        write(tmp_path / f"photos/{number:03d}.jpg", picture)
    typed = "covpool predict bundle photos --workers 1 --format parquet --rows-per-file 8 --batch-size 8"
    _, err = interrupted(typed, "runs/predictions/*.parquet")
    words = command_told(err)
    kept = {path: path.stat().st_mtime_ns for path in Path("runs/predictions").glob("*.parquet")}
    assert 0 < len(kept) < 50
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("runs/predictions: 400 rows in 50 files")
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert sum(pq.read_metadata(path).num_rows for path in Path("runs/predictions").glob("*.parquet")) == 400
