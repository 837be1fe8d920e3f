from __future__ import annotations

from pathlib import Path

import pytest

from covpool.reproduce.budget import affordable_seeds, estimated_seconds, seconds_of
from covpool.reproduce.miniature.configuration import SMALLEST, Configuration
from covpool.reproduce.miniature.tiny_imagenet import write_subset


def runs(seeds: int) -> list[Configuration]:
    return [Configuration("alexnet", pool, seed=seed) for seed in range(seeds) for pool in ("gap", "cov")]


@pytest.mark.parametrize(("budget", "seeds"), [(60.0, 3), (59.0, 2), (39.9, 1), (20.0, 1)])
def test_fewer_seeds_not_fewer_rows(budget: float, seeds: int) -> None:
    assert affordable_seeds(runs, lambda _: 10.0, 3, budget) == seeds


def test_not_even_one_seed() -> None:
    with pytest.raises(ValueError, match="one seed of all takes about 20 s, more than the budget of 19 s"):
        affordable_seeds(runs, lambda _: 10.0, 3, 19.0)


def test_words() -> None:
    assert seconds_of("1.5h") == 5400
    with pytest.raises(ValueError, match="as 8h or 90m; got '8 hours'"):
        seconds_of("8 hours")


def test_an_estimate_grows_with_the_work(tiny_imagenet: Path, tmp_path: Path) -> None:
    write_subset(tiny_imagenet, 2, tmp_path / "a.csv")
    small = estimated_seconds(Configuration("alexnet", "gap"), SMALLEST, tmp_path / "a.csv")
    large = estimated_seconds(Configuration("resnet26", "isqrt_cov"), SMALLEST, tmp_path / "a.csv")
    assert 0 < small < large < 600
