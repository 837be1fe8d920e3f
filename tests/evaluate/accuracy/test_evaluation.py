from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassCalibrationError,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)

from covpool.data.sources import open_images
from covpool.data.transforms import Preprocessing, evaluation_transform
from covpool.evaluate.accuracy import Evaluation, measure_accuracy
from covpool.evaluate.figures import _named
from covpool.models import create_model, load_model, save_model
from covpool.storage.remote import trust_rows
from covpool.training.report.figures import _counts
from tests.evaluate.birds import CLASSES

FILES = {"results.json", "predictions.csv", "per_class.csv", "bad_images.csv"}
FILES |= {"confusion.png", "per_class.png", "reliability.png"}


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def torchrun(*words: str) -> None:
    """Run a covpool command in two processes, which need gloo."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*command, "-m", "covpool", *words],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr


@pytest.fixture(scope="module")
def seen() -> list[tuple[int, int]]:
    """The progress that ``whole`` reports."""
    return []


@pytest.fixture(scope="module")
def whole(
    bundle: Path, birds: Path, seen: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> Evaluation:
    """The evaluation of all test images, shared by several tests."""
    out = tmp_path_factory.mktemp("whole") / "out"
    return measure_accuracy(
        bundle, birds, out, workers=0, batch_size=7, progress=lambda *so_far: seen.append(so_far), seed=5
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no limits of files")
def test_the_same_call_mends_what_a_full_disk_left(bundle: Path, birds: Path, tmp_path: Path) -> None:
    import resource

    before = measure_accuracy(bundle, birds, tmp_path / "out", workers=0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16_000, limits[1]))  # less than the size of a figure
    try:
        with pytest.raises(OSError, match="File too large"):
            measure_accuracy(bundle, birds, tmp_path / "out", views="flip", workers=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "out/results.json").exists()  # it would not match the predictions
    after = measure_accuracy(bundle, birds, tmp_path / "out", workers=0)
    assert after.results["metrics"] == before.results["metrics"]
    assert {path.name for path in after.folder.iterdir()} == FILES


def test_metrics_on_photographs_are_those_of_torchmetrics(
    bundle: Path, birds: Path, whole: Evaluation
) -> None:
    images = open_images(birds, "test")
    model = load_model(bundle)
    transform = evaluation_transform(Preprocessing.of(model.pretrained_cfg))
    from covpool.data.decode import decode

    with torch.inference_mode():
        logits = model(torch.stack([transform(decode(images.read(i))) for i in range(len(images))]))
    labels = torch.as_tensor(np.asarray(images.labels, dtype=np.int64))
    shares, k = logits.softmax(dim=1), len(CLASSES)
    expected = {
        "loss": torch.nn.functional.cross_entropy(logits, labels),
        "top1": MulticlassAccuracy(k, average="micro")(shares, labels),
        "top5": MulticlassAccuracy(k, average="micro", top_k=5)(shares, labels),
        "macro_f1": MulticlassF1Score(k)(shares, labels),
        "balanced_accuracy": MulticlassAccuracy(k)(shares, labels),
        "expected_calibration_error": MulticlassCalibrationError(k)(shares, labels),
        "maximum_calibration_error": MulticlassCalibrationError(k, norm="max")(shares, labels),
    }
    assert whole.results["metrics"] == pytest.approx(
        {name: float(v) for name, v in expected.items()}, abs=1e-4
    )
    confusion = MulticlassConfusionMatrix(k)(shares, labels)
    assert (_counts(_named(whole.predictions, images), range(k)) == confusion.numpy()).all()
    for name, (low, high) in whole.results["intervals"].items():
        if name != "expected_calibration_error":
            assert low <= whole.results["metrics"][name] <= high


def test_the_folder(bundle: Path, whole: Evaluation, seen: list[tuple[int, int]]) -> None:
    assert {path.name for path in whole.folder.iterdir()} == FILES
    results = json.loads((whole.folder / "results.json").read_text())
    assert results == json.loads(json.dumps(whole.results))
    assert (
        results["bundle"]["sha256"] == json.loads((bundle / "covpool.json").read_text())["weights"]["sha256"]
    )
    assert results["seed"] == 5
    assert results["data"]["images"] == results["images"] == 54
    assert seen == [(done, 54) for done in (*range(7, 54, 7), 54)]
    rows = rows_of(whole.folder / "predictions.csv")
    assert [row["name"] for row in rows] == [whole.images.name(i) for i in range(54)]
    right = np.mean([row["label"] == row["predicted"] for row in rows])
    assert right == pytest.approx(results["metrics"]["top1"])
    assert [row["class"] for row in rows_of(whole.folder / "per_class.csv")] == list(CLASSES)


@pytest.mark.usefixtures("_no_figures")
def test_bad_images_are_left_out_and_listed(bundle: Path, birds: Path, tmp_path: Path) -> None:
    shutil.copytree(birds, tmp_path / "birds")
    bad = sorted((tmp_path / "birds/test" / CLASSES[1]).iterdir())[2]
    bad.write_bytes(bad.read_bytes()[:3000])
    done = measure_accuracy(bundle, tmp_path / "birds", tmp_path / "out", workers=0, batch_size=20)
    assert (done.results["images"], done.results["bad_images"]) == (53, 1)
    (row,) = rows_of(done.folder / "bad_images.csv")
    assert row["name"] == f"test/{CLASSES[1]}/{bad.name}"
    assert row["reason"] == "truncated"
    assert len(rows_of(done.folder / "predictions.csv")) == 53


def test_a_table_without_some_of_the_classes(
    bundle: Path, birds: Path, whole: Evaluation, tmp_path: Path
) -> None:
    """Each image has the same prediction as in the complete test set."""
    some = {
        f"test/{name}/{file.name}": name
        for name in CLASSES[3:1:-1]
        for file in (birds / "test" / name).iterdir()
    }
    lines = [f"{birds / name},{label},test" for name, label in some.items()]
    (tmp_path / "new.csv").write_text("\n".join(["path,label,split", *lines]))
    with trust_rows():  # the images are in another folder
        done = measure_accuracy(bundle, tmp_path / "new.csv", tmp_path / "out", workers=0)
    expected = {row["name"]: row for row in rows_of(whole.folder / "predictions.csv")}
    rows = rows_of(done.folder / "predictions.csv")
    assert len(rows) == 18
    for row in rows:
        found, same = row, expected[Path(row["name"]).relative_to(birds).as_posix()]
        assert (found["label"], found["predicted"]) == (same["label"], same["predicted"])
        assert float(found["loss"]) == pytest.approx(float(same["loss"]), abs=1e-4)
    right = np.mean([row["label"] == row["predicted"] for row in rows])
    assert done.results["metrics"]["top1"] == pytest.approx(right)
    assert {path.name for path in done.folder.iterdir()} == FILES


@pytest.mark.parametrize("precision", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("_no_figures")
def test_half_precision_is_near(
    bundle: Path, birds: Path, whole: Evaluation, tmp_path: Path, precision: Any
) -> None:
    half = measure_accuracy(bundle, birds, tmp_path / "half", workers=0, precision=precision)
    losses = whole.predictions.losses, half.predictions.losses
    np.testing.assert_allclose(*losses, rtol=0.2, atol=0.2)
    assert (losses[0] != losses[1]).any()


def test_logits_that_are_not_finite_are_told(birds: Path, tmp_path: Path) -> None:
    model = create_model("test_resnet", dim=8, num_classes=len(CLASSES), image_size=64)
    with torch.no_grad():
        model.head.classifier.bias.fill_(3e38)  # type: ignore[operator, union-attr]
        model.head.classifier.weight.fill_(3e38)  # type: ignore[operator, union-attr]
    broken = save_model(model, tmp_path / "broken", classes=CLASSES)
    with pytest.raises(
        ValueError, match="logits of 18 images of a batch are not finite in float32, first of train/113"
    ):
        measure_accuracy(broken, birds, tmp_path / "out", split="train", workers=0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"views": "two"}, "views must be one of"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"precision": "float8"}, "precision must be one of"),
        ({"split": "val"}, "has no split 'val'"),
        ({"device": "cuda"}, "torch sees no GPU here"),
    ],
)
def test_mistakes(bundle: Path, birds: Path, tmp_path: Path, options: dict[str, Any], sentence: str) -> None:
    if options.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match=sentence):
        measure_accuracy(bundle, birds, tmp_path / "out", **{"workers": 0, **options})


@pytest.mark.slow
@pytest.mark.parametrize("views", ["one", "ten-crop"])
def test_two_processes_find_what_one_does(bundle: Path, birds: Path, tmp_path: Path, views: Any) -> None:
    alone = measure_accuracy(bundle, birds, tmp_path / "one", workers=0, batch_size=7, views=views)
    words = ["--workers", "0", "--batch-size", "7", "--views", views, "--out", str(tmp_path / "two")]
    torchrun("eval", str(bundle), str(birds), *words)
    together = json.loads((tmp_path / "two/results.json").read_text())
    assert (together["processes"], alone.results["processes"]) == (2, 1)
    assert together["data"] == alone.results["data"]
    assert together["metrics"] == pytest.approx(alone.results["metrics"], abs=1e-6)
    rows = [rows_of(tmp_path / name / "predictions.csv") for name in ("one", "two")]
    for one, two in zip(*rows, strict=True):
        for name, value in one.items():
            if name in ("name", "label", "predicted"):
                assert two[name] == value
            else:
                assert float(two[name]) == pytest.approx(float(value), abs=1e-6)
