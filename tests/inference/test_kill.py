"""Jobs that are killed and restarted give the rows of an uninterrupted job."""

from __future__ import annotations

from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from covpool.inference import Files, Predict, Running, infer
from tests.forked import command, finish, send_when
from tests.inference.small import hidden, ids, rows_of, write_links


def files(out: Path) -> set[str]:
    return {path.name for path in out.glob("*.parquet")}


@pytest.mark.parametrize(
    ("count", "rows_per_file", "moments"),
    [(200, 8, (1, 5, 3)), pytest.param(20_000, 256, (1, 30, 20), marks=pytest.mark.slow)],
    ids=["200", "20000"],
)
def test_three_kills(
    tmp_path: Path, bundle: Path, count: int, rows_per_file: int, moments: tuple[int, ...]
) -> None:
    data, out, log = write_links(tmp_path / "data", count), tmp_path / "out", tmp_path / "log"

    def start() -> BaseProcess:
        sizes = ["--format", "parquet", "--rows-per-file", rows_per_file, "--top", 2, "--workers", 1]
        return command("predict", bundle, data, "--out", out, *sizes, log=log)

    written: set[str] = set()
    for new in moments:
        # Its worker process is not killed, and has to end by itself.
        send_when(start(), lambda: len(files(out) - written) >= new, log)  # noqa: B023
        assert written < files(out)
        times = {name: (out / name).stat().st_mtime_ns for name in files(out)}
        written = files(out)
    finish(start(), log)
    assert f"{count:,} rows in" in log.read_text()
    assert {name: (out / name).stat().st_mtime_ns for name in times} == times, "a file was written twice"
    assert hidden(out) == []

    whole = tmp_path / "whole"
    infer(
        bundle, data, whole, Predict(top=2), Files("parquet", rows_per_file=rows_per_file), Running(workers=1)
    )
    rows = rows_of(out)
    assert ids(rows) == [f"{i:07d}.jpg" for i in range(count)]
    assert rows == rows_of(whole)
    bad = sum(row["error"] is not None for row in rows)
    assert bad == count // 50
