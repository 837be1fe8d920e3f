"""Labeled Parquet files: classes, splits, reading by row group. The order is tested in test_loader.py."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from covpool.data.check import check
from covpool.data.sources import layout_of, open_images, open_splits, open_unlabeled
from covpool.data.sources import parquet as module
from covpool.data.sources.parquet import ParquetImages
from covpool.training.recipe import DataOptions
from covpool.training.splits import make_order, open_data
from tests.data.memory_images import MemoryImages, memory_images
from tests.data.parquet_files import huggingface, write_parquet

IMAGES = memory_images(20)


def contents(images: Any) -> list[tuple[str, bytes]]:
    return [(images.classes[int(images.labels[i])], images.read(i)) for i in range(len(images))]


def expected(images: MemoryImages) -> list[tuple[str, bytes]]:
    return contents(images)


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (
            ["train-00000-of-00001", "validation-0", "test-0"],
            ["train", "val", "test"],
        ),
        (["data/train-00000-of-00002", "data/train-00001-of-00002", "data/test-0"], ["train", "test"]),
        (["train/0000", "test/0000"], ["train", "test"]),
        (["some", "more"], ["train"]),
    ],
)
@pytest.mark.parametrize("texts", [False, True])
def test_splits_and_classes(tmp_path: Path, names: list[str], splits: list[str], texts: bool) -> None:
    for name in names:
        write_parquet(IMAGES, tmp_path / f"{name}.parquet", texts=texts)
    assert layout_of(tmp_path) == "parquet"
    sets = open_splits(tmp_path)
    assert list(sets) == splits
    assert sum(map(len, sets.values())) == len(names) * len(IMAGES)
    for images in sets.values():
        assert images.classes == IMAGES.classes
        assert contents(images)[: len(IMAGES)] == expected(IMAGES)
        assert isinstance(images.labels, np.ndarray)
        assert images.labels.dtype == np.int32


def test_one_file(tmp_path: Path) -> None:
    path = write_parquet(IMAGES, tmp_path / "some.parquet")
    assert contents(open_images(path)) == expected(IMAGES)


def test_text_labels_are_the_same_classes_in_all_splits(tmp_path: Path) -> None:
    for split, labels in (("train", ["b", "a", "c"]), ("test", ["c", "c", "a"])):
        pq.write_table(pa.table({"bytes": [b"x"] * 3, "label": labels}), tmp_path / f"{split}.parquet")
    sets = open_splits(tmp_path)
    assert sets["train"].classes == sets["test"].classes == ("a", "b", "c")
    assert np.asarray(sets["train"].labels).tolist() == [1, 0, 2]
    assert np.asarray(sets["test"].labels).tolist() == [2, 2, 0]


def test_numbers_without_names_are_in_their_order(tmp_path: Path) -> None:
    pq.write_table(pa.table({"bytes": [b"x"] * 3, "label": [10, 9, 10]}), tmp_path / "a.parquet")
    images = open_images(tmp_path)
    assert images.classes == ("9", "10")
    assert np.asarray(images.labels).tolist() == [1, 0, 1]


def test_texts_in_a_dictionary(tmp_path: Path) -> None:
    labels = pa.array(["b", "a", "b"]).dictionary_encode()
    pq.write_table(pa.table({"bytes": [b"x"] * 3, "label": labels}), tmp_path / "a.parquet", row_group_size=2)
    assert np.asarray(open_images(tmp_path).labels).tolist() == [1, 0, 1]


def test_a_split_without_labels_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Hugging Face writes -1 for the labels of a hidden test set."""
    write_parquet(IMAGES, tmp_path / "train.parquet")
    table = pa.table({"image": [b"x"] * 2, "label": [-1, -1]}).replace_schema_metadata(huggingface("abc"))
    pq.write_table(table, tmp_path / "test.parquet")
    assert list(open_splits(tmp_path)) == ["train"]
    assert "the split test is left out, as it has no labels" in caplog.text


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"bytes": [b"x"]}, "has no column 'label'; its columns are bytes"),
        ({"bytes": [b"x"], "label": [0.5]}, "has double in its column 'label': use strings or integers"),
        ({"bytes": [b"x", b"y"], "label": ["a", None]}, "has 1 rows without a label in train"),
        ({"label": ["a"]}, "has no column 'image', 'bytes' or 'path'"),
    ],
)
def test_mistakes(tmp_path: Path, columns: dict[str, list[Any]], sentence: str) -> None:
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=sentence):
        open_splits(tmp_path)


