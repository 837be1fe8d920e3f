"""Feature stores, without a network."""

from __future__ import annotations

from pathlib import Path

import torch

from covpool.data.image_set import ImageSet
from covpool.data.loader import BadImage
from covpool.data.look import Content
from covpool.inference.forward import Result
from covpool.inference.store import FeatureStore, State
from tests.data.memory_images import memory_images


def a_store(folder: Path, **shapes: tuple[int, ...]) -> FeatureStore:
    return FeatureStore(folder, {"of": "sparrows"}, 3, shapes)


def fill(store: FeatureStore) -> None:
    images = memory_images(3)

    def run(part: ImageSet) -> list[Result]:
        ids = torch.arange(len(part)).numpy()
        outputs = {name: torch.ones(2, len(part), *shape) for name, shape in store.shapes.items()}
        return [Result(ids, ids, outputs, ())]

    store.fill(images, Content("", b""), run, lambda done, total: None)


def test_bad_images_of_one_store_are_not_those_of_another(tmp_path: Path) -> None:
    first, second = (a_store(tmp_path / name, average=(4,)) for name in ("first", "second"))
    first.state().bad[2] = BadImage("a.jpg", "unreadable", "it is empty")
    assert second.state() == State(0, {}, 0.0)


def test_only_missing_arrays_need_room(tmp_path: Path) -> None:
    averages = a_store(tmp_path / "cache", average=(4,))
    fill(averages)
    assert averages.missing_bytes() == 0
    both = a_store(tmp_path / "cache", average=(4,), features=(5, 2, 2))
    assert both.missing_bytes() == 2 * 3 * 2 * 5 * 2 * 2


def test_features_of_another_key_are_not_used(tmp_path: Path) -> None:
    fill(a_store(tmp_path, average=(4,)))
    assert a_store(tmp_path, average=(4,)).state().done == 3
    other = FeatureStore(tmp_path, {"of": "auks"}, 3, {"average": (4,)})
    assert (other.state().done, other.is_begun()) == (0, False)


def test_averages_alone_take_little_room(tmp_path: Path) -> None:
    maps = FeatureStore(tmp_path, {}, 1000, {"features": (320, 7, 7), "average": (1280,)})
    averages = FeatureStore(tmp_path, {}, 1000, {"average": (1280,)})
    assert maps.bytes() == 2 * 1000 * 2 * (320 * 49 + 1280)
    assert averages.bytes() == 2 * 1000 * 2 * 1280
