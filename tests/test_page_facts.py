"""Facts on pages are correct: figures, sentences, recipes, tests and the package diagram."""

from __future__ import annotations

import ast
import json
import re

import pytest
import torch

from covpool.closed_form.report import table_cells
from covpool.nn import CovPool
from covpool.terminal import aligned
from tests.pages import DOCS, FENCED, README, ROOT, name_of, needs_pages, read
from tests.test_package import PACKAGES, SHARED

pytestmark = needs_pages

RESULTS = ROOT / "results" / "0.1.0"
# Pages that quote measurements, and the result files with these measurements.
QUOTING = {
    "why_second_order.md": ["why_second_order", "one_pass", "methods", "spectra", "tiny10"],
    "benchmarks.md": [
        "contest",
        "cub_epochs",
        "one_pass",
        "fine_grained",
        "fine_tuning",
        "isqrt_cov",
        "layer",
        "methods",
        "sparrows",
        "tiny10",
    ],
    "closed_form.md": ["one_pass", "few_images", "fit_time", "sums"],
    "choose_a_head.md": [
        "one_pass",
        "contest",
        "fine_grained",
        "fine_tuning",
        "methods",
        "sparrows",
        "tiny10",
    ],
}


def has_number(text: str, number: str) -> bool:
    """Return whether the text has this number, not only a longer one that contains it."""
    return re.search(rf"(?<![\d.]){re.escape(number)}(?!\d|\.\d)", text) is not None


