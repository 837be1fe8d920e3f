"""Rows that are URLs: dead URLs, servers that go down, and retries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from covpool.cli.main import main
from covpool.storage import address
from tests.data.servers import Server, serving
from tests.inference.small import Row, picture, read_table, rows_of

pytest.importorskip("aiohttp", reason="fsspec reads http by it")
COUNT, LATE = 30, 26


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(address, "_failed", 0)
    monkeypatch.setattr("covpool.storage.address.pauses_before", lambda retries: (0.01,) * retries)
    with serving() as made:
        made.files = {f"/{i}.jpg": picture(i) for i in range(COUNT)}
        yield made


def a_list(folder: Path, server: Server) -> Path:
    lines = ["path", *(f"{server.url}/{i}.jpg" for i in range(COUNT))]
    (folder / "list.csv").write_text("\n".join(lines))
    return folder / "list.csv"


def predict(bundle: Path, data: Path, out: Path, *more: str, verb: str = "predict") -> int:
    words = ["--out", str(out), "--device", "cpu", "--workers", "0", "--rows-per-file", "8", "--trust-rows"]
    return main([verb, str(bundle), str(data), *words, *more])


def bad(rows: list[Row]) -> list[int]:
    return [i for i, row in enumerate(rows) if row["error"]]


@pytest.mark.parametrize(("verb", "kind"), [("predict", "csv"), ("predict", "parquet"), ("embed", "parquet")])
def test_a_dead_url_costs_its_row_and_can_be_tried_again(
    tmp_path: Path, bundle: Path, server: Server, verb: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = a_list(tmp_path, server), tmp_path / "out"
    lines = data.read_text().splitlines()
    lines[1 + LATE] = "http://no-such-host.invalid/a.jpg"
    lines[1 + LATE + 1] = f"{server.url}/status/500?{LATE + 1}.jpg"
    data.write_text("\n".join(lines))
    words = ("--format", kind, "--timeout", "2", "--retries", "1")
    assert predict(bundle, data, out, *words, verb=verb) == 0
    sentence = "files and URLs that could not be opened: 2; see the column error, and use --retry"
    assert sentence in capsys.readouterr().out
    before = rows_of(out)
    assert bad(before) == [LATE, LATE + 1]
    assert all(row["error"].startswith("unreachable: ") for row in before if row["error"])
    assert predict(bundle, data, out, *words, verb=verb) == 0  # the job is done
    assert "all of them there already, 2 of them could not be opened (--retry)" in capsys.readouterr().out

    server.files["/status/500"] = picture(LATE + 1)  # this URL works again
    asked = server.asked.total()
    assert predict(bundle, data, out, *words, "--retry", verb=verb) == 0
    assert server.asked.total() == asked + 1  # answered rows are not requested again
    after = rows_of(out)
    assert bad(after) == [LATE]
    assert [row for i, row in enumerate(after) if i != LATE + 1] == [
        row for i, row in enumerate(before) if i != LATE + 1
    ]
    whole = tmp_path / "whole"
    data.write_text("\n".join(line for i, line in enumerate(lines) if i != 1 + LATE))
    assert predict(bundle, data, whole, *words, verb=verb) == 0
    assert after[LATE + 1] == rows_of(whole)[LATE]
    schemas = {str(read_table(file).schema) for file in out.glob(f"*.{kind}")}
    assert len(schemas) == 1


def test_a_server_that_goes_down_stops_the_job_and_costs_no_rows(
    tmp_path: Path, bundle: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    data = a_list(tmp_path, server)
    assert predict(bundle, data, tmp_path / "whole") == 0
    kept = dict(server.files)
    server.files = {f"/{i}.jpg": picture(i) for i in range(12)}  # the server goes down in the second file
    server.absent = 503
    assert predict(bundle, data, tmp_path / "out", "--max-bad", "3", "--retries", "0") == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert "4 URLs in sequence failed" in sentence
    assert "rerun the command later to resume" in sentence
    assert len(rows_of(tmp_path / "out")) == 8
    server.files = kept
    assert predict(bundle, data, tmp_path / "out") == 0
    assert rows_of(tmp_path / "out") == rows_of(tmp_path / "whole")
