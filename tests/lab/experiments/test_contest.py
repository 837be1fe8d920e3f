"""The contest of heads: halving, resuming, and the table."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from covpool.evaluate.probe.options import DEFAULTS
from covpool.evaluate.probe.options import Setting as Choice
from lab.experiments import contest, contest_table
from lab.experiments.contest import Contest, QuickDropout, factor_of, run_cell
from lab.experiments.contest_heads import (
    CASES,
    ROUNDS,
    SEEDS,
    SPLITS,
    TESTED_ON,
    Setting,
    is_finished,
    settings_of,
    trial_name,
)
from lab.experiments.contest_table import defaults, page, shortfalls, summary
from lab.record import committed_file, read_record

BEST = Setting(1e-2, 0.25, "standardized", "stage")


class Recorded:
    """A contest whose trainings are noted and take no time."""

    expands = True
    case = CASES[1]

    def __init__(self) -> None:
        self.trained: list[Any] = []

    def held_out(self, head: str, setting: Setting, share: float, split: int) -> dict[str, Any]:
        self.trained.append((setting, share, split))
        distance = sum(value != best for value, best in zip(setting, BEST, strict=True))
        return {"top1": 0.9 - 0.1 * distance, "seconds": 1.0}

    def seed(self, head: str, setting: Setting, seed: int, epochs: int) -> dict[str, Any]:
        self.trained.append((setting, epochs, f"seed {seed}"))
        return {"epochs": epochs, "top1": 0.5, "right": "0101" if head == "gap" else "1101", "seconds": 1.0}


def test_the_best_setting_survives_every_round() -> None:
    contest, cell = Recorded(), dict[str, Any]()
    list(run_cell(contest, "attentive", cell))  # type: ignore[arg-type]
    assert cell["setting"] == BEST._asdict()
    count = len(settings_of("attentive", expands=True))
    assert count == 48
    expected = sum(count // 4**k * splits for k, (_, splits) in enumerate(ROUNDS)) + SEEDS
    expected += SPLITS  # the rate beyond the edge of the grid
    expected += 1  # half of the epochs on the last split; the second round has the others
    assert len(contest.trained) == len(set(contest.trained)) == expected


def test_a_rerun_goes_on_after_the_last_training() -> None:
    whole, cell = Recorded(), dict[str, Any]()
    list(run_cell(whole, "gem", cell))  # type: ignore[arg-type]
    interrupted, again, part = Recorded(), Recorded(), dict[str, Any]()
    steps = run_cell(interrupted, "gem", part)  # type: ignore[arg-type]
    for _ in range(30):
        next(steps)
    list(run_cell(again, "gem", part))  # type: ignore[arg-type]
    assert part == cell
    assert interrupted.trained + again.trained == whole.trained


def test_two_processes_write_into_one_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "contest.json"
    monkeypatch.setattr(contest, "resumable_file", lambda record: file)
    monkeypatch.setattr(contest, "CachedSet", lambda *args, **options: None)
    monkeypatch.setattr(contest, "Contest", lambda case, cached: Recorded())
    heads, weights = ("gem", "isqrt_cov"), tmp_path / "weights"
    running = [
        multiprocessing.get_context("fork").Process(
            target=contest.main, args=(tmp_path, tmp_path / "runs", (f"{CASES[1].name}:{head}",), weights)
        )
        for head in heads
    ]
    for process in running:
        process.start()
    for process in running:
        process.join()
    assert [process.exitcode for process in running] == [0, 0]
    held = json.loads(file.read_text("utf-8"))["cells"][CASES[1].name]
    assert {head: len(cell["seeds"]) for head, cell in held.items()} == dict.fromkeys(heads, SEEDS)


def test_dropout_of_the_contest_keeps_the_mean() -> None:
    dropout, x = QuickDropout(0.25), torch.ones(1001, 999, requires_grad=True)
    y = dropout(x)
    assert sorted(y.unique().tolist()) == pytest.approx([0.0, 1 / 0.75])
    assert y.mean().item() == pytest.approx(1.0, abs=0.01)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert dropout.eval()(x) is x


@pytest.mark.parametrize(
    ("gains", "epochs"),
    [
        ({}, 15),  # of equal ones, the fewest
        ({1.0: 0.01}, 60),
        ({2.0: 0.01}, 120),
        ({0.5: 0.01}, 30),
        ({0.25: 0.01}, 15),
        ({0.5: 0.01, 2.0: 0.02}, 120),
        ({2.0: 0.01, 4.0: 0.02}, 240),  # twice as many, until they are not better
    ],
)
def test_the_best_number_of_epochs_on_all_splits_counts(gains: dict[float, float], epochs: int) -> None:
    class Tested(Recorded):
        case = CASES[0]

        def held_out(self, head: str, setting: Setting, share: float, split: int) -> dict[str, Any]:
            trial = super().held_out(head, setting, share, split)
            return trial | {"top1": trial["top1"] + 0.01 * split + gains.get(share, 0.0)}

    contest = Tested()
    cell: dict[str, Any] = {"seeds": {str(k): {"top1": 0.1, "right": "0"} for k in range(SEEDS)}}
    list(run_cell(contest, "gap", cell))  # type: ignore[arg-type]
    assert cell["epochs"] == epochs
    assert {seed.get("epochs", 60) for seed in cell["seeds"].values()} == {epochs}
    trained_again = [one for one in contest.trained if "seed" in str(one[2])]
    assert len(trained_again) == (0 if epochs == 60 else SEEDS)
    factor = factor_of({"cells": {TESTED_ON: {"gap": cell}}}, CASES[1], "gap")
    assert factor == min(1.0, max(0.5, epochs / 60))
    others = Recorded()
    list(run_cell(others, "gap", {}, factor))  # type: ignore[arg-type]
    shares = {one[1] for one in others.trained if "seed" not in str(one[2])}
    tested = {factor * share for share in (0.5, 2.0) if factor * share <= 1}
    assert shares == {factor * share for share in (0.25, 0.5, 1.0)} | tested


@pytest.mark.parametrize(("gains", "epochs"), [({0.5: 0.01}, 30), ({0.25: 0.01}, 15), ({1.0: 0.01}, 60)])
def test_fewer_epochs_are_tested_on_every_set(gains: dict[float, float], epochs: int) -> None:
    class Tested(Recorded):
        def held_out(self, head: str, setting: Setting, share: float, split: int) -> dict[str, Any]:
            trial = super().held_out(head, setting, share, split)
            return trial | {"top1": trial["top1"] + 0.01 * split + gains.get(share, 0.0)}

    contest, cell = Tested(), dict[str, Any]()
    list(run_cell(contest, "gap", cell, 0.5))  # type: ignore[arg-type]
    assert cell["epochs"] == epochs
    assert is_finished(contest.case, "gap", cell)
    del cell["trials"][trial_name(Setting(**cell["setting"]), 1.0, 2)]
    assert not is_finished(contest.case, "gap", cell)


@pytest.mark.parametrize(
    "best",
    [
        Setting(1e-4, 0.25, "raw"),
        Setting(1e-1, 0.0, "raw"),
        Setting(3e-2, 0.75, "raw"),
        Setting(3e-3, 0.25, "raw", weight_decay=0.5),
    ],
)
def test_the_grid_ends_where_it_does_not_help(best: Setting) -> None:
    steps = {
        "lr": (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
        "drop_rate": (0.0, 0.25, 0.5, 0.75),
        "input": ("raw", "standardized"),
        "features": ("head", "stage"),
        "weight_decay": (0.05, 0.5, 5.0),
    }

    class Beyond(Recorded):
        case = CASES[0]  # the only one that tries weight decays

        def held_out(self, head: str, setting: Setting, share: float, split: int) -> dict[str, Any]:
            super().held_out(head, setting, share, split)
            distance = sum(
                abs(values.index(getattr(setting, name)) - values.index(getattr(best, name)))
                for name, values in steps.items()
            )
            return {"top1": 0.9 - 0.01 * distance, "seconds": 1.0}

    seed = {"top1": 0.1, "right": "0", "epochs": 60}
    at_the_edge = {"setting": Setting(3e-3, 0.25, "raw")._asdict(), "epochs": 60}
    cell: dict[str, Any] = {"seeds": {str(k): seed for k in range(SEEDS)}, **at_the_edge}
    list(run_cell(Beyond(), "gap", cell))  # type: ignore[arg-type]
    assert (cell["setting"], cell["epochs"]) == (best._asdict(), 15)  # of equal epochs, the fewest
    assert [one["top1"] for one in cell["seeds"].values()] == [0.5] * SEEDS  # trained with the new setting
    assert is_finished(CASES[0], "gap", cell)
    other = best._replace(weight_decay={0.05: 0.5, 0.5: 5.0}[best.weight_decay])
    del cell["trials"][trial_name(other, 0.25, 2)]
    assert not is_finished(CASES[0], "gap", cell)


def test_long_training_with_dropout_is_tried_on_large_sets() -> None:
    class Long(Recorded):
        case = next(case for case in CASES if case.data == "cub")

        def held_out(self, head: str, setting: Setting, share: float, split: int) -> dict[str, Any]:
            trial = super().held_out(head, setting, share, split)
            gain = 0.1 * share if setting.drop_rate == 0.75 and share > 1 else 0.0
            return trial | {"top1": trial["top1"] + gain}

    cell: dict[str, Any] = {}
    list(run_cell(Long(), "isqrt_cov", cell))  # type: ignore[arg-type]
    assert (cell["setting"]["drop_rate"], cell["epochs"]) == (0.75, 160)
    assert is_finished(Long.case, "isqrt_cov", cell)
    best = Setting(**cell["setting"])
    del cell["trials"][trial_name(best, 1.0, 2)]
    assert not is_finished(Long.case, "isqrt_cov", cell)


def test_a_head_is_finished_only_with_the_test_of_its_epochs() -> None:
    class Tested(Recorded):
        case = CASES[0]

    cell: dict[str, Any] = {}
    list(run_cell(Tested(), "gap", cell))  # type: ignore[arg-type]
    assert is_finished(CASES[0], "gap", cell)
    del cell["trials"][trial_name(Setting(**cell["setting"]), 0.25, 2)]
    assert not is_finished(CASES[0], "gap", cell)
    list(run_cell(Tested(), "gap", cell))  # type: ignore[arg-type]
    assert is_finished(CASES[0], "gap", cell)


def test_an_accuracy_with_trials_left_has_an_asterisk() -> None:
    cell: dict[str, Any] = {}
    list(run_cell(Recorded(), "gem", cell))  # type: ignore[arg-type]
    (complete,) = summary(CASES[1], {"gem": cell})
    del cell["trials"][trial_name(Setting(**cell["setting"]), cell["epochs"] / CASES[1].epochs * 2, 2)]
    (left,) = summary(CASES[1], {"gem": cell})
    assert [contest_table.accuracy(row) for row in (complete, left)] == ["50.0", "50.0*"]


def test_only_attentive_heads_choose_their_features() -> None:
    assert len(settings_of("isqrt_cov", expands=True)) == len(settings_of("attentive", expands=False)) == 24


def test_the_default_of_a_kind_is_the_best_setting_over_its_heads() -> None:
    class Preferring(Recorded):
        def held_out(self, head: str, setting: Setting, share: float, split: int) -> dict[str, Any]:
            best = {"cov": 1e-3, "isqrt_cov": 1e-2, "gap": 3e-3}[head]
            accuracy = 0.8 if setting.lr == best else 0.75 if setting.lr == 3e-3 else 0.5
            return {"top1": accuracy - 0.1 * setting.drop_rate, "seconds": 1.0}

    cells: dict[str, Any] = {}
    for head in ("gap", "cov", "isqrt_cov"):
        list(run_cell(Preferring(), head, cells.setdefault(head, {})))  # type: ignore[arg-type]
    below = shortfalls({"cells": {CASES[1].name: cells}})
    assert {kind: next(iter(settings)) for kind, settings in below.items()} == {
        "average": (3e-3, 0.0),
        "covariance": (3e-3, 0.0),  # 5 points below the best for both heads; the others are 15
    }
    assert next(iter(below["covariance"].values())) == pytest.approx(0.05)


def test_the_defaults_of_probe_are_the_best_of_the_contest() -> None:
    assert defaults(read_record(committed_file("contest"))) == DEFAULTS


@pytest.mark.parametrize(("behind", "default"), [(0.004, (3e-3, 0.0)), (0.006, (1e-3, 0.0))])
def test_of_settings_within_half_a_point_the_highest_rate_is_the_default(
    monkeypatch: pytest.MonkeyPatch, behind: float, default: tuple[float, float]
) -> None:
    below = {Choice(1e-3, 0.0): 0.01, Choice(3e-3, 0.25): 0.01 + behind, Choice(3e-3, 0.0): 0.01 + behind}
    monkeypatch.setattr(contest_table, "shortfalls", lambda record: {"covariance": below})
    assert contest_table.defaults({}) == {"covariance": default}


def test_the_rival_is_chosen_on_held_out_images() -> None:
    cells: dict[str, Any] = {}
    for head in ("gap", "isqrt_cov", "attentive", "simpool"):
        list(run_cell(Recorded(), head, cells.setdefault(head, {})))  # type: ignore[arg-type]
    cells["simpool"]["held_out"] = 0.95
    rows = {row["head"]: row for row in summary(CASES[1], cells)}
    assert rows["isqrt_cov"]["rival"] == "simpool"
    assert rows["isqrt_cov"]["over_gap"]["mean"] == pytest.approx(0.25)
    text = page({"cells": {CASES[1].name: cells}})
    assert "| `simpool`, trained | 95.0 | 50.0 |" in text


def test_a_third_of_every_class_is_held_out() -> None:
    import numpy as np

    labels = np.repeat([0, 1, 2], 9)
    cached = SimpleNamespace(
        cached={"train": SimpleNamespace(labels=labels)},
        all_of=lambda split: np.arange(27),
        probing=SimpleNamespace(expands=False),
    )
    contest = Contest(CASES[0], cached)  # type: ignore[arg-type]
    for number in range(3):
        train, aside = contest.split(number)
        assert np.bincount(labels[aside]).tolist() == [3, 3, 3]
        assert sorted([*train, *aside]) == list(range(27))
    assert not np.array_equal(contest.split(0)[1], contest.split(1)[1])


def test_a_closed_form_chooses_its_channels_on_held_out_images() -> None:
    class Closed(Recorded):
        def split(self, number: int) -> tuple[str, str]:
            return "rest", "aside"

        train, test = "all", "test"

        def closed(self, head: str, dim: int, ids: Any, split: str, measured: Any) -> dict[str, Any]:
            self.trained.append((head, dim, ids, measured))
            return {"top1": 0.8 if dim == 128 else 0.5, "solver": "ridge", "right": "11", "seconds": 1.0}

    contest, cell = Closed(), dict[str, Any]()
    list(run_cell(contest, "isqrt_cov, closed form", cell))  # type: ignore[arg-type]
    assert cell["setting"] == {"dim": 128}
    assert [one for one in contest.trained if one[3] == "test"] == [("isqrt_cov", 128, "all", "test")]