@pytest.mark.parametrize("name", QUOTING)
def test_figures_are_those_of_the_results(name: str) -> None:
    files = [file for suite in QUOTING[name] for file in RESULTS.glob(f"{suite}--*.md")]
    tables = "".join(read(file) for file in [*files, DOCS / "results.md"])  # with the product counts
    # tests/lab/bench/test_isqrt_cov.py compares this table, whose ratios are in no other one.
    text = re.sub(r"<!-- benchmark:begin -->.*<!-- benchmark:end -->", "", read(DOCS / name), flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)|`[^`]*`|d = \d+", "", FENCED.sub("", text))
    quoted = set(re.findall(r"-?\d+\.\d+(?: ± \d\.\d+)?(?:e\+\d+)?", text)) - {"16.8"}
    assert len(quoted) > 10
    assert {number for number in quoted if not has_number(tables, number)} == set()


def test_accuracies_are_those_of_one_pass() -> None:
    from lab.figures.accuracy import BARS, INTERVALS, QUOTED, pages

    written = pages()
    for page, text in written.items():
        assert text == read(page), f"{name_of(page)}: python -m lab figures accuracy writes its accuracies"
    quoting = {
        name_of(page) for page, text in written.items() if QUOTED.search(text) or "accuracy:begin" in text
    }
    assert {"README.md", "docs/benchmarks.md", "docs/choose_a_head.md"} <= quoting
    assert BARS.exists()
    assert INTERVALS.exists()


def test_the_pages_of_results_are_those_of_their_records() -> None:
    from lab.experiments import contest_table, cub_epochs
    from lab.record import committed_file, read_record

    for name, page in (("contest", contest_table.page), ("cub_epochs", cub_epochs.table)):
        file = committed_file(name)
        assert read(file.with_suffix(".md")) == f"{page(read_record(file))}\n"


def test_sets_that_were_not_run_are_listed() -> None:
    from lab.experiments.one_pass import committed_summaries
    from lab.figures.accuracy import (
        compared,
        contest_tables,
        draw_bars,
        draw_intervals,
        figures,
        quoted,
        table,
    )

    held = committed_summaries()
    flowers = {"flowers-lite0-224": held["flowers-lite0-224"]}
    measured = compared(flowers, None)
    lines = table(measured).splitlines()
    assert len(lines) == 5
    assert lines[2].startswith(
        "| Flowers-102 | EfficientNet-Lite0, 224 px | 94.3 % | – | **96.9 %** | +2.7 ("
    )
    assert lines[2].endswith(" | – |")
    assert lines[-1].startswith("Not run yet: Stanford Cars, EfficientNet-Lite0, 448 px; ")
    marks = [
        f"<!-- {mark} -->1<!-- end -->"
        for mark in ("one_pass flowers-lite0-224 d=64", "accuracy flowers-lite0-224 gap", "one_pass cub gap")
    ]
    known = figures(flowers, None)
    assert re.sub(r"<!--.*?-->", "", quoted(" ".join(marks), known)) == "96.0 94.3 not run"
    assert contest_tables(None).startswith("Not run yet: ")
    for draw in (draw_bars, draw_intervals):
        assert draw(measured) != draw(compared(held, None))


def test_the_first_table_has_the_contest_where_an_attention_head_ran() -> None:
    from lab.experiments.contest_heads import CASES, TESTED_ON
    from lab.experiments.contest_table import counted, summary
    from lab.experiments.one_pass import committed_summaries
    from lab.figures.accuracy import compared
    from lab.record import committed_file, read_record

    record = read_record(committed_file("contest"))
    one = next(one for one in compared(committed_summaries(), record) if one.row.name == TESTED_ON)
    rows = summary(next(case for case in CASES if case.name == TESTED_ON), record["cells"][TESTED_ON])
    assert one.gap == counted(rows, "gap")["top1"]
    assert one.isqrt_cov == counted(rows, "isqrt_cov")["top1"]
    (rival,) = (row for row in rows if row["head"] == row["rival"])
    assert one.attention == rival["top1"] == pytest.approx(one.isqrt_cov - one.over_attention["mean"])
    assert one.over_gap["mean"] == pytest.approx(one.isqrt_cov - one.gap)


def test_the_front_page_has_the_times_of_networks() -> None:
    from lab.bench.layer import FRONT_BATCHES, FRONT_SIZES, network_table
    from lab.record import read_record, with_block

    (file,) = RESULTS.glob("layer--*.json")
    assert with_block(
        read(README), "layer", network_table(read_record(file), FRONT_SIZES, FRONT_BATCHES)
    ) == read(README)


def test_the_times_of_networks_are_those_of_the_record() -> None:
    from lab.bench.layer import network_table

    runs = {
        "gap": {"ratio": {"median": 1.0}},
        "isqrt_cov": {"ratio": {"median": 1.234, "q1": 0.998, "q3": 1.3}},
    }
    record = {
        "device": "cpu",
        "machine": {"cores": 2},
        "networks": {"training, resnet50, 224 pixels, batch 16": runs},
    }
    assert network_table(record).splitlines()[-1] == "| ResNet-50 | 224 | 16 | +23 % (+0 to +30) | not run |"
    assert network_table({**record, "networks": {}}) == ""


def test_sentences_on_added_time_are_those_of_the_record() -> None:
    from lab.bench.layer import FRONT_BATCHES, FRONT_SIZES, NETWORKS
    from lab.record import read_record

    (file,) = RESULTS.glob("layer--*.json")
    added = {
        name: round(100 * (runs["isqrt_cov"]["ratio"]["median"] - 1))
        for name, runs in read_record(file)["networks"].items()
    }
    front = [
        added[f"inference, {network}, {pixels} pixels, batch {batch}"]
        for network in NETWORKS
        for pixels in FRONT_SIZES
        for batch in FRONT_BATCHES
    ]
    assert f"Batched inference takes {min(front)} to {max(front)} %" in read(README)
    single, batched = (
        max(percent for name, percent in added.items() if name.endswith(", batch 1") is alone)
        for alone in (True, False)
    )
    assert f"adds up to {batched} % to the time of a network" in read(DOCS / "why_second_order.md")
    assert f"up to {single} % at batch size 1" in read(DOCS / "choose_a_head.md")


def test_the_cost_of_an_old_basis_is_that_of_the_record() -> None:
    (file,) = RESULTS.glob("few_images--*.json")
    record = json.loads(read(file))
    assert max(abs(step["isqrt_cov"] - step["own_basis"]) for step in record["steps"]) < 0.02
    assert "changes the accuracy by less than two percentage points" in read(DOCS / "closed_form.md")
    assert record["bases"]["Flowers-102"] <= record["bases"]["random directions"]
    assert "basis of flowers is no better for sparrows than random directions" in read(
        DOCS / "closed_form.md"
    )


def test_the_accuracies_of_the_benchmarks_are_measured() -> None:
    (file,) = RESULTS.glob("fine_grained--*.md")
    number = r"([\d.]+(?: ± [\d.]+)?)"
    row = rf"^\| ([\w -]+) \| (\d+) \| (\d+) \| {number} \| {number} \| {number} \| \d \|$"
    shown = re.findall(row, read(DOCS / "benchmarks.md"), re.MULTILINE)
    assert len(shown) == 6
    for name, pixels, dim, *accuracies in shown:
        section = re.split(rf"^## {name}\b", read(file), flags=re.MULTILINE)[1].partition("\n## ")[0]
        heads = ("gap | ", f"isqrt_cov | {dim}", f"isqrt_cov+gap | {dim}")
        for head, accuracy in zip(heads, accuracies, strict=True):
            assert f"| lite0 | {pixels} | {head} | {accuracy} |" in section


def test_the_speeds_of_the_benchmarks_are_measured() -> None:
    (file,) = RESULTS.glob("methods--*.md")
    layers = re.findall(
        r"^\| (`[^`]+`) \| ([\d.]+) \| ([\d.]+) \|$", read(DOCS / "benchmarks.md"), re.MULTILINE
    )
    assert len(layers) == 9
    measured = read(file).partition("single layers at 13x13")[2].partition("\n## ")[0]
    for method, milliseconds, ratio in layers:
        found = re.escape(f"| {method} | {milliseconds} (") + r"[\d.]+\) \| " + re.escape(ratio) + r"[ \[]"
        assert re.search(found, measured), method


