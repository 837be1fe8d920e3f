"""Each experiment runs at a small size, and its committed results give the committed tables and pages."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from covpool.functional.newton_schulz import fitted_steps as fitted_coefficients
from covpool.nn.pooling import METHODS
from lab.experiments import (
    bulk,
    exports,
    fine_grained,
    fine_tuning,
    fitted_steps,
    half_precision,
    location_maps,
    sparrows,
    spectra,
    svm_solvers,
    tiny10,
    why_second_order,
)
from tests.data.pictures import photo
from tests.inference.small import pictures, write_folder

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "results"
WITH_TABLES = (
    bulk,
    exports,
    fine_grained,
    fine_tuning,
    fitted_steps,
    half_precision,
    location_maps,
    sparrows,
    spectra,
    tiny10,
    why_second_order,
)


def committed(name: str) -> list[Path]:
    files = sorted(RESULTS.glob(f"*/{name}--*.json"))
    if not files:
        pytest.skip("there are no results next to the tests")
    return files


def newest(name: str) -> dict[str, Any]:
    results: dict[str, Any] = json.loads(committed(name)[-1].read_bytes())
    return results


def words_of(page: str) -> str:
    return " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())


@pytest.mark.parametrize("experiment", WITH_TABLES, ids=lambda module: module.__name__)
def test_tables_are_made_from_the_figures(experiment: ModuleType) -> None:
    for file in committed(experiment.__name__.rpartition(".")[2]):
        results = json.loads(file.read_bytes())
        assert file.with_suffix(".md").read_text() == f"{experiment.table(results)}\n"


def test_the_page_on_probing_quotes_the_results() -> None:
    tables = "".join(file.with_suffix(".md").read_text("utf-8") for file in committed("fine_grained"))
    page = (ROOT / "docs" / "probing.md").read_text(encoding="utf-8")
    measured = page.partition("\n## Results")[2].partition("## From Python")[0]
    quoted = re.findall(r"\d\d\.\d(?: ± \d\.\d)?", measured)
    assert len(quoted) == 5
    assert [number for number in quoted if number not in tables] == []


def test_a_row_of_tiny10_has_mean_and_deviation() -> None:
    base = dict.fromkeys(("seed", "parameters", "seconds", "source", "versions", "machine"))
    runs = [{**base, "last_epoch": {"top1": t}, "metrics": {"top1": t + 0.1}} for t in (0.5, 0.6, 0.7)]
    row = tiny10._row("gap", runs)
    assert (row["mean"], row["sd"]) == (pytest.approx(0.6), pytest.approx(0.1))
    assert "| gap | 60.0 ± 10.0 | 50.0, 60.0, 70.0 |" in tiny10.table({"rows": [row]})


def test_the_svm_solvers_are_compared_on_a_case_of_fine_grained() -> None:
    assert svm_solvers.CASE in fine_grained.CASES
    assert newest("svm_solvers")["arguments"] == {"case": svm_solvers.CASE.name}


# bulk


def test_the_page_on_scale_has_the_tables_and_figures_of_the_results() -> None:
    results = newest("bulk")
    page = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
    for made in bulk.table(results).split("\n\n"):
        assert made in page
    words = words_of("scale.md")
    assert f"at most 9 × 1024 = {9 * 1024} images" in words
    assert f"{1024 * 3 * 224**2 / 1e6:.0f} MB for 1024 images" in words
    assert f"{1024 * 256 * 257 // 2 * 4 / 1e6:.0f} MB at d = 256" in words
    assert f"{1024 * 512 * 4 / 1e6:.0f} MB when projected" in words
    shards = 10**9 * results["bytes an image"] / 256e6
    assert f"1000 bytes per shard: {1000 * shards / 1e9:.1f} GB" in words
    assert f"{bulk.GETS:,} GET and {bulk.PUTS:,} PUT" in words


def test_the_formulas_of_bulk_by_hand() -> None:
    rates = dict.fromkeys(("decode 224", "decode 448"), 100.0)
    results = {
        "images a core-second": rates,
        "bytes an image": 100_000,
        "forward FLOPs": {"224": 10**10, "448": 4 * 10**10},
    }
    rows = re.findall(r"\| (.*?) \|\n", bulk.table(results) + "\n")
    assert "d = 256 | 32,896 | 131.6 TB | 65.8 TB" in rows  # 256 · 257 / 2 · 4 · 1e9
    assert "decode 224 | 100.0 images/s per core | 2,778 core-hours" in rows  # 1e9 / 100 / 3600
    # 1e9 · 1e10 / 31.2e12 / 3600, and 31.2e12 / 1e10 images/s over 100 per core, rounded up
    gpu = "10.0 GFLOPs, 3,120 images/s, fed by 32 cores | 89 GPU-hours"
    assert f"resnet50 224 on an A100, estimate | {gpu}" in rows
    assert "GET, one per image | 1,000,000,000 | 5,500/s | 50.5 hours" in rows
    # 1e9 · 1e5 / 256e6 shards of 2560 images, so 3 files each
    assert "GET, shards of 256 MB and their indexes | 781,250 | 5,500/s | 2.4 minutes" in rows
    assert "PUT, files of 1024 rows or fewer | 1,171,875 | 3,500/s | 5.6 minutes" in rows


@pytest.mark.slow
def test_bulk_measures(tmp_path: Path) -> None:
    made = bulk.run(write_folder(tmp_path, pictures(12, bad_every=5)))
    assert len(made["images a core-second"]) == 6
    assert all(rate > 0 for rate in made["images a core-second"].values())
    assert made["forward FLOPs"]["448"] > 3.5 * made["forward FLOPs"]["224"]
    assert "decode 448" in bulk.table(json.loads(json.dumps(made)))


# fitted_steps and half_precision


@pytest.mark.parametrize("steps", [3, 4])
def test_fitted_coefficients_are_those_of_the_program(steps: int) -> None:
    """A fit that starts nearby converges to the table of the library and to the committed results."""
    fit = fitted_steps.Fit("5 paper steps", steps, 1e-5)
    table = fitted_coefficients(steps)
    start = [0.99 * c for c in fitted_steps.shape(table)]
    assert fitted_steps.fitted(fit, [start]) == tuple(pytest.approx(pair, abs=1e-4) for pair in table)
    fits = {(one["target"], one["steps"]): one for one in newest("fitted_steps")["fits"]}
    found = fits[fit.target, steps]
    assert tuple(map(tuple, found["coefficients"])) == table
    assert found["error"] == pytest.approx(fitted_steps.error(fit, table), rel=1e-3)


@pytest.mark.slow
def test_fits_are_drawn_from_the_results(tmp_path: Path) -> None:
    picture = tmp_path / "made.png"
    fitted_steps.write_pages(committed("fitted_steps")[-1], picture)
    assert picture.read_bytes() == (ROOT / "docs" / "images" / "fitted_steps.png").read_bytes()


def test_the_page_on_numerics_has_the_tables_of_fits_and_of_half_precision() -> None:
    page = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    for experiment in (fitted_steps, half_precision):
        assert experiment.table(newest(experiment.__name__.rpartition(".")[2])) in page


def test_half_precision_measures_every_dtype() -> None:
    part = half_precision.measured([torch.randn(1, 12, 9).double().relu() for _ in range(3)])
    assert (part["images"], part["channels"], part["positions"]) == (3, 12, 9)
    assert len(part["rows"]) == 3 * 3 + 2
    for steps in half_precision.STEPS:
        rows = [part["rows"][f"{steps}, {dtype}"]["value"]["median"] for dtype in half_precision.DTYPES]
        assert 0 < rows[0] < 1e-5 < rows[1] < 3e-3 < rows[2] < 3e-2


# spectra


def test_spectra_of_a_known_spectrum_are_those_committed(tmp_path: Path) -> None:
    """Condition numbers depend on the threshold for zero, so a changed layer or bound must fail here."""
    drawn = {curve.method for curve in spectra.CURVES}
    assert sorted([*drawn, *spectra.EXACT_ROOTS, *spectra.NOT_OF_EIGENVALUES]) == sorted(METHODS)
    results = spectra.run(tmp_path / "none", tmp_path)
    assert (results["real"], results["skipped"]) == ([], "there are no photographs")
    assert "| mpn_cov | 0 | 1000 |" in spectra.table(results)
    assert max(results["synthetic"]["largest_difference_from_mpn_cov"].values()) < 1e-12
    before = newest("spectra")["synthetic"]
    for label, values in results["synthetic"]["out"].items():
        assert before["out"][label] == pytest.approx(values, rel=1e-4, abs=1e-12)
    for label, figures in results["synthetic"]["figures"].items():
        for name, value in before["figures"][label].items():
            expected = None if value is None else pytest.approx(value, rel=1e-3)
            assert figures[name] == expected, (label, name)


def test_spectra_of_maps_are_in_the_unit_of_their_trace() -> None:
    x = torch.randn(1, 12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    small, large = (spectra.real([x * scale], 0) for scale in (1.0, 30.0))
    assert (small["zeros"], small["channels"], small["positions"]) == (5, 12, 8)
    for label in (curve.label for curve in spectra.CURVES if curve.degree is not None):
        assert large["bins"]["out"][label] == pytest.approx(small["bins"]["out"][label], rel=1e-4)
        assert large["bins"]["zero"][label] == 0.0


def test_the_page_on_numerics_has_the_accuracy_of_fitted_steps() -> None:
    (file,) = (ROOT / "results").glob("*/fitted_heads--*.md")
    measured = set(file.read_text(encoding="utf-8").splitlines())
    page = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8").splitlines()
    shown = [line for line in page if line.startswith("| cub |")]
    assert len(shown) == 4
    assert set(shown) <= measured
    (file,) = (ROOT / "results").glob("*/figure2--*.md")
    rows = dict(re.findall(r"^\| (3 fitted steps|N=5) \| ([^|]+) \|", file.read_text(encoding="utf-8"), re.M))
    fitted, five = rows["3 fitted steps"], rows["N=5"]
    assert f"has an error of {fitted} %, where 5 paper steps have {five} %" in " ".join(page)


def test_spectra_are_drawn_from_the_results(tmp_path: Path) -> None:
    file = committed("spectra")[-1]
    spectra.write_pages(file, tmp_path / "made.png")
    assert (tmp_path / "made.png").stat().st_size > 10_000


def test_the_page_on_numerics_has_the_numbers_of_spectra() -> None:
    part = newest("spectra")["real"][-1]
    before, root, five = (part["figures"][label] for label in ("cov", "mpn_cov", "isqrt_cov steps=5"))
    low, zero = part["below_half_the_root"]["isqrt_cov steps=5"], part["bins"]["zero"]
    sentences = (
        f"{part['images']} photographs at {part['image_size']} pixels",
        f"from {before['condition']:.1e} to {root['condition']:.0f},",
        f"number of large eigenvalues, from {before['effective_rank']:.1f} to {root['effective_rank']:.1f}.",
        f"{1.5**5:.1f}·λ for a small eigenvalue",
        f"For {100 * low['eigenvalues']:.0f} % of the nonzero eigenvalues",
        f"Together these eigenvalues hold {100 * low['trace']:.0f} % of the trace",
        f"condition number of {five['condition']:.1e} and an effective rank of {five['effective_rank']:.0f}.",
        f"{part['zeros']:.0f} of {part['channels']} eigenvalues",
        f"DeepO2P (a logarithm) to −{abs(zero['deep_o2p']):.1f} and "
        f"Pow-TMLR (a power) to −{abs(zero['power_tmlr']):.0f}",
    )
    sentences = tuple(sentence.replace("e+0", "e") for sentence in sentences)
    words = words_of("numerics.md")
    assert [sentence for sentence in sentences if sentence not in words] == []
    assert (ROOT / "docs" / "images" / "spectra.png").exists()


# why_second_order

EACH, PLACES = 40, 30


def made_up(seed: int) -> why_second_order.Features:
    """Return three species in four channels: two differ in the covariance of 1 and 3, one in its mean."""
    generator = torch.Generator().manual_seed(seed)
    maps = torch.randn(3 * EACH, 4, PLACES, generator=generator)
    labels = torch.arange(3).repeat_interleave(EACH)
    maps[labels == 0, 3] += maps[labels == 0, 1]
    maps[labels == 1, 3] -= maps[labels == 1, 1]
    for label in range(2):  # make the means equal
        maps[labels == label] -= maps[labels == label].mean((0, 2), keepdim=True)
    maps[labels == 2] += 2
    names = tuple(f"{i}.jpg" for i in range(len(maps)))
    return why_second_order.Features(maps, labels, names, ("1.A_Bird", "2.B_Bird", "3.C_Bird"))


def test_why_second_order_finds_species_and_channels_and_draws_them(tmp_path: Path) -> None:
    results = {"arguments": {"channels": 4}, **why_second_order.measure(made_up(0), made_up(1))}
    assert [one["name"] for one in results["species"]] == ["A Bird", "B Bird"]
    assert results["channels"] == [1, 3]
    mean, other_mean, covariance = (row["right"] for row in results["numbers"])
    assert covariance > 0.99
    assert max(mean, other_mean) < 0.7
    assert "| their covariance | 0.9" in why_second_order.table(results)
    for one in results["species"]:
        for image in one["images"]:
            photo().save(tmp_path / image["name"])
    with Image.open(io.BytesIO(why_second_order.draw(results, tmp_path))) as picture:
        assert picture.width > 1000
        assert np.asarray(picture.convert("L")).std() > 20
