from __future__ import annotations

import json
import platform
from pathlib import Path

import jsonschema
import pytest

from covpool.bench import Size, run_isqrt_cov
from covpool.bench import isqrt_cov as suite
from covpool.bench.results import SUITES, Results, read_results, schema, write_results
from covpool.provenance import origin
from covpool.provenance.machine import release
from tests.bench.conftest import EAGER, QUICK, TINY_SIZES


@pytest.mark.parametrize("name", [*SUITES, "shared"])
def test_schema_is_a_schema(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(schema(name))


def test_results_of_no_suite_are_refused(results: Results, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one of the suites isqrt_cov, methods; got 'magic'"):
        write_results(tmp_path / "magic.json", {**results, "suite": "magic"})


def test_file_is_named_after_release_suite_machine_and_device(results_file: Path, results: Results) -> None:
    assert results_file.parent.name == release(results["versions"]["covpool"])
    suite_name, machine, device = results_file.stem.split("--")
    assert (suite_name, device) == ("isqrt_cov", "cpu")
    assert machine.endswith("-1c")  # the tests' process is held to one thread


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
        assert products["bare"] == products["ours"] == products["bfloat16"]


def test_results_hold_the_error_of_float32_and_bfloat16(results: Results) -> None:
    for size in results["sizes"].values():
        errors = {name: found["error"] for name, found in size["contenders"].items()}
        assert 0 < errors["ours"]["value"] < 1e-5
        assert 1e-4 < errors["bfloat16"]["value"] < 5e-2
        assert errors["eigh"] is None


def test_results_name_no_host(results: Results) -> None:
    assert f'"{platform.node()}"' not in json.dumps(results)


def test_broken_results_are_not_written(results: Results, tmp_path: Path) -> None:
    results["sizes"]["tiny"]["contenders"]["ours"]["value"]["rounds"] = 0
    with pytest.raises(jsonschema.ValidationError):
        write_results(tmp_path / "broken.json", results)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, results: Results) -> list[str]:
    """Names of the sizes that are measured from here on; the measuring itself is replaced."""
    names: list[str] = []

    def measure(problem, contenders, schedule, progress):
        names.append(problem.size.name)
        if problem.size.name == "interrupted":
            raise KeyboardInterrupt
        shape = {"channels": problem.size.channels, "positions": problem.size.positions}
        return {**results["sizes"]["tiny"], **shape, "batch": problem.size.batch}

    monkeypatch.setattr(suite, "measure", measure)
    return names


def test_an_interrupted_run_keeps_what_it_has_and_resume_skips_it(
    measured: list[str], tmp_path: Path
) -> None:
    sizes = [TINY_SIZES[0], Size("interrupted", 4, 4), TINY_SIZES[1]]
    with pytest.raises(KeyboardInterrupt):
        run_isqrt_cov(tmp_path, sizes=sizes, schedule=QUICK)
    (path,) = tmp_path.rglob("*.json")
    assert list(read_results(path)["sizes"]) == ["tiny"]

    measured.clear()
    run_isqrt_cov(tmp_path, sizes=TINY_SIZES, schedule=QUICK, resume=True)
    assert measured == ["wide"]
    assert list(read_results(path)["sizes"]) == ["tiny", "wide"]


def test_resume_measures_a_size_again_when_its_batch_changed(measured: list[str], tmp_path: Path) -> None:
    run_isqrt_cov(tmp_path, sizes=TINY_SIZES, schedule=QUICK)
    measured.clear()
    run_isqrt_cov(tmp_path, sizes=TINY_SIZES, batch=2, schedule=QUICK, resume=True)
    assert measured == ["wide"]


@pytest.mark.parametrize(
    ("change", "named"),
    [({"steps": 4}, "steps"), ({"seed": 1}, "seed"), ({"contenders": ["plain"]}, "contenders")],
)
def test_resume_refuses_other_arguments(measured: list[str], tmp_path: Path, change, named: str) -> None:
    run_isqrt_cov(tmp_path, sizes=TINY_SIZES, schedule=QUICK)
    with pytest.raises(ValueError, match=f"cannot resume .*: {named} changed"):
        run_isqrt_cov(tmp_path, sizes=TINY_SIZES, schedule=QUICK, resume=True, **change)


def test_resume_refuses_other_code(
    measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_isqrt_cov(tmp_path, sizes=TINY_SIZES, schedule=QUICK)
    other = {"commit": None, "dirty": None, "digest": "0" * 16}
    monkeypatch.setattr(origin, "describe_source", lambda rooms: other)
    with pytest.raises(ValueError, match="source changed"):
        run_isqrt_cov(tmp_path, sizes=TINY_SIZES, schedule=QUICK, resume=True)


def test_unknown_contenders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"contenders must be among ours, .*; got magic"):
        run_isqrt_cov(tmp_path, contenders=["magic"])


@pytest.mark.parametrize("name", SUITES)
def test_committed_results_follow_the_schema(name: str) -> None:
    for path in (Path(__file__).parents[2] / "results").rglob(f"{name}--*.json"):
        assert read_results(path)["suite"] == name
