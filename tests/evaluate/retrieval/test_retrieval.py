from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score

from covpool.data.decode import decode
from covpool.data.sources import open_images
from covpool.data.transforms import Preprocessing, evaluation_transform
from covpool.evaluate.retrieval import retrieve
from covpool.models import create_model, load_model, save_model
from tests.evaluate.accuracy.test_evaluation import torchrun
from tests.evaluate.birds import CLASSES

pytestmark = pytest.mark.usefixtures("_no_figures")
FILES = {"results.json", "queries.csv", "neighbours.png", "bad_images.csv"}


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def vectors(bundle: Path, birds: Path, split: str) -> tuple[Any, Any]:
    """Return the input of the classifier for each image, recorded by a hook, and the labels."""
    model, images = load_model(bundle), open_images(birds, split)
    transform = evaluation_transform(Preprocessing.of(model.pretrained_cfg))
    received: list[torch.Tensor] = []
    model.head.classifier.register_forward_hook(lambda _, given, __: received.append(given[0]))
    with torch.inference_mode():
        model(torch.stack([transform(decode(images.read(i))) for i in range(len(images))]))
    return F.normalize(received[0]).numpy(), np.asarray(images.labels)


@pytest.mark.parametrize("gallery", [None, "train"])
def test_metrics_on_photographs_are_those_of_an_oracle(
    bundle: Path, birds: Path, tmp_path: Path, gallery: str | None
) -> None:
    done = retrieve(bundle, birds, tmp_path / "out", gallery=gallery, at=(1, 3), workers=0, batch_size=20)
    queries, labels = vectors(bundle, birds, "test")
    among, their_labels = (queries, labels) if gallery is None else vectors(bundle, birds, gallery)
    precision, hits = [], []
    for query, label in enumerate(labels):
        others = np.arange(len(among)) != (query if gallery is None else -1)
        similarity, is_match = among[others] @ queries[query], their_labels[others] == label
        precision.append(average_precision_score(is_match, similarity))
        hits.append([is_match[np.argsort(-similarity)[:k]].any() for k in (1, 3)])
    metrics = done.results["metrics"]
    assert metrics["map"] == pytest.approx(np.mean(precision), abs=1e-4)
    assert list(metrics["recall"].values()) == pytest.approx(np.mean(hits, axis=0))
    assert (done.results["gallery"] or {"split": None})["split"] == gallery
    rows = rows_of(done.folder / "queries.csv")
    assert np.mean([float(row["average_precision"]) for row in rows]) == pytest.approx(
        metrics["map"], abs=1e-5
    )
    assert {path.name for path in done.folder.iterdir()} == FILES
    assert json.loads((done.folder / "results.json").read_text()) == json.loads(json.dumps(done.results))


@pytest.mark.parametrize("gallery", ["testing+test", pytest.param("Test", marks=pytest.mark.slow)])
def test_the_queries_under_another_name_are_the_queries(
    bundle: Path, birds: Path, tmp_path: Path, gallery: str
) -> None:
    alone = retrieve(bundle, birds, tmp_path / "alone", workers=0).results
    named = retrieve(bundle, birds, tmp_path / "named", gallery=gallery, workers=0).results
    assert named["metrics"] == alone["metrics"]
    assert named["gallery"] is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("engine", ["exact", "faiss"])
