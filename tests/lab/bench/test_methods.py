"""The benchmark of the pooling methods: the methods it measures and the results it writes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import Tensor, nn

from covpool.device import chosen_device
from covpool.nn.pooling import METHODS
from covpool.processes import Processes
from covpool.provenance import Results
from lab.bench.layers import (
    REFERENCE,
    SIZES,
    VARIANTS,
    Entry,
    Problem,
    Size,
    bytes_kept_for_backward,
    chosen_entries,
    chosen_sizes,
    measure_layers,
)
from lab.bench.methods import run_methods
from lab.bench.steps import POOLS, Setting, _results, from_two_processes
from lab.bench.table import LAYERS
from lab.bench.timing import Schedule
from lab.record import read_record, write_record
from tests.lab.bench.conftest import QUICK, TINY

pytestmark = pytest.mark.slow


def test_file_is_named_after_the_suite(methods_file: Path) -> None:
    suite, _, device = methods_file.stem.split("--")
    assert (suite, device) == ("methods", "cpu")


def test_results_hold_every_entry_and_both_decompositions(methods_results: Results) -> None:
    labels = [entry.label for entry in chosen_entries()]
    assert list(methods_results["arguments"]["entries"]) == labels
    (size,) = methods_results["layers"].values()
    assert list(size["entries"]) == labels
    assert list(size["decompositions"]) == ["eigh", "svd"]
    for found in [*size["entries"].values(), *size["decompositions"].values()]:
        assert found["value"]["rounds"] == found["value_and_gradient"]["rounds"] == QUICK.rounds
    assert size["entries"]["isqrt_cov"]["value_and_gradient"]["ratio"]["q3"] == 1.0
    assert methods_results["training"] is None


def test_memory_is_what_autograd_keeps(methods_results: Results) -> None:
    size = methods_results["layers"]["tiny"]
    kept = {label: found["bytes_kept_per_image"] for label, found in size["entries"].items()}
    assert kept["gap"] == 0
    assert kept["isqrt_cov steps=3"] < kept["isqrt_cov"]
    # The 16×16 eigenvectors and the 16 eigenvalues.
    assert size["decompositions"]["eigh"]["bytes_kept_per_image"] == 4 * (16 * 16 + 16)


def test_parameters_of_a_layer_have_their_gradient_and_are_not_counted_as_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Weighted(METHODS["gap"]):  # type: ignore[misc]
        def __init__(self, channels: int) -> None:
            super().__init__(channels)
            self.weight = nn.Parameter(torch.ones(channels))
            self.gradients = 0
            self.weight.register_hook(lambda grad: setattr(self, "gradients", self.gradients + 1))

        def forward(self, x: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x, weights) * self.weight

    made = []
    monkeypatch.setitem(METHODS, "weighted", lambda channels: made.append(Weighted(channels)) or made[-1])
    entries = [Entry("isqrt_cov", {}), Entry("weighted", {})]
    found = measure_layers(Problem(TINY), entries, QUICK)["entries"]["weighted"]
    assert found["bytes_kept_per_image"] == 4 * TINY.channels  # the means, without the weights
    assert made[0].gradients > 0


def test_progress_is_told_of_every_round(tmp_path: Path) -> None:
    reports: list[tuple[str, int, int]] = []

    class Listener:
        def __init__(self, what: str) -> None:
            self.what = what

        def __enter__(self) -> Any:
            return lambda done, total: reports.append((self.what, done, total))

        def __exit__(self, *error: object) -> None:
            pass

    arguments: dict[str, Any] = {"sections": ["layers"], "methods": ["gap"], "sizes": [TINY]}
    run_methods(tmp_path, **arguments, schedule=QUICK, progress=Listener)
    assert reports == [
        (f"rounds of layers at tiny, {what}", done, QUICK.rounds)
        for what in ("value", "value and gradient")
        for done in range(1, QUICK.rounds + 1)
    ]


def test_ratios_of_steps_are_taken_within_rounds() -> None:
    """Noise shared by all samples of a round cancels in the ratios."""
    rounds = [
        {
            "isqrt_cov on 1": 2.0 * noise,
            "mpn_cov on 1": 3.0 * noise,
            "isqrt_cov on 2": 1.0 * noise,
            "mpn_cov on 2": 2.0 * noise,
        }
        for noise in (1.0, 10.0, 3.0)
    ]
    found = _results(8, rounds, ("isqrt_cov", "mpn_cov"))
    assert found["one"]["mpn_cov"]["ratio"] == {"median": 1.5, "q1": 1.5, "q3": 1.5}
    assert found["two"]["mpn_cov"]["ratio"] == {"median": 2.0, "q1": 2.0, "q3": 2.0}
    assert found["two_over_one"]["isqrt_cov"] == {"median": 2.0, "q1": 2.0, "q3": 2.0}
    assert found["one"]["isqrt_cov"]["seconds"]["median"] == 6.0


def test_steps_on_one_process_and_on_two(tmp_path: Path) -> None:
    setting = Setting(pools=("isqrt_cov", "gap"), image_size=64, classes=10, hidden=(16, 16))
    path = run_methods(tmp_path, sections=["training"], batch_sizes=(4, 8), step_rounds=2, setting=setting)
    results = read_record(path)
    assert results["layers"] == {}
    trained = results["training"]["steps"]
    assert [found["batch"] for found in trained] == [4, 8]
    for found in trained:
        for count in ("one", "two"):
            assert list(found[count]) == ["isqrt_cov", "gap"]
            assert all(timing["rounds"] == 2 for timing in found[count].values())


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"sections": ["magic"]}, "sections must be one of 'layers', 'training'; got 'magic'"),
        ({"batch_sizes": [6, 7]}, "batch_sizes must be even and at least 4; got 7"),
        ({"batch_sizes": [2]}, "batch_sizes must be even and at least 4; got 2"),
        ({"step_rounds": 0}, "step_rounds must be at least 1"),
        ({"sizes": ["8by8"]}, "sizes must be among"),
    ],
)
def test_wrong_arguments_are_named_before_anything_runs(wrong: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        run_methods(tmp_path, methods=["gap"], **wrong)
    assert not list(tmp_path.iterdir())


def test_results_without_the_reference_are_not_written(methods_results: Results, tmp_path: Path) -> None:
    del methods_results["layers"]["tiny"]["entries"]["isqrt_cov"]
    with pytest.raises(jsonschema.ValidationError):
        write_record(tmp_path / "broken.json", methods_results)


def test_every_method_is_in_the_suite() -> None:
    entries = chosen_entries()
    assert {entry.method for entry in entries} == set(METHODS)
    assert max(Counter(entry.label for entry in entries).values()) == 1
    for method, variants in VARIANTS.items():
        assert sum(entry.method == method for entry in entries) == len(variants)


def test_a_method_that_is_added_is_in_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "another", METHODS["gap"])
    assert Entry("another", {}) in chosen_entries()


def test_variants_are_of_methods_there_are() -> None:
    assert set(VARIANTS) <= set(METHODS)


def test_every_row_of_the_paper_has_one_of_ours() -> None:
    labels = [entry.label for entry in chosen_entries()]
    assert set(LAYERS) <= set(labels)
    assert REFERENCE in labels
    assert set(POOLS) <= set(METHODS)


def test_methods_can_be_chosen_and_the_reference_stays() -> None:
    assert [entry.label for entry in chosen_entries(["gap"])] == [
        "gap",
        "isqrt_cov",
        "isqrt_cov steps=3",
        "isqrt_cov iteration=fitted steps=3",
        "isqrt_cov iteration=fitted steps=4",
        "isqrt_cov normalization=frobenius",
    ]
    with pytest.raises(ValueError, match="got 'magic'"):
        chosen_entries(["magic"])


def test_an_entry_is_the_layer_with_its_options() -> None:
    layer = Entry("isqrt_cov", {"steps": 3}).layer(6)
    x = torch.randn(2, 6, 9)
    assert torch.equal(layer(x), METHODS["isqrt_cov"](6, iteration="paper", steps=3)(x))
    assert layer.training
    # Without the option ``iteration``, an entry uses the paper's iteration.
    assert torch.equal(Entry(REFERENCE, {}).layer(6)(x), METHODS["isqrt_cov"](6, iteration="paper")(x))
    assert not torch.equal(Entry(REFERENCE, {"iteration": "fitted"}).layer(6)(x), layer(x))


FEATURES = torch.randn(2, 16, 9)


def test_a_storage_is_counted_once_and_the_input_not_at_all() -> None:
    def pool(x: Tensor) -> Tensor:
        doubled = 2 * x
        return doubled.bmm(doubled.mT).bmm(doubled)

    features, first_product = 2 * 16 * 9, 2 * 16 * 16
    assert bytes_kept_for_backward(pool, FEATURES) == 4 * (features + first_product)
    assert bytes_kept_for_backward(lambda x: x * x, FEATURES) == 0


def summed(processes: Processes, first: int) -> Iterator[tuple[int, float, int]]:
    for number in (first, first + 1):
        total = processes.sum_(torch.tensor([float(number + processes.rank)]))
        yield os.getpid(), total.item(), torch.get_num_threads()


def failing(processes: Processes) -> Iterator[int]:
    yield 1
    raise RuntimeError("as it was told")


def test_two_processes_of_one_thread_work_together() -> None:
    found = list(from_two_processes(summed, 10))
    assert [(total, threads) for _, total, threads in found] == [(21.0, 1), (23.0, 1)]
    assert os.getpid() not in {process for process, _, _ in found}


def test_what_is_raised_there_is_raised_here() -> None:
    with pytest.raises(Exception, match="as it was told"):
        list(from_two_processes(failing))


def test_sizes_are_named_or_given_as_channels_and_positions() -> None:
    assert chosen_sizes(None) == list(SIZES.values())
    assert chosen_sizes(["7x7", "64:49"], batch=3) == [Size("7x7", 256, 49, 3), Size("64:49", 64, 49, 3)]
    with pytest.raises(ValueError, match="sizes must be among"):
        chosen_sizes(["8by8"])


def test_problem_is_the_same_every_time() -> None:
    again = Problem(TINY)
    assert torch.equal(again.features, Problem(TINY).features)
    assert torch.equal(again.upstream, Problem(TINY).upstream)
    assert not torch.equal(Problem(TINY, seed=1).features, Problem(TINY).features)


@pytest.mark.slow
def test_the_device_is_measured(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    device = chosen_device(pytestconfig.getoption("--device")).type
    schedule = Schedule(rounds=2, warmup=1, sample_seconds=0.001)
    path = run_methods(
        tmp_path,
        sections=["layers"],
        methods=["gap"],
        sizes=["8:9"],
        batch=2,
        schedule=schedule,
        device=device,
    )
    assert read_record(path, "methods")["device"] == device
