"""One folder of features for calls that need different arrays, one after another and at the same time."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from covpool.data.image_set import ImageSet
from covpool.evaluate.probe.features import Extractor, frozen_config
from covpool.inference import store
from covpool.inference.store import CachedFeatures
from covpool.models.config import ModelConfig
from covpool.models.create import build_model
from tests.data.memory_images import MemoryImages, memory_images
from tests.evaluate.probe.small_probing import OPTIONS

COUNT, BATCH = 16, 4


class StoppedError(Exception):
    pass


@pytest.fixture(autouse=True)
def _often_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SECONDS_BETWEEN_SAVES", 0.0)


def pictures(bad: int) -> MemoryImages:
    whole = memory_images(COUNT)
    files = [b"no image" if i == bad else file for i, file in enumerate(whole.files)]
    return dataclasses.replace(whole, files=files)


def extracted(
    cache: Path, *, with_maps: bool, stop_at: int = COUNT + 1, images: ImageSet | None = None
) -> CachedFeatures:
    """Extract features with a new extractor, as another process does."""
    images = images or memory_images(COUNT)
    config = ModelConfig(OPTIONS.model, num_classes=2, image_size=OPTIONS.image_size)
    model = build_model(frozen_config(config), checkpoint_path="weights.pth")
    options = dataclasses.replace(OPTIONS, extract_batch=BATCH)
    arrays = {"features"} if with_maps else set()
    extractor = Extractor(model, options, cache, arrays, torch.device("cpu"))

    def stop(done: int, total: int) -> None:
        if done >= stop_at:
            raise StoppedError

    return extractor.extract(images, extractor.store(images, lambda done, total: None), stop)


def assert_same(found: CachedFeatures, wanted: CachedFeatures) -> None:
    assert found.usable.tolist() == wanted.usable.tolist()
    assert found.arrays.keys() == wanted.arrays.keys()
    for name, array in found.arrays.items():
        np.testing.assert_array_equal(array, wanted.arrays[name], err_msg=name)


def test_maps_that_were_left_half_way_are_not_taken_for_whole(tmp_path: Path) -> None:
    images = pictures(bad=9)
    with pytest.raises(StoppedError):
        extracted(tmp_path / "cache", with_maps=True, stop_at=2 * BATCH, images=images)
    extracted(tmp_path / "cache", with_maps=False, images=images)  # completes the averages
    found = extracted(tmp_path / "cache", with_maps=True, images=images)
    assert_same(found, extracted(tmp_path / "whole", with_maps=True, images=images))
    assert found.arrays["features"][found.usable].any(axis=(2, 3, 4)).all()


def test_arrays_that_are_unequally_far_are_all_filled(tmp_path: Path) -> None:
    images = pictures(bad=5)
    with pytest.raises(StoppedError):
        extracted(tmp_path / "cache", with_maps=True, stop_at=2 * BATCH, images=images)
    with pytest.raises(StoppedError):
        extracted(tmp_path / "cache", with_maps=False, stop_at=4 * BATCH, images=images)
    found = extracted(tmp_path / "cache", with_maps=True, images=images)
    assert_same(found, extracted(tmp_path / "whole", with_maps=True, images=images))


def test_averages_in_use_stay_while_maps_are_added(tmp_path: Path) -> None:
    in_use = extracted(tmp_path / "cache", with_maps=False).arrays["average"]
    before = in_use.copy()
    with pytest.raises(StoppedError):  # a complete run would recompute lost features
        extracted(tmp_path / "cache", with_maps=True, stop_at=BATCH)
    np.testing.assert_array_equal(in_use, before)
    extracted(tmp_path / "cache", with_maps=True)
    (file,) = (tmp_path / "cache").rglob("average.npy")
    np.testing.assert_array_equal(np.load(file), before)


def test_an_array_made_anew_leaves_the_one_in_use_alone(tmp_path: Path) -> None:
    extracted(tmp_path / "cache", with_maps=False)
    (file,) = (tmp_path / "cache").rglob("average.npy")
    np.save(file, np.ones((COUNT, 2, 3), np.float16))  # of another shape
    in_use = np.load(file, mmap_mode="r")
    found = extracted(tmp_path / "cache", with_maps=False)
    assert (in_use == 1).all()
    assert_same(found, extracted(tmp_path / "whole", with_maps=False))
    assert sorted(path.name for path in file.parent.iterdir()) == [
        ".covpool-lock",
        "average.npy",
        "manifest.json",
    ]


def test_features_that_changed_on_the_disk_are_computed_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each batch has its own hash, so only features from the damaged part on are computed again."""
    extracted(tmp_path / "cache", with_maps=True)
    wanted = extracted(tmp_path / "whole", with_maps=True)
    for file in sorted((tmp_path / "cache").rglob("*.npy")):
        data = bytearray(file.read_bytes())
        data[-50:] = np.random.default_rng(0).bytes(50)
        file.write_bytes(data)
        caplog.clear()
        assert_same(extracted(tmp_path / "cache", with_maps=True), wanted)
        assert f"{file.name} changed after it was written" in caplog.text
        assert f"from image {COUNT - BATCH} on" in caplog.text
    caplog.clear()
    extracted(tmp_path / "cache", with_maps=True)
    assert not caplog.text
