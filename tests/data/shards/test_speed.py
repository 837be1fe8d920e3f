"""Reading shards takes no longer than reading the folder they were written from."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import pytest

from covpool.data.image_set import ImageSet
from covpool.data.order import FolderOrder, Order, ShardOrder
from covpool.data.shards.reader import open_shards
from covpool.data.shards.write import write_shards
from covpool.data.sources import open_images
from tests.data.pictures import SPARROWS, TINY10, needs_sparrows, needs_tiny10


def seconds(images: ImageSet, order: Order, step: int) -> float:
    """Return the CPU seconds of this process, so that other processes do not count."""
    start = time.process_time()
    for i in order.batch(0, step).tolist():
        images.read(i)
    return time.process_time() - start


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [pytest.param(SPARROWS, marks=needs_sparrows), pytest.param(TINY10, marks=needs_tiny10)]
)
def test_shards_are_at_least_as_fast_as_the_folder(path: Path, tmp_path: Path) -> None:
    files = open_images(path, "train")
    write_shards(files, tmp_path / "shards", shard_bytes=2_000_000)
    shards = open_shards(tmp_path / "shards")
    by_folder, by_shards = FolderOrder(len(files), 100, 0), ShardOrder(shards.index.counts, 100, 0, window=4)
    ratios = []
    for _ in range(5):
        for step in range(by_folder.batches(0)):
            ratios.append(seconds(files, by_folder, step) / seconds(shards, by_shards, step))
    assert statistics.median(ratios) >= 1
