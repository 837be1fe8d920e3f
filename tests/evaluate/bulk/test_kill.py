"""Jobs that are killed and started again give the rows of a job that was not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from covpool.inference import Files, Predict, Running, infer
from tests.evaluate.bulk.small import hidden, ids, rows_of, write_links

DEADLINE = 600


def start(bundle: Path, data: Path, out: Path, rows_per_file: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "covpool", "predict", bundle, data, "--out", out, "--workers", "1"]
    command += ["--rows-per-file", str(rows_per_file), "--top", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(log(out), "wb") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=file)


def log(out: Path) -> Path:
    return out.with_suffix(".log")


def files(out: Path) -> set[str]:
    return {path.name for path in out.glob("*.parquet")}


def kill_after(process: subprocess.Popen[bytes], out: Path, new: int) -> None:
    """Kill it once it has written so many new files. Its worker is left to find out by itself."""
    before, deadline = files(out), time.monotonic() + DEADLINE
    while len(files(out) - before) < new:
        assert process.poll() is None, log(out).read_text()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("count", "rows_per_file", "moments"),
    [(600, 20, (1, 5, 3)), pytest.param(20_000, 256, (1, 30, 20), marks=pytest.mark.slow)],
    ids=["600", "20000"],
)
def test_three_kills(
    tmp_path: Path, bundle: Path, count: int, rows_per_file: int, moments: tuple[int, ...]
) -> None:
    data, out = write_links(tmp_path / "data", count), tmp_path / "out"
    written: set[str] = set()
    for new in moments:
        process = start(bundle, data, out, rows_per_file)
        kill_after(process, out, new)
        assert written < files(out)
        times = {name: (out / name).stat().st_mtime_ns for name in files(out)}
        written = files(out)
    last = start(bundle, data, out, rows_per_file)
    assert last.wait(timeout=DEADLINE) == 0, log(out).read_text()
    assert f"{count:,} rows in" in log(out).read_text()
    assert {name: (out / name).stat().st_mtime_ns for name in times} == times, "a file was written twice"
    assert hidden(out) == []

    whole = tmp_path / "whole"
    infer(bundle, data, whole, Predict(top=2), Files(rows_per_file=rows_per_file), Running(workers=1))
    rows = rows_of(out)
    assert ids(rows) == [f"{i:07d}.jpg" for i in range(count)]
    assert rows == rows_of(whole)
    bad = sum(row["error"] is not None for row in rows)
    assert bad == count // 50
