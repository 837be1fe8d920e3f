from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest

from covpool.bench import SIZES, render, summary_into
from covpool.bench.plot import draw
from covpool.bench.results import Results
from covpool.bench.table import markdown


@pytest.fixture
def named_sizes(results: Results) -> Results:
    """Results at the sizes that have targets: twice as fast as everything, a whisker of five per cent."""
    sizes = {}
    for name, size in SIZES.items():
        found = copy.deepcopy(results["sizes"]["tiny"])
        found.update(channels=size.channels, positions=size.positions, batch=size.batch)
        for contender in found["contenders"].values():
            contender["value_and_gradient"]["ratio"] = {"median": 2.0, "q1": 1.9, "q3": 2.1}
        sizes[name] = found
    results["sizes"] = sizes
    return results


def test_render_needs_nothing_but_the_json(results_file: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copy(results_file, tmp_path / "some.json"))
    table, picture = render(moved)
    assert (table.name, picture.name) == ("some.md", "some.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "](some.png)" in table.read_text(encoding="utf-8")


def test_table_without_matplotlib_has_no_picture(
    results_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = Path(shutil.copy(results_file, tmp_path / "some.json"))
    monkeypatch.setattr("covpool.bench.report.find_spec", lambda name: None)
    (table,) = render(moved)
    assert "![" not in table.read_text(encoding="utf-8")


def test_targets_stand_beside_what_was_measured(named_sizes: Results) -> None:
    rows = markdown(named_sizes).splitlines()
    assert "| 28x28 | speed over plain | ≥ 1.9x | 2.00 [1.90, 2.10] | met |" in rows
    unmet = next(row for row in rows if row.startswith("| 14x14 | speed over plain |"))
    assert unmet.startswith(
        "| 14x14 | speed over plain | ≥ 3.2x | 2.00 [1.90, 2.10] | **not met**: the products"
    )
    assert "| 14x14 | time over bare | ≤ 1.25x | 0.50 [0.48, 0.53] | met |" in rows
    assert "| 14x14 | compiled: time over ours | ≤ 1x |  | not measured |" in rows


def test_every_row_of_a_table_has_the_cells_of_its_header(results: Results) -> None:
    cells = None
    for line in markdown(results).splitlines():
        if not line.startswith("|"):
            cells = None
            continue
        cells = cells or line.count("|")
        assert line.count("|") == cells, line


def test_table_says_from_how_many_rounds(results: Results) -> None:
    results["sizes"]["tiny"]["contenders"]["svd"]["value"]["rounds"] = 2
    (row,) = [line for line in markdown(results).splitlines() if "| svd |" in line and "| 2 |" in line]
    assert row.endswith("| 3 |")


def test_plot_shows_losses_below_one(named_sizes: Results, tmp_path: Path) -> None:
    matplotlib_axes = pytest.importorskip("matplotlib.axes")
    bars = []
    bar = matplotlib_axes.Axes.bar

    def spy(self, x, height, *args, **kwargs):
        bars.append(height)
        return bar(self, x, height, *args, **kwargs)

    for size in named_sizes["sizes"].values():
        size["contenders"]["eigh"]["value_and_gradient"]["ratio"] = {"median": 0.9, "q1": 0.85, "q3": 0.95}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matplotlib_axes.Axes, "bar", spy)
        draw(named_sizes, tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").stat().st_size > 0
    assert sum(height == pytest.approx(-0.1) for height in bars) == len(named_sizes["sizes"])


def test_summary_goes_between_the_marks_and_nowhere_else(results_file: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("above\n<!-- benchmark:begin -->\nold\n<!-- benchmark:end -->\nbelow\n", encoding="utf-8")
    text = summary_into(page, results_file).read_text(encoding="utf-8")
    assert text.startswith("above\n<!-- benchmark:begin -->\nValue and gradient")
    assert text.endswith("<!-- benchmark:end -->\nbelow\n")
    assert "old" not in text
    assert "| tiny (16×9, batch 2) |" in text


def test_a_page_without_marks_is_refused(results_file: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing here\n", encoding="utf-8")
    with pytest.raises(ValueError, match="benchmark:begin"):
        summary_into(page, results_file)


def test_the_front_page_shows_the_committed_results(tmp_path: Path) -> None:
    """No figure in the README is typed in: rendering the committed results again changes nothing."""
    root = Path(__file__).parents[2]
    committed = sorted(root.glob("results/*/isqrt_cov--*--cpu.json"))
    if not committed:
        pytest.skip("no results beside the tests")
    page = Path(shutil.copy(root / "README.md", tmp_path / "README.md"))
    summary_into(page, committed[-1])
    assert page.read_text(encoding="utf-8") == (root / "README.md").read_text(encoding="utf-8")