@pytest.mark.parametrize("page", ["README.md", "docs/training.md"])
def test_the_table_of_fit_is_the_committed_one(page: str) -> None:
    (file,) = RESULTS.glob("fit_sparrows--*.json")
    record = json.loads(read(file))
    assert aligned(table_cells(record)) in read(ROOT / page)
    assert f"best: {record['best']}, top-1 {record['top1']:.1%} (test images)" in read(ROOT / page)


def test_the_benchmarks_link_every_result() -> None:
    text = read(DOCS / "benchmarks.md")
    assert [
        file.name for file in RESULTS.iterdir() if f"(../results/{RESULTS.name}/{file.name})" not in text
    ] == []


def test_the_numbers_of_a_low_rank_head() -> None:
    assert f"{512 * 32_896 / 1e6:.1f} million" in read(DOCS / "choose_a_head.md")
    assert f"{320 * 319 // 2:,} pairs of channels" in read(DOCS / "why_second_order.md")


def test_the_table_of_two_sparrows_is_the_committed_one() -> None:
    (file,) = RESULTS.glob("why_second_order--*.md")
    table = read(file).partition("\n\n")[2].strip()
    assert table in read(DOCS / "why_second_order.md")


def test_the_exchange_of_gradients() -> None:
    from covpool.models.config import ModelConfig
    from covpool.models.create import build_model

    row = r"\| ResNet-50, d = (\d+), ([\d,]+) classes \| ([\d,]+) \| (\d+) MB \| (\d+) ms \|"
    rows = re.findall(row, read(DOCS / "scale_out.md"))
    assert len(rows) == 3
    for dim, classes, *shown in rows:
        config = ModelConfig("resnet50", dim=int(dim), num_classes=int(classes.replace(",", "")))
        with torch.device("meta"):
            parameters = sum(parameter.numel() for parameter in build_model(config).parameters())
        milliseconds = 2 * 4 * parameters / 10e9 * 1e3  # sent and received, 4 bytes each
        assert shown == [f"{parameters:,}", f"{4 * parameters / 1e6:.0f}", f"{milliseconds:.0f}"]


