"""Datasets of the Hugging Face Hub: by URL, as ImageNet-1k files, and as objects of ``datasets``."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants
from PIL import Image

from covpool.cli.main import main
from covpool.data.image_set import ImageSet
from covpool.data.loader import EvaluationLoader
from covpool.data.sources import layout_of, open_images, open_splits, open_unlabeled
from covpool.data.sources.datasets import is_dataset
from covpool.data.transforms import Preprocessing, evaluation_transform
from covpool.errors import BadImageError, HubError, UsageError
from tests.data.memory_images import memory_images
from tests.data.parquet_files import IMAGE, huggingface, write_parquet
from tests.hub_server import Hub, status

IMAGES = memory_images(20)


def contents(images: ImageSet) -> list[tuple[str, bytes]]:
    return [(images.classes[images.label(i)], images.read(i)) for i in range(len(images))]


@pytest.fixture
def birds(hub: Hub, tmp_path: Path) -> str:
    path = write_parquet(IMAGES, tmp_path / "some.parquet")
    files = {f"data/{split}-00000-of-00001.parquet": path.read_bytes() for split in ("train", "test")}
    hub.put("ann/birds", {**files, "README.md": b"x", "large.bin": b"y"})
    return "hf://datasets/ann/birds"


def test_a_data_set_is_downloaded_once(hub: Hub, birds: str) -> None:
    assert layout_of(birds) == "parquet"
    sets = open_splits(birds)
    assert list(sets) == ["train", "test"]
    assert contents(sets["train"]) == contents(IMAGES)
    assert hub.asked("GET", "/cdn/") == 1  # both splits have the same bytes
    assert not hub.asked("GET", "large.bin")
    assert len(open_unlabeled(birds)) == 40
    assert open_splits(birds)["train"].fingerprint() == sets["train"].fingerprint()
    assert hub.asked("GET", "/cdn/") == 1


def test_a_folder_a_file_and_a_revision(hub: Hub, birds: str) -> None:
    assert list(open_splits(f"{birds}/data")) == ["train", "test"]
    assert list(open_splits(f"{birds}/data/test-00000-of-00001.parquet")) == ["test"]
    commit = hub.repositories["ann/birds"].branches["main"]
    assert len(open_images(f"{birds}@{commit}")) == 20
    with pytest.raises(HubError, match="there is no revision 'v9'"):
        open_images(f"{birds}@v9")
    with pytest.raises(UsageError, match="has no Parquet files: see http"):
        open_images(f"{birds}/other")
    with pytest.raises(UsageError, match="is not a data set on the Hub: write hf://datasets/user/name"):
        open_images("hf://datasets/birds")


def test_the_hubs_own_conversion_is_used(hub: Hub, birds: str, tmp_path: Path) -> None:
    hub.put("ann/csv", {"train.csv": b"a,b"})
    with pytest.raises(UsageError, match="has no Parquet files"):
        open_images("hf://datasets/ann/csv")
    data = (tmp_path / "some.parquet").read_bytes()
    hub.repositories["ann/csv"].commit("refs/convert/parquet", {"default/train/0000.parquet": data})
    assert contents(open_images("hf://datasets/ann/csv")) == contents(IMAGES)
    assert len(open_images("hf://datasets/ann/csv@refs/convert/parquet/default")) == 20


def test_without_a_connection(hub: Hub, birds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    open_splits(birds)
    hub.fault("GET", "/api/", status(503))
    open_splits(birds)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    open_splits(birds)
    with pytest.raises(HubError, match=r"HF_HUB_OFFLINE is set, and \*.parquet is not in the cache"):
        open_splits("hf://datasets/ann/others")


@pytest.mark.parametrize(
    ("code", "error", "sentence"),
    [(401, "", "log in"), (403, "GatedRepo", "grant access on request"), (429, "", "429"), (500, "", "500")],
)
def test_refusals(hub: Hub, code: int, error: str, sentence: str) -> None:
    hub.fault("GET", "/api/datasets/", status(code, error))
    with pytest.raises(HubError, match=f"hf://datasets/ann/birds.*{sentence}"):
        open_images("hf://datasets/ann/birds")


def png(color: tuple[int, int, int]) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (40, 32), color).save(stream, "JPEG")
    return stream.getvalue()


@pytest.fixture
def imagenet(tmp_path: Path) -> Path:
    """A few rows in the schema of ILSVRC/imagenet-1k: 100 rows per group, no labels in test."""
    names = [f"class {i}, Latina {i}" for i in range(1000)]
    chance = random.Random(0)
    for split, number, rows in (("train", 3, 120), ("validation", 2, 20), ("test", 1, 10)):
        for part in range(number):
            labels = [-1 if split == "test" else chance.randrange(3) * 499 for _ in range(rows)]
            cells = [
                {"bytes": png((40 + 20 * (label % 7), 30, 60)), "path": f"n{label:08}_{i}.JPEG"}
                for i, label in enumerate(labels)
            ]
            table = pa.table({"image": pa.array(cells, IMAGE), "label": pa.array(labels, pa.int64())})
            path = tmp_path / "imagenet" / "data" / f"{split}-{part:05}-of-{number:05}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(table.replace_schema_metadata(huggingface(names)), path, row_group_size=100)
    return tmp_path / "imagenet"


def test_imagenet(imagenet: Path) -> None:
    assert layout_of(imagenet) == "parquet"
    sets = open_splits(imagenet)
    assert {split: len(images) for split, images in sets.items()} == {"train": 360, "val": 40}
    assert len(sets["train"].classes) == 1000
    assert sets["train"].classes[499] == "class 499, Latina 499"
    assert sets["train"].group_sizes() == [100, 20] * 3
    assert set(np.unique(np.asarray(sets["train"].labels)).tolist()) == {0, 499, 998}


@pytest.mark.slow
def test_the_recipe_line_for_imagenet_runs(imagenet: Path, tmp_path: Path) -> None:
    words = ["--model", "test_resnet", "--epochs", "1", "--batch-size", "32", "--model.image-size", "32"]
    out = tmp_path / "run"
    assert main(["train", str(imagenet), "--recipe", "resnet50-imagenet", *words, "--out", str(out)]) == 0
    card = json.loads((out / "bundle" / "covpool.json").read_bytes())
    assert len(card["classes"]) == 1000


class Feature:
    def __init__(self, names: list[str] | None = None) -> None:
        self.names = names


class Dataset:
    """The methods of ``datasets.Dataset`` that covpool calls."""

    def __init__(self, table: pa.Table, names: list[str] | None = None) -> None:
        self.table, self.names = table, names
        self.features = {"image": Feature(), "label": Feature(names)}

    def __len__(self) -> int:
        return len(self.table)

    def with_format(self, kind: str) -> Dataset:
        assert kind == "arrow"
        return self

    def select_columns(self, columns: list[str]) -> Dataset:
        return Dataset(self.table.select(columns), self.names)

    def __getitem__(self, rows: slice) -> pa.Table:
        return self.table[rows]


def made(module: Any, labels: list[Any], names: list[str] | None) -> Any:
    """Return a stand-in, or a real dataset if ``module`` is given."""
    cells = [{"bytes": data, "path": None} for data in IMAGES.files[: len(labels)]]
    if module is None:
        return Dataset(pa.table({"image": pa.array(cells, IMAGE), "label": labels}), names)
    feature = module.ClassLabel(names=names) if names else module.Value("string")
    features = module.Features({"image": module.Image(), "label": feature})
    return module.Dataset.from_dict({"image": cells, "label": labels}, features=features)


@pytest.fixture(params=["stand-in", "real"])
def datasets(request: pytest.FixtureRequest) -> Any:
    return None if request.param == "stand-in" else pytest.importorskip("datasets")


def test_objects_of_datasets(datasets: Any) -> None:
    numbers = [2, 0, 1, 2]
    one = made(datasets, numbers, ["a", "b", "c"])
    assert is_dataset(one)
    images = open_images(one)
    assert images.classes == ("a", "b", "c")
    assert [images.label(i) for i in range(4)] == numbers
    assert [images.read(i) for i in range(4)] == IMAGES.files[:4]
    assert images.fingerprint() != open_images(made(datasets, [0, 0, 1, 2], ["a", "b", "c"])).fingerprint()
    texts = open_images(made(datasets, ["wren", "jay", "wren"], None))
    assert texts.classes == ("jay", "wren")
    assert np.asarray(texts.labels).tolist() == [1, 0, 1]
    sets = open_splits({"train": one, "validation": made(datasets, [0], ["a", "b", "c"])})
    assert {split: len(images) for split, images in sets.items()} == {"train": 4, "val": 1}
    loader = EvaluationLoader(images, evaluation_transform(Preprocessing(32)), batch_size=4, workers=0)
    assert next(iter(loader)).images.shape == (4, 3, 32, 32)


def test_mistakes_with_objects(datasets: Any) -> None:
    one = made(datasets, [0, 1], ["a", "b"])
    with pytest.raises(UsageError, match="'unsupervised' is not a split: name it train, validation or test"):
        open_splits({"unsupervised": one})
    with pytest.raises(UsageError, match="has no column 'label'; its columns are image"):
        open_images(one.select_columns(["image"]))
    with pytest.raises(UsageError, match="has no column 'image', 'bytes' or 'path'"):
        open_images(one.select_columns(["label"]))
    with pytest.raises(UsageError, match="rows without a label"):
        open_images(made(datasets, [0, -1], ["a", "b"]))
    with pytest.raises(UsageError, match="has no training images of 1 of its 3 classes"):
        open_images(made(datasets, [0, 1], ["a", "b", "c"]))
    with pytest.raises(TypeError, match="data must be a path, a URL, or a Dataset; got int"):
        open_images(3)
    with pytest.raises(IndexError):
        open_images(one).read(2)
    table = pa.table({"image": pa.array([{"bytes": None, "path": None}], IMAGE), "label": [0]})
    with pytest.raises(BadImageError, match="the row has no image"):
        open_images(Dataset(table, ["a"])).read(0)
