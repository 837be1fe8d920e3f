"""Every experiment in its smallest form."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lab.reproduce.experiments import EXPERIMENTS, Experiment
from lab.reproduce.networks import SMALLEST
from lab.reproduce.results import known_runs
from lab.reproduce.runner import Place, left, plan, report, run_all, run_experiments

ROWS = 4


def few_rows(experiment: Experiment) -> Experiment:
    """Keep the observed rows, or else some of the rows, and the reference."""
    every = -(-len(experiment.rows) // ROWS)
    kept = experiment.observed or [row.label for row in experiment.rows[::every]]
    rows = tuple(row for row in experiment.rows if row.label in (*kept, experiment.reference))
    return dataclasses.replace(experiment, rows=rows)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=lambda experiment: experiment.name)
def test_smallest_form(experiment: Experiment, tiny_imagenet: Path, tmp_path: Path) -> None:
    messages: list[str] = []
    small = few_rows(experiment)
    place = Place(tiny_imagenet, tmp_path / "runs", tmp_path / "out", SMALLEST)
    (file,) = run_experiments([small], place, seeds=1, log=messages.append)
    names = [one.name for one in plan([small], 1)]
    expected = [f"run {number} of {len(names)}: {name}" for number, name in enumerate(names, 1)]
    assert messages == [f"{len(names)} runs, 1 seed", *expected]
    results = json.loads(file.read_bytes())
    assert [run["label"] for run in results["runs"]] == [row.label for row in small.rows]
    assert set(results["times"]) == ({row.label for row in small.rows} if small.reference else set())
    assert set(results["observations"]) == set(small.observed)
    for epochs in results["observations"].values():
        assert [epoch["epoch"] for epoch in epochs] == [0, 1]
        assert all(epoch["gradient_rms"] > 0 for epoch in epochs)
        assert all(epoch["before"]["condition"] > 1 for epoch in epochs)
        assert all(epoch["after"]["condition"] > 1 for epoch in epochs if small.name == "approximation")
    assert len(file.with_suffix(".csv").read_text().splitlines()) == 1 + len(small.rows)
    rows = [line.split(" | ")[0].strip("| ") for line in report(file).splitlines() if line.startswith("|")]
    assert rows[2:] == [row.label for row in small.rows]


def finished(runs: Path) -> list[Path]:
    return [path for path in runs.glob("*/summary.json") if json.loads(path.read_bytes())["finished"]]


@pytest.mark.slow
def test_a_killed_run_goes_on(tiny_imagenet: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.lab.reproduce.smallest", str(tiny_imagenet), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    summaries = tmp_path / "runs"
    deadline = time.monotonic() + 120
    while not finished(summaries):  # until the first of three is done
        assert first.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait()
    done = {path: path.stat().st_mtime_ns for path in finished(summaries)}
    assert len(done) < 3
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=240)
    (file,) = tmp_path.glob("out/*/*.json")
    assert {run["label"] for run in json.loads(file.read_bytes())["runs"]} == {
        "ResNet",
        "MPN-COV",
        "iSQRT-COV",
    }
    assert {path: path.stat().st_mtime_ns for path in done} == done  # they did not run again
    assert len(finished(summaries)) == 3
    assert len(file.with_suffix(".csv").read_text().splitlines()) == 1 + 3


@pytest.mark.slow
def test_seeds_are_added_to_results_without_their_runs(tiny_imagenet: Path, tmp_path: Path) -> None:
    gap, exact = EXPERIMENTS["figure4"].rows[:2]
    curves = dataclasses.replace(EXPERIMENTS["figure4"], rows=(gap, exact))
    spectra = dataclasses.replace(EXPERIMENTS["approximation"], rows=(exact,), observed=(exact.label,))
    place = Place(tiny_imagenet, tmp_path / "first", tmp_path / "out", SMALLEST)
    (file,) = run_experiments([curves], place, seeds=1, log=str)
    before = json.loads(file.read_bytes())["runs"]

    known = known_runs([curves], place.out, SMALLEST)
    place = dataclasses.replace(place, runs=tmp_path / "second", known=known)
    assert not left([curves], 1, place)
    # Only the observed run is trained again, because its folder is gone.
    assert [one.pool for one in left([curves, spectra], 1, place)] == ["mpn_cov"]
    run_experiments([curves], place, seeds=2, log=str)
    after = json.loads(file.read_bytes())["runs"]
    assert after[:2] == before
    assert [(run["label"], run["seed"]) for run in after[2:]] == [(gap.label, 1), (exact.label, 1)]
    assert len(finished(tmp_path / "second")) == 2


@pytest.mark.slow
def test_runs_of_another_machine_are_known_and_its_times_are_not(tiny_imagenet: Path, tmp_path: Path) -> None:
    exact = EXPERIMENTS["approximation"].rows[-1]
    spectra = dataclasses.replace(
        EXPERIMENTS["approximation"], rows=(exact,), observed=(exact.label,), reference=exact.label
    )
    curves = dataclasses.replace(EXPERIMENTS["figure2"], rows=(exact,))
    place = Place(tiny_imagenet, tmp_path / "first", tmp_path / "out", SMALLEST)
    (file,) = run_experiments([spectra], place, seeds=1, log=str)
    before = json.loads(file.read_bytes())
    file.rename(file.with_name("approximation--another-64c--cpu.json"))

    known = known_runs([spectra, curves], place.out, SMALLEST)
    place = dataclasses.replace(place, runs=tmp_path / "second", known=known)
    assert not left([spectra, curves], 1, place)
    run_experiments([spectra, curves], place, seeds=1, log=str)
    after = json.loads(file.read_bytes())
    assert not (tmp_path / "second" / exact.configuration.name).exists()
    assert after["runs"] == before["runs"]
    assert after["observations"] == before["observations"]
    assert after["times"].keys() == before["times"].keys()
    assert after["times"] != before["times"]


@pytest.mark.slow
def test_an_experiment_keeps_a_run_of_its_own(tiny_imagenet: Path, tmp_path: Path) -> None:
    row = EXPERIMENTS["approximation"].rows[-1]
    both = [dataclasses.replace(EXPERIMENTS[name], rows=(row,)) for name in ("figure2", "approximation")]
    both[1] = dataclasses.replace(both[1], observed=(row.label,))
    for number, one in enumerate(both):  # the same configuration, trained twice
        place = Place(tiny_imagenet, tmp_path / str(number), tmp_path / "out", SMALLEST)
        (file,) = run_experiments([one], place, seeds=1, log=str)
    results = json.loads(file.read_bytes())
    results["runs"][0]["seconds"] = 12345.0  # marks this run
    file.write_text(json.dumps(results))
    third = dataclasses.replace(EXPERIMENTS["table3"], rows=(row,))
    known = known_runs([*both, third], tmp_path / "out", SMALLEST)
    seconds = [known[one.name][row.configuration.name]["seconds"] for one in (*both, third)]
    assert seconds[1] == 12345.0
    assert seconds[2] == seconds[0] < 12345.0


@pytest.mark.slow
def test_runs_of_another_scale_are_not_known(tiny_imagenet: Path, tmp_path: Path) -> None:
    one_row = dataclasses.replace(EXPERIMENTS["figure4"], rows=EXPERIMENTS["figure4"].rows[:1])
    run_experiments([one_row], Place(tiny_imagenet, tmp_path, tmp_path, SMALLEST), seeds=1, log=str)
    assert len(known_runs([one_row], tmp_path, SMALLEST)["figure4"]) == 1
    assert not known_runs([one_row], tmp_path, dataclasses.replace(SMALLEST, classes=3))["figure4"]


def test_all_of_a_seed_before_the_next() -> None:
    planned = plan(list(EXPERIMENTS.values()), 3)
    assert [one.seed for one in planned] == sorted(one.seed for one in planned)
    assert len({one.name for one in planned}) == len(planned)


def test_an_unknown_experiment() -> None:
    with pytest.raises(ValueError, match="table9"):
        run_all("table9")


def test_data_is_asked_for() -> None:
    with pytest.raises(ValueError, match="give --data the folder tiny-imagenet-200"):
        run_all("figure2")