def test_the_memory_that_recompute_saves() -> None:
    from lab.bench.layers import bytes_kept_for_backward

    rows = re.findall(r"^\| (\d+)×(\d+) \| ([\d.]+) \|$", read(DOCS / "faq.md"), re.MULTILINE)
    assert len(rows) == 3
    for channels, positions, ratio in rows:
        features = torch.rand(4, int(channels), int(positions))
        saved, recompute = (
            bytes_kept_for_backward(
                CovPool(int(channels), dim=None, layout="channels_first", backward=backward), features
            )
            for backward in ("saved", "recompute")
        )
        assert ratio == f"{saved / recompute:.1f}"


def test_recipes_are_all_there() -> None:
    from lab.figures.recipes import page

    text = read(DOCS / "recipes.md")
    assert page(text) == text, "python -m lab figures recipes writes the table"


def test_the_picture_of_the_packages_is_that_of_the_imports() -> None:
    from lab.figures.packages import PICTURE, svg

    assert read(PICTURE) == svg(), "python -m lab figures packages draws it"
    rows = re.findall(r"^\| `(\w+)` \|", read(DOCS / "layout.md"), flags=re.MULTILINE)
    assert rows == [*PACKAGES, *SHARED]


def test_files_that_the_layout_names_are_there() -> None:
    named = re.findall(r"`(\w+/(?:\w+/)*\w+\.py)`", read(DOCS / "layout.md"))
    assert len(named) > 5
    for file in named:
        assert (ROOT / "src" / "covpool" / file).exists() or (ROOT / file).exists(), file


def test_every_promise_has_its_test() -> None:
    rows = [row for row in read(DOCS / "reliability.md").splitlines() if row.startswith("| ")]
    promises = [row for row in rows if "tested by" not in row]
    assert len(promises) > 20
    for row in promises:
        files = re.findall(r"`(tests/[\w/]+\.py)`", row.split("|")[2])
        assert files, row
        assert all((ROOT / file).exists() for file in files), row


def test_figures_of_promises_were_measured() -> None:
    logs = (ROOT / ".ci" / "logs").glob("*.log")
    measured = "".join(map(read, [*logs, *RESULTS.glob("*.md")]))
    for row in read(DOCS / "reliability.md").splitlines():
        if row.startswith("| ") and "tested by" not in row:
            for number in re.findall(r"\d+\.\d+|\d+ of \d+", row.split("|")[3].partition("](")[0]):
                assert has_number(measured, number), row
    counts = re.findall(r"(\d+) (?:fast|slow) tests", read(DOCS / "reliability.md"))
    assert len(counts) == 3
    assert all(has_number(measured, f"{number} passed") for number in counts)


def strings_of_the_source() -> list[str]:
    """Return all strings in the package, with … for placeholders."""
    found = []
    for file in (ROOT / "src" / "covpool").rglob("*.py"):
        for node in ast.walk(ast.parse(read(file))):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_errors_are_quoted_as_they_are_printed() -> None:
    quoted = re.findall(r"^### `(.+)`$", read(DOCS / "faq.md"), flags=re.MULTILINE)
    assert len(quoted) > 15
    strings = "\n".join(strings_of_the_source())
    for sentence in quoted:
        for part in sentence.split("…"):
            assert part in strings, f"{sentence!r} is nowhere in the source: {part!r}"


def test_limits_of_the_example_are_those_of_the_page() -> None:
    named = re.findall(r"`([A-Z]+_[A-Z]+)`", read(DOCS / "export.md"))
    source = read(ROOT / "examples" / "serve.py")
    assert len(named) > 4
    assert all(name in source for name in named)
