"""The two stages of fine-tuning are announced, and the remaining time is per stage."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from covpool import create_model, terminal
from covpool.processes import Processes
from covpool.training.journal import Journal
from covpool.training.recipe_files import read_recipe
from covpool.training.run_folder import RunFolder
from covpool.training.step import Outcome


def test_the_time_left_is_that_of_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    changes = {"schedule.epochs": 4, "schedule.head_first": 0.5, "trackers": []}
    recipe = read_recipe("finetune", {**changes, "out": str(tmp_path)})
    journal = Journal(recipe, Processes(0, 1, torch.device("cpu")), RunFolder(tmp_path), 0, 100, 4)
    outcome = Outcome(loss=1.0, top1=0.5, gradient_norm=1.0, skipped=False, counts=False)
    with journal:
        journal.begin(create_model("test_resnet", dim=8, num_classes=2), 3200)
        for step in range(1, 401):
            now[0] += 1 if step <= 200 else 5  # a step is slower once the backbone trains
            journal.step(step, outcome, 0.1)
    lines = capsys.readouterr().err.splitlines()
    assert "stage 1 of 2: epochs 1 to 2, pooling and classifier; backbone frozen" in lines
    assert "stage 2 of 2: epochs 3 to 4, all layers, slower" in lines
    matches = [
        re.findall(r"epoch (\d)/4, step (\d+) of 100, (.+ left in stage \d of 2)", line) for line in lines
    ]
    shown = [match for found in matches for match in found]
    assert shown[0] == ("1", "30", "2 min 50 s left in stage 1 of 2")  # 170 steps of 1 s
    second = next(one for one in shown if one[0] == "3")
    steps = 200 - int(second[1])
    assert second[2] == f"{terminal.duration(5 * steps)} left in stage 2 of 2"
