"""Folders of features, without a network."""

from __future__ import annotations

from pathlib import Path

from covpool.inference.store import CacheFolder, Shapes


def test_bad_images_of_one_folder_are_not_those_of_another(tmp_path: Path) -> None:
    shapes = Shapes(None, 4, None)
    first, second = (CacheFolder(tmp_path / name, 3, shapes) for name in ("first", "second"))
    first.state()["bad"].append(2)
    assert second.state() == {"done": 0, "bad": [], "seconds": 0.0}


def test_room_is_wanted_only_for_what_is_not_there(tmp_path: Path) -> None:
    tmp_path.joinpath("cache").mkdir()
    averages = CacheFolder(tmp_path / "cache", 3, Shapes(None, 4, None))
    averages.begin()
    assert averages.missing_bytes() == 0
    both = CacheFolder(tmp_path / "cache", 3, Shapes((5, 2, 2), 4, None))
    assert both.missing_bytes() == 2 * 3 * 2 * 5 * 2 * 2


def test_averages_alone_take_little_room() -> None:
    maps, averages = Shapes((320, 7, 7), 1280, None), Shapes(None, 1280, None)
    assert maps.bytes(1000) == 2 * 1000 * 2 * (320 * 49 + 1280)
    assert averages.bytes(1000) == 2 * 1000 * 2 * 1280
