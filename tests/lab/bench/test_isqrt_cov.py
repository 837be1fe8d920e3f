"""The benchmark of isqrt_cov: results, resuming, page, figure and targets."""

from __future__ import annotations

import copy
import json
import platform
import shutil
from pathlib import Path

import jsonschema
import pytest

from covpool.provenance import Results, release, schema
from lab.bench.isqrt_cov import (
    CONTENDERS,
    main,
    render,
    run_isqrt_cov,
    summary_into,
    write_pages,
)
from lab.bench.isqrt_cov_plot import draw
from lab.bench.isqrt_cov_table import TARGETS, Target, markdown
from lab.bench.layers import SIZES, Size
from lab.record import read_record, write_record
from tests.lab.bench.conftest import EAGER, QUICK, TINY_SIZES


def test_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(schema("lab", "isqrt_cov"))


@pytest.mark.slow
def test_the_command_measures_and_renders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = main(tmp_path, sizes=("6:4",), batch=2, rounds=2, compiled=False)
    assert [path.suffix for path in written] == [".json", ".md", ".png"]
    assert read_record(written[0])["sizes"]["6:4"]["batch"] == 2
    page = tmp_path / "page.md"
    page.write_text("<!-- benchmark:begin -->\n<!-- benchmark:end -->\n", encoding="utf-8")
    assert capsys.readouterr().out.split() == [*map(str, written)]
    assert write_pages(written[0], page) == [*written[1:], page]
    assert "6:4" in page.read_text(encoding="utf-8")


def test_file_is_named_after_release_experiment_machine_and_device(
    results_file: Path, results: Results
) -> None:
    assert results_file.parent.name == release(results["versions"]["covpool"])
    name, machine, device = results_file.stem.split("--")
    assert (name, device) == ("isqrt_cov", "cpu")
    assert machine.endswith("-1c")  # the test process uses one thread


def test_results_hold_every_size_and_contender(results: Results) -> None:
    assert list(results["sizes"]) == ["tiny", "wide"]
    for size in results["sizes"].values():
        assert list(size["contenders"]) == list(EAGER)
        for found in size["contenders"].values():
            assert found["value"]["rounds"] == found["value_and_gradient"]["rounds"] == QUICK.rounds


def test_results_count_products(results: Results) -> None:
    for size in results["sizes"].values():
        products = {name: found["products"] for name, found in size["contenders"].items()}
        assert products["plain"] == {"value": 14, "value_and_gradient": 54}
        assert products["bare"] == products["ours"] == products["bfloat16"] == products["float16"]
        fewer = {name: count - products["fitted 3"][name] for name, count in products["ours"].items()}
        assert fewer == {"value": 6, "value_and_gradient": 6 + 8}


def test_results_hold_the_error_of_each_dtype_and_fit(results: Results) -> None:
    for size in results["sizes"].values():
        errors = {name: found["error"] for name, found in size["contenders"].items()}
        assert 0 < errors["ours"]["value"] < 1e-5
        assert 1e-4 < errors["bfloat16"]["value"] < 5e-2
        assert 1e-5 < errors["float16"]["value"] < 5e-3
        assert 1e-3 < errors["fitted 3"]["value"] < 3e-2
        assert 1e-5 < errors["fitted 4"]["value"] < 5e-4
        assert errors["eigh"] is None


def test_results_name_no_host(results: Results) -> None:
    assert f'"{platform.node()}"' not in json.dumps(results)


def test_broken_results_are_not_written(results: Results, tmp_path: Path) -> None:
    results["sizes"]["tiny"]["contenders"]["ours"]["value"]["rounds"] = 0
    with pytest.raises(jsonschema.ValidationError):
        write_record(tmp_path / "broken.json", results)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, results: Results) -> list[str]:
    """Return the names of the sizes that are measured; the measurement itself is replaced."""
    names: list[str] = []

    def measure(problem, contenders, schedule, progress):
        names.append(problem.size.name)
        if problem.size.name == "interrupted":
            raise KeyboardInterrupt
        shape = {"channels": problem.size.channels, "positions": problem.size.positions}
        return {**results["sizes"]["tiny"], **shape, "batch": problem.size.batch}

    monkeypatch.setattr("lab.bench.isqrt_cov.measure", measure)
    return names


def test_an_interrupted_run_keeps_what_it_has_and_resume_skips_it(
    measured: list[str], tmp_path: Path
) -> None:
    sizes = [TINY_SIZES[0], Size("interrupted", 4, 4), TINY_SIZES[1]]
    with pytest.raises(KeyboardInterrupt):
        run_isqrt_cov(tmp_path, sizes=sizes, schedule=QUICK)
    (path,) = tmp_path.rglob("*.json")
    assert list(read_record(path)["sizes"]) == ["tiny"]

    measured.clear()
    run_isqrt_cov(tmp_path, sizes=TINY_SIZES, schedule=QUICK)
    assert measured == ["wide"]
    assert list(read_record(path)["sizes"]) == ["tiny", "wide"]


