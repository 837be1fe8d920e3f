"""The page and the plot of the methods benchmark, from measured and from made-up results."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from PIL import Image, ImageChops, ImageStat

from covpool.provenance import Results
from lab.bench.methods_page import WHY_A_GPU_DIFFERS, markdown, render, verdicts
from lab.bench.methods_plot import draw
from lab.record import read_record
from tests.lab.bench.made_up import results_of, size, steps

RESULTS = Path(__file__).parents[3] / "results"
LAYERS = size({"mpn_cov": 1.3, "gap": 0.01})
GROWING = [steps(8, 2.0, 2.2), steps(32, 4.0, 4.8)]


def said_of(sentences: list[str], start: str) -> str:
    (found,) = [sentence for sentence in sentences if sentence.startswith(start)]
    return found


def test_where_isqrt_cov_loses_is_said(methods_results: Results) -> None:
    there = size({"bcnn": 0.3, "mpn_cov": 1.02, "deep_o2p": 4.0, "isqrt_cov steps=3": 0.7})
    first, second, *_ = verdicts(results_of(methods_results, {"14x14": there}))
    assert first.startswith("At 14x14, forward and backward, `isqrt_cov` is slower than: `bcnn` (0.30).")
    assert (
        second == "At 14x14, `isqrt_cov` is as fast as: `mpn_cov` (1.02); and faster than: `deep_o2p` (4.00)."
    )


def test_that_it_loses_to_none_is_said_too(methods_results: Results) -> None:
    first, second = verdicts(results_of(methods_results, {"14x14": size({"mpn_cov": 2.0})}))
    assert "is slower than: none." in first
    assert second.endswith("as fast as: none; and faster than: `mpn_cov` (2.00).")


@pytest.mark.parametrize(
    ("ratio", "ending"),
    [
        (1.3, "takes 1.30 [1.23, 1.37] times as long as `isqrt_cov`; the paper's ratio is 1.83."),
        (0.8, "the paper's ratio is 1.83: `isqrt_cov` is slower here and faster there."),
    ],
)
def test_the_paper_is_agreed_with_or_contradicted(
    ratio: float, ending: str, methods_results: Results
) -> None:
    sentences = verdicts(results_of(methods_results, {"13x13": size({"mpn_cov": ratio})}))
    assert said_of(sentences, "`mpn_cov` takes").endswith(ending)


def test_decompositions_are_compared_by_their_value(methods_results: Results) -> None:
    sentences = verdicts(results_of(methods_results, {"13x13": size({}, eigh=2.0)}))
    assert said_of(sentences, "`eigh` alone") == (
        "`eigh` alone takes 2.00 [1.90, 2.10] times as long as the forward pass of `isqrt_cov`; in the "
        "paper: 52.0 by cuSOLVER, 4.39 by Matlab on the CPU, 23.9 by Matlab on the GPU."
    )


def test_the_paper_is_compared_with_at_its_size_alone(methods_results: Results) -> None:
    results = results_of(methods_results, {"14x14": size({"mpn_cov": 1.3})})
    assert not any("the paper" in sentence for sentence in verdicts(results))


def test_speed_that_grows_and_speed_that_does_not(methods_results: Results) -> None:
    grown = verdicts(results_of(methods_results, trained=GROWING))
    assert said_of(grown, "With one process, the speed").endswith(
        "grows with every batch size: 4.0 images/s at batch size 8 and 8.0 at 32."
    )
    gap = said_of(grown, "With one process, a training step with `mpn_cov`")
    assert "takes 1.10 to 1.20 times as long as with `isqrt_cov`" in gap
    assert "is 0.4 images/s at batch size 8 and 1.3 at 32" in gap
    assert "`isqrt_cov` 1.50, `mpn_cov` 1.50." in grown[-1]

    stuck = verdicts(results_of(methods_results, trained=[steps(8, 2.0, 1.8), steps(32, 9.0, 8.0)]))
    assert "does not grow at batch size 32" in said_of(stuck, "With two processes, the speed")
    assert "is -0.4 images/s" in said_of(stuck, "With one process, a training step")


@pytest.mark.slow
def test_render_needs_nothing_but_the_json(methods_file: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copy(methods_file, tmp_path / "some.json"))
    page, picture = render(moved)
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = page.read_text(encoding="utf-8")
    assert "](some.png)" in text
    assert WHY_A_GPU_DIFFERS in text


@pytest.mark.parametrize(
    ("layers", "trained"), [(None, GROWING), ({"14x14": LAYERS}, None), ({"13x13": LAYERS}, GROWING)]
)
def test_whatever_was_measured_is_drawn(layers, trained, methods_results: Results, tmp_path: Path) -> None:
    draw(results_of(methods_results, layers, trained), tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").stat().st_size > 0


def test_the_picture_has_the_papers_figures_beside_ours(
    methods_results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.axes import Axes

    marks: dict[str, list[float]] = {}
    plot = Axes.plot

    def spy(self, x, *args, label=None, **kwargs):
        marks[label] = list(x)
        return plot(self, x, *args, label=label, **kwargs)

    monkeypatch.setattr(Axes, "plot", spy)
    layers = {"13x13": size({"mpn_cov": 1.3}), "14x14": size({"mpn_cov": 1.2})}
    draw(results_of(methods_results, layers), tmp_path / "plot.svg")
    assert marks["the paper, GPU"] == pytest.approx([2.58 / 1.41, 1.0])
    assert marks["the paper, cuSOLVER"] == pytest.approx([21.3 / 0.41, 52.2 / 0.41])
    assert sorted(marks["either, 14x14"]) == pytest.approx([1.0, 1.2, 1.5, 3.0])


def test_the_committed_page_and_picture_are_those_of_the_committed_figures(tmp_path: Path) -> None:
    files = sorted(RESULTS.glob("*/methods--*.json"))
    if not files:
        pytest.skip("there are no results next to the tests")
    pytest.importorskip("matplotlib", minversion="3.11")  # earlier versions place labels elsewhere
    for file in files:
        picture = file.with_suffix(".png")
        assert picture.exists()
        assert file.with_suffix(".md").read_text("utf-8") == markdown(read_record(file), picture.name)
        draw(read_record(file), tmp_path / "again.png")
        with Image.open(tmp_path / "again.png") as new, Image.open(picture) as old:
            assert new.size == old.size
            difference = ImageChops.difference(new.convert("L"), old.convert("L"))
        assert ImageStat.Stat(difference).mean[0] < 1  # versions of matplotlib differ in single pixels
