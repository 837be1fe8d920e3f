"""The cost of the training loop. The figures are printed; the targets assume an idle machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from covpool.data.sources import open_images
from lab.bench.training import loop_against_bare, shards_against_folder, two_processes_against_one
from tests.data.pictures import TINY10, needs_tiny10

pytestmark = pytest.mark.slow


def test_the_loop_costs_less_than_a_twentieth(capsys: pytest.CaptureFixture[str]) -> None:
    found = loop_against_bare(rounds=15)
    with capsys.disabled():
        print(f"\nloop over bare, images per second: {found['ratio']:.3f}")
    assert found["ratio"] >= 0.95


@needs_tiny10
def test_shards_are_read_as_fast_as_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    found = shards_against_folder(open_images(Path(TINY10), "val"), rounds=9)
    with capsys.disabled():
        print(
            f"\nshards over folder, images per second: {found['ratio']:.3f} read, "
            f"{found['ratio of batches']:.3f} decoded into batches"
        )
    assert found["ratio"] >= 1.0


def test_a_second_process_adds_a_core(capsys: pytest.CaptureFixture[str]) -> None:
    found = two_processes_against_one(rounds=9)
    with capsys.disabled():
        print(f"\ntwo processes over one, images per second: {found['ratio']:.3f}")
    assert found["ratio"] > 1.0
