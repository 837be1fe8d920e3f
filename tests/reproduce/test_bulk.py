"""The page on scale shows the tables of the committed rates, and those follow the formulas."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from covpool.reproduce.bulk import arithmetic, run, table
from tests.evaluate.bulk.small import pictures, write_folder

ROOT = Path(__file__).parents[2]
RESULTS = sorted(ROOT.glob("results/*/bulk--*.json"))
needs_results = pytest.mark.skipif(not RESULTS, reason="there are no results beside the tests")


def committed() -> dict[str, Any]:
    results: dict[str, Any] = json.loads(RESULTS[-1].read_bytes())
    return results


@needs_results
def test_the_page_has_the_tables() -> None:
    page = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
    for made in table(committed()).split("\n\n"):
        assert made in page


@needs_results
def test_the_figures_in_the_text() -> None:
    page = " ".join((ROOT / "docs/scale.md").read_text(encoding="utf-8").split())
    assert f"8 workers × 1024 = {8 * 1024} images" in page
    assert f"{1024 * 3 * 224**2 / 1e6:.0f} MB for 1024 images" in page
    assert f"{1024 * 256 * 257 // 2 * 4 / 1e6:.0f} MB at d = 256" in page
    assert f"{1024 * 512 * 4 / 1e6:.0f} MB when projected" in page
    shards = 10**9 * committed()["bytes an image"] / 256e6
    assert f"1000 bytes each: {1000 * shards / 1e9:.1f} GB" in page
    assert f"{arithmetic.GETS:,} GET and {arithmetic.PUTS:,} PUT" in page


def test_the_formulas_by_hand() -> None:
    rates = dict.fromkeys(("decode 224", "decode 448"), 100.0)
    results = {
        "images a core-second": rates,
        "bytes an image": 100_000,
        "forward FLOPs": {"224": 10**10, "448": 4 * 10**10},
    }
    rows = re.findall(r"\| (.*?) \|\n", table(results) + "\n")
    assert "d = 256 | 32,896 | 131.6 TB | 65.8 TB" in rows  # 256 · 257 / 2 · 4 · 1e9
    assert "decode 224 | 100.0 images a core-second | 2,778 core-hours" in rows  # 1e9 / 100 / 3600
    # 1e9 · 1e10 / 31.2e12 / 3600, and 31.2e12 / 1e10 images a second over 100 a core
    gpu = "10.0 GFLOPs, 3,120 images a second, fed by 31 cores | 89 GPU-hours"
    assert f"resnet50 224 on an A100, estimate | {gpu}" in rows
    assert "GET, an image each | 1,000,000,000 | 5,500 a second | 50.5 hours" in rows
    # 1e9 · 1e5 / 256e6 shards, of 2560 images, so of 3 files each
    assert "GET, shards of 256 MB and their indexes | 781,250 | 5,500 a second | 2.4 minutes" in rows
    assert "PUT, files of 1024 rows at most | 1,171,875 | 3,500 a second | 5.6 minutes" in rows


@pytest.mark.slow
def test_measuring(tmp_path: Path) -> None:
    made = run(write_folder(tmp_path, pictures(12, bad_every=5)))
    assert len(made["images a core-second"]) == 6
    assert all(rate > 0 for rate in made["images a core-second"].values())
    assert made["forward FLOPs"]["448"] > 3.5 * made["forward FLOPs"]["224"]
    assert "decode 448" in table(json.loads(json.dumps(made)))
