"""docs/security.md: every promise has a test, and its numbers are those of the source."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "security.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="tests without the checkout around them")


def rows() -> list[list[str]]:
    """Return the cells of the tables whose last column names tests."""
    text, found, is_open = PAGE.read_text("utf-8").partition("## Dependencies")[0], [], False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        is_open = line.startswith("|") and (is_open or cells[-1].strip("| ") == "tested by")
        if is_open and "`tests/" in line:
            found.append(cells)
        elif is_open and "tested by" not in line and not line.startswith("|--"):
            found.append([*cells, ""])
    return found


def test_every_promise_has_a_test_that_exists() -> None:
    assert len(rows()) > 50
    for cells in rows():
        names = re.findall(r"`(tests/[^`]+)`", cells[-1])
        assert names, f"no test: {cells[0]}"
        for name in names:
            there = list((ROOT / name).rglob("test_*.py")) if (ROOT / name).is_dir() else [ROOT / name]
            assert there, name
            assert all("def test_" in path.read_text("utf-8") for path in there), name


def test_the_numbers_are_those_of_the_source() -> None:
    pytest.importorskip("aiohttp")
    from covpool.data import decode
    from covpool.data.shards import index, scan
    from covpool.data.sources import parquet_file
    from covpool.export import targets
    from covpool.models import weights
    from covpool.storage import remote

    serve = (ROOT / "examples" / "serve.py").read_text("utf-8")
    small, large = re.search(r"SMALL_SECONDS, LARGE_SECONDS = ([\d.]+), ([\d.]+)", serve).groups()  # type: ignore[union-attr]
    (scans,) = re.search(r"MAX_SCANS, START_OF_SCAN = (\d+)", serve).groups()  # type: ignore[union-attr]
    waits = inspect.signature(remote.Requests).parameters
    mib = 1 << 20
    expected = {
        "A JPEG with many scans": (f"{decode.MAX_SCANS} scans", f"{scans} in the example"),
        "A file that Pillow": (f"{decode.MAX_HEADER_READS:,} reads", f"{decode.PIECE_BYTES:,} bytes"),
        "A decoder that hangs is stopped in bulk": (f"{waits['timeout'].default:g} seconds",),
        "A decoder that hangs is stopped in the example": (f"{float(small):g} s", f"{float(large):g} s"),
        "A URL in a row": (f"{waits['timeout'].default:g} seconds",),
        "A table, an index": (f"{remote.TABLE_TIMEOUTS} times",),
        "The download": (f"{remote.SLOWEST:,} bytes per second", f"{remote.TABLE_TIMEOUTS} times"),
        "A server cannot ask": (f"{remote.MAX_WAIT_SECONDS:g} seconds",),
        "A table on a server": (f"{remote.RETRIES} retries",),
        "A response": (f"{remote.MAX_BODY_BYTES // mib} MiB",),
        "An index does not": (f"{index.BLOCK_BYTES} bytes",),
        "A row group": (
            f"{parquet_file.MAX_DECODED_BYTES // mib} MiB",
            f"{parquet_file.MAX_EXPANSION} times",
        ),
        "The footer": (f"{parquet_file.MAX_FOOTER_BYTES // mib} MiB",),
        "The metadata": (f"{targets.MAX_METADATA_BYTES // mib} MiB", f"{targets.MAX_FIELDS:,} fields"),
        "A text in": (f"{weights.MAX_TEXT_BYTES // mib} MiB", f"{weights.MAX_NAME_BYTES:,} bytes"),
        "The header fields": (
            f"{scan.MAX_GLOBAL_FIELDS:,} global",
            f"{scan.MAX_HEADER_BYTES // mib} MiB",
        ),
        "After 100 failures": (f"{waits['max_bad'].default} failures",),
    }
    for start, numbers in expected.items():
        (row,) = [cells for cells in rows() if cells[0].startswith(start)]
        for number in numbers:
            assert number in " ".join(row), (start, number)
