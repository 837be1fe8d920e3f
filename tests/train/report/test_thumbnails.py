"""Thumbnails of real images, from folders and shards, by their names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from covpool.data.image_set import ImageSet, Subset
from covpool.data.shards.reader import open_shards
from covpool.data.shards.write import write_shards
from covpool.data.sources import open_images
from covpool.train.report.record import Predictions, read_run
from covpool.train.report.thumbnails import SIDE, most_confident_errors, tiles
from tests.data.pictures import SPARROWS, needs_sparrows
from tests.data.trees import plant
from tests.train.report.runs import labelled, write_run


@pytest.fixture
def sparrows() -> ImageSet:
    images = open_images(SPARROWS, "test")
    return Subset(images, np.arange(0, len(images), 12))


def predictions_of(images: ImageSet, folder: Path) -> Predictions:
    return read_run(write_run(folder, images.classes, labelled(images), accuracy=0.5)).predictions


@needs_sparrows
def test_the_most_confident_errors_are_shown(sparrows: ImageSet, tmp_path: Path) -> None:
    predictions = predictions_of(sparrows, tmp_path)
    shown = tiles(predictions, most_confident_errors(predictions, 5), sparrows)
    confidences = [tile.confidence for tile in shown]
    wrong = np.sort(predictions.confidence[~predictions.right])[::-1]
    assert confidences == wrong[:5].tolist()
    by_name = {sparrows.name(i): i for i in range(len(sparrows))}
    for tile in shown:
        assert tile.label != tile.predicted
        assert tile.label == sparrows.classes[int(sparrows.labels[by_name[tile.name]])]
        assert tile.picture is not None
        assert max(tile.picture.size) == SIDE
        assert tile.uri.startswith("data:image/jpeg;base64,/9j/")


@needs_sparrows
def test_shards_give_the_same_pictures(sparrows: ImageSet, tmp_path: Path) -> None:
    write_shards(sparrows, tmp_path / "shards")
    shards = open_shards(tmp_path / "shards")
    predictions = predictions_of(sparrows, tmp_path)
    worst = most_confident_errors(predictions, 4)
    assert [tile.uri for tile in tiles(predictions, worst, shards)] == [
        tile.uri for tile in tiles(predictions, worst, sparrows)
    ]


def test_images_that_are_bad_or_gone_cost_no_report(tmp_path: Path) -> None:
    plant(tmp_path / "set", "a/1.jpg", "a/2.jpg", "b/1.jpg", "b/2.jpg")
    images = open_images(tmp_path / "set")
    predictions = predictions_of(images, tmp_path / "run")
    (tmp_path / "set/a/1.jpg").write_bytes(b"nothing")
    (tmp_path / "set/b/1.jpg").unlink()
    found = {tile.name: tile.picture for tile in tiles(predictions, range(4), images)}
    assert [name for name, picture in found.items() if picture is None] == ["a/1.jpg", "b/1.jpg"]
    assert all(tile.uri == "" for tile in tiles(predictions, range(4), None))
