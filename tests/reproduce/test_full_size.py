from __future__ import annotations

import shlex

import pytest

from covpool.cli.train import parse
from covpool.reproduce.full_size import IMAGES, ROWS, FullSize, lines
from covpool.train.recipe_files import recipe_names


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.row)
def test_commands_are_commands(row: FullSize) -> None:
    words = shlex.split(row.command())
    assert words[:6] == ["torchrun", "--nproc-per-node", "8", "-m", "covpool", "train"]
    parse(words[6:])


def test_every_recipe_for_imagenet_is_there() -> None:
    assert {row.recipe for row in ROWS} == {name for name in recipe_names() if "imagenet" in name}


def test_arithmetic() -> None:
    resnet = next(row for row in ROWS if row.recipe == "resnet50-imagenet" and not row.changes)
    # 12.9 GFLOP forward by docs/scale.md, and twice that backward.
    assert resnet.gigaflops == pytest.approx(3 * 12.86, rel=0.02)
    rate = 8 * 312e12 * 0.1 / (resnet.gigaflops * 1e9)
    assert resnet.hours() == pytest.approx(IMAGES * 60 / rate / 3600)
    assert f"| {resnet.row} | 60 | 38.4 |" in "\n".join(lines())
