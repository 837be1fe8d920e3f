"""Features on disk: they match the images and weights, are complete, and respect the size limit."""

from __future__ import annotations

import dataclasses
import errno
import multiprocessing
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

from covpool.data.image_set import ImageFiles
from covpool.evaluate.probe import probe
from covpool.evaluate.probe.probing import Probed
from covpool.models.model import PooledClassifier
from tests.data.pictures import needs_sparrows
from tests.evaluate.probe.small_probing import OPTIONS, SPECIES
from tests.evaluate.test_lock import hold

pytestmark = needs_sparrows
GAP = dataclasses.replace(OPTIONS, heads=("gap",), seeds=1, epochs=1)


@pytest.fixture(scope="module")
def told() -> list[str]:
    """The messages and the progress of ``finished``."""
    return []


@pytest.fixture(scope="module")
def finished(birds: Path, told: list[str], tmp_path_factory: pytest.TempPathFactory) -> Probed:
    folder = tmp_path_factory.mktemp("finished")
    return probe(
        str(birds),
        GAP,
        out=folder / "out",
        cache=folder / "cache",
        log=told.append,
        progress=lambda what, done, total: told.append(what),
    )


@pytest.fixture
def filled(finished: Probed, tmp_path: Path) -> Path:
    """A copy of the cache of ``finished``, which a test may change."""
    return Path(shutil.copytree(finished.folder.parent / "cache", tmp_path / "cache"))


def test_a_changed_image_is_not_taken_for_what_it_was(birds: Path, filled: Path, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(birds, root)
    before = set(filled.iterdir())
    files = sorted((root / "train").rglob("*.jpg"))
    files[0].write_bytes(files[1].read_bytes())
    probe(str(root), GAP, out=tmp_path / "out", cache=filled)
    assert len(set(filled.iterdir()) - before) == 1  # for train; test is unchanged


def test_a_bad_image_is_left_out(birds: Path, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(birds, root)
    sorted((root / "test").rglob("*.jpg"))[3].write_bytes(b"no image")
    made = probe(str(root), GAP, out=tmp_path / "out", cache=tmp_path / "cache")
    share = made.record["rows"][0]["test"]["top1"] * (SPECIES * 12 - 1)
    assert share == pytest.approx(round(share))
    assert made.record["images_left_out"] == {"train": 0, "test": 1}


def test_an_image_that_cannot_be_read_for_a_while_is_not_given_up(
    birds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, asked = ImageFiles.read, Counter[int]()

    def failing(self: ImageFiles, i: int) -> bytes:
        asked[i] += 1
        if i == 5 and asked[i] == 3:  # hashed in both splits, then it fails once
            raise OSError(errno.EIO, "Input/output error")
        return read(self, i)

    monkeypatch.setattr(ImageFiles, "read", failing)
    with pytest.raises(ValueError, match=r"became unreadable during the run \(it can be again\)"):
        probe(str(birds), GAP, out=tmp_path / "out", cache=tmp_path / "cache")
    made = probe(str(birds), GAP, out=tmp_path / "out", cache=tmp_path / "cache")
    assert made.record["images_left_out"] == {"train": 0, "test": 0}


def test_numbers_that_are_not_finite_are_no_features(
    birds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes infinite values, which float16 could not hold anyway."""
    forward = PooledClassifier.forward_features
    huge = 1e38  # its square overflows float32
    monkeypatch.setattr(
        PooledClassifier, "forward_features", lambda self, x: (forward(self, x).abs() + 1) * huge * huge
    )
    with pytest.raises(ValueError, match="the average of 32 images of a batch are not finite in float32"):
        probe(str(birds), OPTIONS, out=tmp_path / "out", cache=tmp_path / "cache")


def test_too_much_for_the_disk_is_said_before(birds: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"would take .* GB, more than --max-cache 0.0001: use a larger --max-cache"
    ):
        probe(str(birds), OPTIONS, out=tmp_path / "out", cache=tmp_path / "cache", max_cache=0.0001)
    assert not (tmp_path / "cache").exists()


def test_the_size_is_told_before_anything_is_computed(finished: Probed, told: list[str]) -> None:
    hashed, size, computed = list(dict.fromkeys(told))[:3]
    assert (hashed, computed) == ("images hashed", "images")
    assert (
        size == f"features take 73.7 kB in {finished.folder.parent / 'cache'}: 256 values per image and flip"
    )


@pytest.mark.slow
def test_maps_are_added_where_only_averages_were(birds: Path, tmp_path: Path) -> None:
    for heads in (("gap",), ("gap", "isqrt_cov"), ("gap",)):
        options = dataclasses.replace(OPTIONS, heads=heads, seeds=1, epochs=1)
        probe(str(birds), options, out=tmp_path / "out", cache=tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 2  # train and test


@pytest.mark.parametrize("damage", ["cut", pytest.param("gone", marks=pytest.mark.slow)])
def test_a_damaged_cache_is_made_anew(
    birds: Path, finished: Probed, filled: Path, tmp_path: Path, damage: str
) -> None:
    for file in filled.rglob("average.npy"):
        if damage == "cut":
            os.truncate(file, 1000)
        else:
            file.unlink()
    again = probe(str(birds), GAP, out=tmp_path / "out", cache=filled)
    assert again.record["rows"][0]["test"] == finished.record["rows"][0]["test"]


def test_one_process_at_a_time_makes_features(birds: Path, filled: Path, tmp_path: Path) -> None:
    (folder, _) = sorted(filled.iterdir())
    (folder / "manifest.json").unlink()
    context = multiprocessing.get_context("fork")
    is_held = context.Event()
    other = context.Process(target=hold, args=(folder, is_held))
    other.start()
    try:
        assert is_held.wait(60)
        with pytest.raises(ValueError, match="another process is writing into"):
            probe(str(birds), GAP, out=tmp_path / "out", cache=filled)
    finally:
        other.kill()
        other.join()
    probe(str(birds), GAP, out=tmp_path / "out", cache=filled)


def test_features_that_are_not_finite_are_refused(birds: Path, tmp_path: Path) -> None:
    weights = torch.load("weights.pth")
    weights["conv_stem.weight"][0, 0, 0, 0] = torch.nan
    torch.save(weights, tmp_path / "nan.pth")
    options = dataclasses.replace(OPTIONS, weights=str(tmp_path / "nan.pth"))
    with pytest.raises(ValueError, match=r"not finite in float32, first of .*: check the weights"):
        probe(str(birds), options, out=tmp_path / "out", cache=tmp_path / "cache")


def test_a_split_without_a_usable_image(birds: Path, tmp_path: Path) -> None:
    root = tmp_path / "birds"
    shutil.copytree(birds, root)
    for file in (root / "train").rglob("*.jpg"):
        file.write_bytes(b"no image")
    with pytest.raises(ValueError, match="none of the images of a split is readable"):
        probe(str(root), OPTIONS, out=tmp_path / "out", cache=tmp_path / "cache")