@pytest.mark.parametrize("gallery", ["Test + train", pytest.param("train+test", marks=pytest.mark.slow)])
def test_no_query_finds_itself_in_a_gallery_that_has_it(
    bundle: Path, birds: Path, tmp_path: Path, gallery: str, engine: Any
) -> None:
    if engine == "faiss":
        pytest.importorskip("faiss")
    shutil.copytree(birds, tmp_path / "birds")
    bad = sorted((tmp_path / "birds/test" / CLASSES[1]).iterdir())[0]
    bad.write_bytes(bad.read_bytes()[:3000])
    done = retrieve(bundle, tmp_path / "birds", tmp_path / "out", gallery=gallery, workers=0, engine=engine)
    rows = rows_of(done.folder / "queries.csv")
    assert len(rows) == 53
    for row in rows:
        assert row["label"] in row["name"]
        assert row["nearest"] != row["name"]
        assert int(row["matches"]) == (10 if row["label"] == CLASSES[1] else 11)
    queries, labels = vectors(bundle, birds, "test")
    among, their_labels = vectors(bundle, birds, "test+train")
    kept = np.arange(len(among)) != 9
    hits = []
    for query in np.flatnonzero(kept[:54]):
        others = kept & (np.arange(len(among)) != query)
        hits.append(their_labels[others][np.argmax(among[others] @ queries[query])] == labels[query])
    assert done.results["metrics"]["recall"]["1"] == pytest.approx(np.mean(hits))
    assert done.results["bad_images"] == 1
    assert done.results["gallery"]["split"] == gallery


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_faiss_gives_the_same_but_no_map(bundle: Path, birds: Path, tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    exact = retrieve(bundle, birds, tmp_path / "exact", workers=0).results["metrics"]
    faiss = retrieve(bundle, birds, tmp_path / "faiss", workers=0, engine="faiss").results["metrics"]
    assert faiss["recall"] == exact["recall"]
    assert faiss["map_at_r"] == pytest.approx(exact["map_at_r"], abs=1e-9)
    assert faiss["map"] is None


def test_classes_that_the_bundle_does_not_know(birds: Path, tmp_path: Path) -> None:
    """The bundle has no classifier at all."""
    model = create_model("test_resnet", dim=8, num_classes=0, image_size=64)
    bundle = save_model(model, tmp_path / "bundle")
    done = retrieve(bundle, birds, tmp_path / "out", split="train", at=[1], workers=0)
    assert done.results["queries"] == 18
    assert done.results["vector_length"] == 36


def test_bad_images_and_lonely_ones_are_told(bundle: Path, birds: Path, tmp_path: Path) -> None:
    shutil.copytree(birds / "train", tmp_path / "birds")
    bad, _, gone = sorted((tmp_path / "birds" / CLASSES[1]).iterdir())
    bad.write_bytes(bad.read_bytes()[:3000])
    gone.unlink()
    done = retrieve(bundle, tmp_path / "birds", tmp_path / "out", split="train", workers=0)
    assert (done.results["queries"], done.results["queries_without_match"]) == (15, 1)
    assert done.results["bad_images"] == 1
    assert [row["reason"] for row in rows_of(done.folder / "bad_images.csv")] == ["truncated"]
    (lonely,) = (row for row in rows_of(done.folder / "queries.csv") if row["label"] == CLASSES[1])
    assert (lonely["matches"], lonely["first_match"], lonely["average_precision"]) == ("0", "", "")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"engine": "guess"}, "engine must be one of"),
        ({"at": [0]}, "at must be at least 1"),
        ({"at": [1, 18]}, r"--at 18 is larger than the number of images to search \(17\)"),
        ({"gallery": "val"}, "--gallery val is neither a folder of covpool embed nor a split"),
        (
            {"split": "train+test", "gallery": "test"},
            "only some queries of train\\+test are in the gallery test",
        ),
    ],
)
def test_mistakes(bundle: Path, birds: Path, tmp_path: Path, options: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        retrieve(bundle, birds, tmp_path / "out", **{"split": "train", "workers": 0, **options})


@pytest.mark.slow
@pytest.mark.parametrize("gallery", ["train", "train+test"])  # without and with the queries
def test_two_processes_find_what_one_does(bundle: Path, birds: Path, tmp_path: Path, gallery: str) -> None:
    alone = retrieve(bundle, birds, tmp_path / "one", gallery=gallery, workers=0, batch_size=7).results
    words = ["--workers", "0", "--batch-size", "7", "--gallery", gallery, "--out", str(tmp_path / "two")]
    torchrun("retrieve", str(bundle), str(birds), *words)
    together = json.loads((tmp_path / "two/results.json").read_text())
    assert together["processes"] == 2
    assert together["metrics"]["recall"] == pytest.approx(alone["metrics"]["recall"])
    assert together["metrics"]["map"] == pytest.approx(alone["metrics"]["map"], abs=1e-6)
    assert [(row["name"], row["nearest"]) for row in rows_of(tmp_path / "two/queries.csv")] == [
        (row["name"], row["nearest"]) for row in rows_of(tmp_path / "one/queries.csv")
    ]