def test_files_of_other_classes_are_refused(tmp_path: Path) -> None:
    for name, classes in (("train", "ab"), ("test", "ba")):
        table = pa.table({"image": [b"x"], "label": [0]}).replace_schema_metadata(huggingface(classes))
        pq.write_table(table, tmp_path / f"{name}.parquet")
    with pytest.raises(ValueError, match="different class names"):
        open_splits(tmp_path)
    (tmp_path / "test.parquet").unlink()
    table = pa.table({"image": [b"x"], "label": [7]}).replace_schema_metadata(huggingface("ab"))
    pq.write_table(table, tmp_path / "train.parquet")
    with pytest.raises(ValueError, match="has the label 7, but only 2 class names"):
        open_splits(tmp_path)


def test_a_folder_of_classes_with_a_table_stays_a_folder(tmp_path: Path) -> None:
    for name in ("train/a/1.png", "train/b/1.png"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(IMAGES.files[0])
    pq.write_table(pa.table({"x": [1]}), tmp_path / "metadata.parquet")
    assert layout_of(tmp_path) == "folder"


def test_row_groups_take_the_place_of_shards(tmp_path: Path) -> None:
    for split in ("train", "validation"):
        write_parquet(IMAGES, tmp_path / f"{split}.parquet", rows=3)
    splits = open_data(DataOptions(path=str(tmp_path), window=2), seed=0)
    assert splits.train.group_sizes() == [3, 3, 3, 3, 3, 3, 2]
    assert splits.train.near(4) == range(3, 6)
    few = splits.train.some(5, seed=1)
    assert len(few) in (5, 6)
    assert set(contents(few)) < set(contents(splits.train))
    assert few.fingerprint() != splits.train.fingerprint()
    order = make_order(splits.train, DataOptions(path="x", window=2), batch_size=6, seed=0)
    groups = {int(i) // 3 for i in order.batch(0, 0)}
    assert len(groups) == 2
    with pytest.raises(ValueError, match="cannot be joined"):
        open_images(tmp_path, "train+val")


def test_a_process_keeps_a_window_of_row_groups_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_parquet(memory_images(60), tmp_path / "a.parquet", rows=2)
    images = open_images(path)
    assert isinstance(images, ParquetImages)
    for i in range(60):
        images.read(i)
    assert images._images.cache_info().currsize == module.KEPT_GROUPS
    monkeypatch.setattr(module, "KEPT_BYTES", 1)
    large = pickle.loads(pickle.dumps(images))
    for i in range(60):
        assert large.read(i) == images.read(i)
    assert large._images.cache_info().currsize == 1
    unlabeled = open_unlabeled(path)
    assert isinstance(unlabeled, ParquetImages)
    assert unlabeled._images.cache_info().maxsize == 1


def test_names_are_those_of_inference_and_need_no_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parquet(IMAGES, tmp_path / "train.parquet")
    images, unlabeled = open_images(tmp_path), open_unlabeled(tmp_path)
    assert unlabeled.labels is None
    assert unlabeled.label(0) == -1
    names = [unlabeled.name(i) for i in range(len(IMAGES))]
    assert names == [f"train.parquet#{i}" for i in range(len(IMAGES))]
    monkeypatch.setattr(ParquetImages, "_read_column", None)
    assert [images.name(i) for i in range(len(IMAGES))] == names


def test_fingerprints_tell_files_apart(tmp_path: Path) -> None:
    one = open_images(write_parquet(IMAGES, tmp_path / "1/a.parquet"))
    two = open_images(write_parquet(IMAGES, tmp_path / "2/a.parquet"))
    other = open_images(write_parquet(memory_images(21), tmp_path / "3/a.parquet"))
    assert one.fingerprint() == two.fingerprint() != other.fingerprint()


def test_in_object_storage(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    write_parquet(IMAGES, tmp_path / "train.parquet")
    memory.put(str(tmp_path), "/bucket/hub", recursive=True)
    try:
        assert contents(open_splits("memory://bucket/hub", "parquet")["train"]) == expected(IMAGES)
        assert contents(open_splits("memory://bucket/hub/train.parquet")["train"]) == expected(IMAGES)
    finally:
        memory.rm("/bucket", recursive=True)


def test_check(tmp_path: Path) -> None:
    write_parquet(IMAGES, tmp_path / "train.parquet")
    broken = MemoryImages(IMAGES.classes, IMAGES.labels[:1], ["x.png"], [b"no image"])
    write_parquet(broken, tmp_path / "test.parquet")
    report = check(tmp_path)
    assert report.layout == "parquet"
    assert report.images == {"train": 20, "test": 1}
    assert report.counts == {"unreadable": 1, "empty class": 2}