def test_resume_measures_a_size_again_when_its_batch_changed(measured: list[str], tmp_path: Path) -> None:
    run_isqrt_cov(tmp_path, sizes=TINY_SIZES, schedule=QUICK)
    measured.clear()
    run_isqrt_cov(tmp_path, sizes=TINY_SIZES, batch=2, schedule=QUICK)
    assert measured == ["wide"]


@pytest.mark.parametrize(
    ("change", "named"),
    [({"steps": 4}, "steps"), ({"seed": 1}, "seed"), ({"contenders": ["plain"]}, "contenders")],
)
def test_resume_refuses_other_arguments(measured: list[str], tmp_path: Path, change, named: str) -> None:
    run_isqrt_cov(tmp_path, sizes=TINY_SIZES, schedule=QUICK)
    with pytest.raises(ValueError, match=f"cannot resume .*: {named} changed"):
        run_isqrt_cov(tmp_path, sizes=TINY_SIZES, schedule=QUICK, **change)


def test_resume_refuses_other_code(
    measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_isqrt_cov(tmp_path, sizes=TINY_SIZES, schedule=QUICK)
    monkeypatch.setattr("lab.bench.isqrt_cov.SOURCES", ("nn",))
    with pytest.raises(ValueError, match="source changed"):
        run_isqrt_cov(tmp_path, sizes=TINY_SIZES, schedule=QUICK)


def test_unknown_contenders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"contenders must be among ours, .*; got magic"):
        run_isqrt_cov(tmp_path, contenders=["magic"])


def test_committed_results_follow_the_schema() -> None:
    files = list((Path(__file__).parents[3] / "results").rglob("isqrt_cov--*.json"))
    if not files:
        pytest.skip("no results next to the tests")
    for path in files:
        assert read_record(path)["experiment"] == "isqrt_cov"


@pytest.fixture
def named_sizes(results: Results) -> Results:
    """Results at the sizes that have targets: twice as fast as each contender, quartiles at ±5 %."""
    sizes = {}
    for name, size in SIZES.items():
        found = copy.deepcopy(results["sizes"]["tiny"])
        found.update(channels=size.channels, positions=size.positions, batch=size.batch)
        for contender in found["contenders"].values():
            contender["value_and_gradient"]["ratio"] = {"median": 2.0, "q1": 1.9, "q3": 2.1}
        sizes[name] = found
    results["sizes"] = sizes
    return results


@pytest.mark.slow
def test_render_needs_nothing_but_the_json(results_file: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copy(results_file, tmp_path / "some.json"))
    table, picture = render(moved)
    assert (table.name, picture.name) == ("some.md", "some.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "](some.png)" in table.read_text(encoding="utf-8")


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


@pytest.mark.slow
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
    assert text.startswith("above\n<!-- benchmark:begin -->\nColumns 2 to 5 show")
    assert text.endswith("<!-- benchmark:end -->\nbelow\n")
    assert "old" not in text
    assert "| tiny (16×9, batch 2) |" in text
    assert "covpool with the paper's 5 steps" in text


def test_a_page_without_marks_is_refused(results_file: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing here\n", encoding="utf-8")
    with pytest.raises(ValueError, match="benchmark:begin"):
        summary_into(page, results_file)


def test_the_benchmarks_show_the_committed_results(tmp_path: Path) -> None:
    """Every figure of the table comes from the committed results: rendering them changes nothing."""
    root = Path(__file__).parents[3]
    committed = sorted(root.glob("results/*/isqrt_cov--*--cpu.json"))
    if not committed:
        pytest.skip("no results next to the tests")
    page = Path(shutil.copy(root / "docs" / "benchmarks.md", tmp_path / "page.md"))
    summary_into(page, committed[-1])
    assert page.read_text(encoding="utf-8") == (root / "docs" / "benchmarks.md").read_text(encoding="utf-8")


SIZE = {
    "contenders": {
        "rival": {
            "value_and_gradient": {"ratio": {"median": 0.8, "q1": 0.5, "q3": 1.0}},
            "bytes_kept_per_image": 3 * 2**19,
        }
    }
}


def test_targets_name_sizes_and_contenders_that_exist() -> None:
    for target in TARGETS:
        assert target.size in SIZES
        assert target.contender in CONTENDERS


@pytest.mark.parametrize(
    ("quantity", "measured", "reached", "missed"),
    [
        ("speedup", (0.8, 0.5, 1.0), 0.8, 0.9),
        ("cost", (0.8, 0.5, 1.0), 0.8, 0.7),
        ("overhead", (1.25, 1.0, 2.0), 1.25, 1.2),
        ("memory", (1.5, 1.5, 1.5), 1.5, 1.4),
    ],
)
def test_figures_and_verdicts(quantity, measured, reached: float, missed: float) -> None:
    target = Target("14x14", quantity, "rival", reached)
    assert target.measured(SIZE) == pytest.approx(measured)
    assert target.met(measured[0])
    assert not Target("14x14", quantity, "rival", missed).met(measured[0])
    assert Target("14x14", quantity, "rival", missed).met(measured[0], margin=0.2)


def test_a_contender_left_out_has_no_figure() -> None:
    assert Target("14x14", "speedup", "absent", 1.0).measured(SIZE) is None
