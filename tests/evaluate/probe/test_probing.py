"""Probing on real photographs: some of three sparrow species, with small networks of random weights."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from jsonschema import ValidationError
from sklearn.svm import LinearSVC

import covpool
from covpool.data.loader import EvaluationLoader
from covpool.data.sources import open_images
from covpool.data.transforms import Preprocessing, evaluation_transform
from covpool.evaluate.probe import ProbeOptions, probe
from covpool.evaluate.probe.cache import CacheFolder, Shapes
from covpool.evaluate.probe.probing import right_answers
from covpool.evaluate.probe.training import head_outputs
from covpool.provenance.results import check_schema
from tests.data.pictures import SPARROWS, needs_sparrows

pytestmark = needs_sparrows

ROOT = Path(__file__).parents[3]
SPECIES = 3
OPTIONS = ProbeOptions(
    "test_efficientnet", weights="weights.pth", dim=8, seeds=2, epochs=2, workers=0, image_size=64
)


@pytest.fixture(scope="module", autouse=True)
def _weights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Files of weights in the current folder."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("weights"))
    for name in ("test_efficientnet", "test_vit"):
        torch.manual_seed(0)
        network = timm.create_model(name, num_classes=0)
        torch.save(network.state_dict(), "weights.pth" if name == OPTIONS.model else "vit.pth")
    yield
    os.chdir(before)


@pytest.fixture(scope="module")
def birds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Links to the images of some species."""
    root = tmp_path_factory.mktemp("birds")
    for split in ("train", "test"):
        for species in sorted((SPARROWS / split).iterdir())[:SPECIES]:
            (root / split / species.name).mkdir(parents=True)
            for image in sorted(species.iterdir())[:12]:
                (root / split / species.name / image.name).symlink_to(image)
    return root


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def probed(birds: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return probe(str(birds), OPTIONS, out=tmp_path_factory.mktemp("out") / "probe", cache=cache)


def test_every_head_and_seed_has_a_row(probed: Any) -> None:
    assert [(row["head"], row["seed"]) for row in probed.record["rows"]] == [
        (head, seed) for head in ("gap", "isqrt_cov", "isqrt_cov+gap") for seed in (0, 1)
    ]
    for row in probed.record["rows"]:
        for part in ("val", "test"):
            assert 0 <= row[part]["top1"] <= 1
            assert 0 <= row[part]["top1_flip"] <= 1


def test_the_file_follows_its_schema(probed: Any) -> None:
    record = json.loads((probed.folder / "results.json").read_text())
    check_schema(record, "covpool.evaluate", "probe")
    record["rows"][0]["test"]["top1"] = 61.5  # percent
    with pytest.raises(ValidationError):
        check_schema(record, "covpool.evaluate", "probe")


def test_means_and_deviations(probed: Any) -> None:
    rows = [row["test"]["top1_flip"] for row in probed.record["rows"] if row["head"] == "gap"]
    (gap,) = [head for head in probed.record["heads"] if head["head"] == "gap"]
    assert gap["test"]["top1_flip"]["mean"] == pytest.approx(np.mean(rows))
    assert gap["test"]["top1_flip"]["sd"] == pytest.approx(np.std(rows, ddof=1))


def test_the_best_is_chosen_where_the_test_is_not_looked_at(probed: Any) -> None:
    means = {head["head"]: head["val"]["top1_flip"]["mean"] for head in probed.record["heads"]}
    assert means[probed.record["best"]] == max(means.values())


def test_the_test_has_no_say_in_the_choice(probed: Any, birds: Path, tmp_path: Path) -> None:
    """With other images under the same names in test, the choice and what it was made by are the same."""
    root = tmp_path / "birds"
    shutil.copytree(birds, root)
    first, second = sorted((root / "test").iterdir())[:2]
    for ours, theirs in zip(sorted(first.iterdir()), sorted(second.iterdir()), strict=True):
        data, other = ours.read_bytes(), theirs.read_bytes()
        ours.write_bytes(other)
        theirs.write_bytes(data)
    again = probe(str(root), OPTIONS, out=tmp_path / "out", cache=tmp_path / "cache")
    assert again.record["best"] == probed.record["best"]
    for ours, theirs in zip(again.record["rows"], probed.record["rows"], strict=True):
        assert ours["val"] == theirs["val"]
    # They were other images to it.
    assert again.record["features"]["train"] == probed.record["features"]["train"]
    assert again.record["features"]["test"] != probed.record["features"]["test"]


@pytest.mark.parametrize("head", ["gap", "isqrt_cov", "isqrt_cov+gap"])
def test_a_bundle_does_to_images_what_was_measured_on_features(
    probed: Any, birds: Path, cache: Path, head: str
) -> None:
    """The whole way again, from files to logits, with nothing of the cache."""
    model = covpool.load_model(probed.folder / "heads" / head)
    images = open_images(birds, "test")
    transform = evaluation_transform(Preprocessing.of(model.pretrained_cfg))
    (batch,) = EvaluationLoader(images, transform, batch_size=64)
    with torch.no_grad():
        logits = torch.stack([model(batch.images), model(batch.images.flip(-1))])
    kept = CacheFolder(cache / probed.record["features"]["test"], len(images), shapes_of(model)).opened(
        batch.labels.numpy()
    )
    # Features are kept in float16.
    found = head_outputs(model, kept, kept.usable)
    torch.testing.assert_close(found, logits, atol=2e-3 * float(logits.abs().max()), rtol=1e-2)
    (row,) = [row for row in probed.record["rows"] if (row["head"], row["seed"]) == (head, 0)]
    assert right_answers(found, batch.labels.numpy()) == row["test"]
    assert model.classes == images.classes


def shapes_of(model: Any) -> Shapes:
    return Shapes((48, 4, 4) if model.config.pool != "gap" else None, 256, None)


def test_the_same_call_has_nothing_to_do(probed: Any, birds: Path, cache: Path) -> None:
    counted = []
    again = probe(
        str(birds),
        OPTIONS,
        out=probed.folder,
        cache=cache,
        progress=lambda what, done, total: counted.append(what),
    )
    assert set(counted) == {"images hashed"}
    assert again.record["rows"] == probed.record["rows"]


def test_results_do_not_depend_on_the_cache(probed: Any, birds: Path, tmp_path: Path) -> None:
    fresh = probe(str(birds), OPTIONS, out=tmp_path / "out", cache=tmp_path / "cache")
    for ours, theirs in zip(fresh.record["rows"], probed.record["rows"], strict=True):
        assert (ours["val"], ours["test"]) == (theirs["val"], theirs["test"])


def test_other_settings_want_another_folder(probed: Any, birds: Path, cache: Path) -> None:
    other = dataclasses.replace(OPTIONS, lr=0.1)
    with pytest.raises(ValueError, match=r"has results with lr 0.003: give another --out"):
        probe(str(birds), other, out=probed.folder, cache=cache)


def test_more_seeds_may_be_asked_for(birds: Path, cache: Path, tmp_path: Path) -> None:
    one = dataclasses.replace(OPTIONS, seeds=1, heads=("gap",), val_fraction=0.0)
    first = probe(str(birds), one, out=tmp_path, cache=cache)
    assert first.record["best"] is None  # nothing was set aside to choose by
    both = probe(str(birds), dataclasses.replace(one, seeds=2), out=tmp_path, cache=cache)
    assert both.record["rows"][:1] == first.record["rows"]
    assert len(both.record["rows"]) == 2


def test_a_changed_image_is_not_taken_for_what_it_was(birds: Path, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(birds, root)
    options = dataclasses.replace(OPTIONS, heads=("gap",), seeds=1, epochs=1)
    probe(str(root), options, out=tmp_path / "a", cache=tmp_path / "cache")
    before = set((tmp_path / "cache").iterdir())
    files = sorted((root / "train").rglob("*.jpg"))
    files[0].write_bytes(files[1].read_bytes())
    probe(str(root), options, out=tmp_path / "b", cache=tmp_path / "cache")
    assert len(set((tmp_path / "cache").iterdir()) - before) == 1  # of train; test is as it was


def test_a_bad_image_is_left_out(birds: Path, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(birds, root)
    sorted((root / "test").rglob("*.jpg"))[3].write_bytes(b"no image")
    options = dataclasses.replace(OPTIONS, heads=("gap",), seeds=1, epochs=1)
    made = probe(str(root), options, out=tmp_path / "out", cache=tmp_path / "cache")
    share = made.record["rows"][0]["test"]["top1"] * (SPECIES * 12 - 1)
    assert share == pytest.approx(round(share))
    assert made.record["images_left_out"] == {"train": 0, "test": 1}


def test_too_much_for_the_disk_is_said_before(birds: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"would take .* GB, more than --max-cache 0.0001: give a larger one"
    ):
        probe(str(birds), OPTIONS, out=tmp_path / "out", cache=tmp_path / "cache", max_cache=0.0001)
    assert not (tmp_path / "cache").exists()


def test_the_size_is_told_before_anything_is_computed(birds: Path, tmp_path: Path) -> None:
    options, told = dataclasses.replace(OPTIONS, heads=("gap",), seeds=1, epochs=1), []
    probe(
        str(birds),
        options,
        out=tmp_path / "out",
        cache=tmp_path / "cache",
        tell=told.append,
        progress=lambda what, done, total: told.append(what),
    )
    hashed, size, computed = list(dict.fromkeys(told))[:3]
    assert (hashed, computed) == ("images hashed", "images")
    assert size == f"features take 73.7 kB in {tmp_path / 'cache'}: 256 numbers of an image and its mirror"


def test_averages_alone_take_little_room() -> None:
    maps, averages = Shapes((320, 7, 7), 1280, None), Shapes(None, 1280, None)
    assert maps.bytes(1000) == 2 * 1000 * 2 * (320 * 49 + 1280)
    assert averages.bytes(1000) == 2 * 1000 * 2 * 1280


def test_class_token_and_its_joins(birds: Path, tmp_path: Path) -> None:
    heads = ("cls", "isqrt_cov+cls", "moment_probing+cls", "gap+cls")
    options = dataclasses.replace(
        OPTIONS,
        model="test_vit",
        weights="vit.pth",
        image_size=None,
        heads=heads,
        seeds=1,
        epochs=1,
        val_fraction=0.0,
    )
    made = probe(str(birds), options, out=tmp_path / "out", cache=tmp_path / "cache")
    assert [row["head"] for row in made.record["rows"]] == list(heads)
    for head in heads:
        assert covpool.load_model(made.folder / "heads" / head)(torch.randn(1, 3, 160, 160)).shape == (1, 3)


def test_svms_are_scikit_learns(birds: Path, cache: Path, tmp_path: Path) -> None:
    options = dataclasses.replace(
        OPTIONS, heads=("isqrt_cov+gap",), seeds=1, epochs=1, val_fraction=0.0, svm_seeds=1
    )
    made = probe(str(birds), options, out=tmp_path, cache=cache)
    model = covpool.load_model(made.folder / "heads" / "isqrt_cov+gap")
    transform = evaluation_transform(Preprocessing.of(model.pretrained_cfg))
    vectors: dict[str, Any] = {}
    for split in ("train", "test"):
        (batch,) = EvaluationLoader(open_images(birds, split), transform, batch_size=64)
        with torch.no_grad():
            both = torch.cat([batch.images, batch.images.flip(-1)])
            received = model.forward_head(model.forward_features(both), pre_logits=True)
        parts = received.split([model.head.hidden_size, received.shape[1] - model.head.hidden_size], dim=1)
        x = torch.cat([torch.nn.functional.normalize(part, dim=1) for part in parts], dim=1).numpy()
        vectors[split] = x, batch.labels.numpy()
    x, labels = vectors["train"]
    svm = LinearSVC(C=1, tol=1e-6, max_iter=10_000).fit(x, np.tile(labels, 2))
    x, labels = vectors["test"]
    scores = svm.decision_function(x).reshape(2, len(labels), -1)
    right = (scores.mean(axis=0).argmax(axis=1) == labels).sum()
    # Features are kept in float16.
    assert made.record["rows"][0]["svm"]["top1_flip"] * len(labels) == pytest.approx(right, abs=1.5)
    assert made.record["heads"][0]["svm"]["top1"]["mean"] == made.record["rows"][0]["svm"]["top1"]


@pytest.mark.parametrize("changes", [{"weights": None}, {"pretrained": True}])
def test_weights_come_from_one_place(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give --pretrained, for timm's, or --weights FILE"):
        dataclasses.replace(OPTIONS, **changes)


@pytest.mark.parametrize(
    ("head", "sentence"),
    [
        ("isqrt", "a head must be one of"),
        ("gap+max", "what is joined to a head must be one of"),
        ("gap+gap", "gap\\+gap is gap twice"),
    ],
)
def test_unknown_heads(head: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(OPTIONS, heads=(head,))


@pytest.mark.parametrize("changed", ["images", "weights"])
def test_results_are_not_taken_for_those_of_others(birds: Path, tmp_path: Path, changed: str) -> None:
    root, weights = tmp_path / "birds", tmp_path / "weights.pth"
    shutil.copytree(birds, root)
    shutil.copy("weights.pth", weights)
    options = dataclasses.replace(OPTIONS, heads=("gap",), seeds=1, epochs=1, weights=str(weights))
    probe(str(root), options, out=tmp_path / "out", cache=tmp_path / "cache")
    if changed == "images":
        files = sorted((root / "train").rglob("*.jpg"))
        files[0].write_bytes(files[1].read_bytes())
    else:
        torch.save(timm.create_model("test_efficientnet", num_classes=0).state_dict(), weights)
    with pytest.raises(ValueError, match="has results of other images or weights: give another --out"):
        probe(str(root), options, out=tmp_path / "out", cache=tmp_path / "cache")


def test_a_folder_of_something_else_is_left_alone(birds: Path, tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "covpool.json").write_text("precious")
    with pytest.raises(ValueError, match="holds other things: give a new --out"):
        probe(str(birds), OPTIONS, out=tmp_path, cache=tmp_path / "cache")
    assert (tmp_path / "bundle" / "covpool.json").read_text() == "precious"


def test_maps_are_added_where_only_averages_were(birds: Path, tmp_path: Path) -> None:
    for heads in (("gap",), ("gap", "isqrt_cov"), ("gap",)):
        options = dataclasses.replace(OPTIONS, heads=heads, seeds=1, epochs=1)
        probe(str(birds), options, out=tmp_path / "out", cache=tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 2  # train and test


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_cache_is_made_anew(birds: Path, tmp_path: Path, damage: str) -> None:
    options = dataclasses.replace(OPTIONS, heads=("gap",), seeds=1, epochs=1)
    made = [probe(str(birds), options, out=tmp_path / "a", cache=tmp_path / "cache")]
    for file in (tmp_path / "cache").rglob("average.npy"):
        if damage == "cut":
            os.truncate(file, 1000)
        else:
            file.unlink()
    made.append(probe(str(birds), options, out=tmp_path / "b", cache=tmp_path / "cache"))
    assert made[0].record["rows"][0]["test"] == made[1].record["rows"][0]["test"]


def test_one_process_at_a_time_makes_features(birds: Path, tmp_path: Path) -> None:
    options = dataclasses.replace(OPTIONS, heads=("gap",), seeds=1, epochs=1)
    probe(str(birds), options, out=tmp_path / "a", cache=tmp_path / "cache")
    (folder, _) = sorted((tmp_path / "cache").iterdir())
    (folder / "state.json").unlink()
    code = f"""
import time
from pathlib import Path
from covpool.evaluate.lock import held
with held(Path({str(folder)!r})):
    print("held", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(ValueError, match="another process is writing into"):
            probe(str(birds), options, out=tmp_path / "b", cache=tmp_path / "cache")
        holder.kill()
    probe(str(birds), options, out=tmp_path / "b", cache=tmp_path / "cache")


def test_features_that_are_not_finite_are_refused(birds: Path, tmp_path: Path) -> None:
    weights = torch.load("weights.pth")
    weights["conv_stem.weight"][0, 0, 0, 0] = torch.nan
    torch.save(weights, tmp_path / "nan.pth")
    options = dataclasses.replace(OPTIONS, weights=str(tmp_path / "nan.pth"))
    with pytest.raises(ValueError, match="gives numbers that are not finite: try --precision float32"):
        probe(str(birds), options, out=tmp_path / "out", cache=tmp_path / "cache")


def test_a_split_without_a_usable_image(birds: Path, tmp_path: Path) -> None:
    root = tmp_path / "birds"
    shutil.copytree(birds, root)
    for file in (root / "train").rglob("*.jpg"):
        file.write_bytes(b"no image")
    with pytest.raises(ValueError, match="none of the images of a split can be used"):
        probe(str(root), OPTIONS, out=tmp_path / "out", cache=tmp_path / "cache")


def test_a_backbone_whose_expansion_is_not_apart(birds: Path, tmp_path: Path) -> None:
    torch.save(timm.create_model("test_nfnet", num_classes=0).state_dict(), tmp_path / "nfnet.pth")
    options = dataclasses.replace(
        OPTIONS, model="test_nfnet", weights=str(tmp_path / "nfnet.pth"), seeds=1, epochs=1, val_fraction=0.0
    )
    made = probe(str(birds), options, out=tmp_path / "out", cache=tmp_path / "cache")
    assert len(made.record["rows"]) == 3


def test_killed_it_goes_on(birds: Path, tmp_path: Path) -> None:
    """SIGKILL while features are computed and while heads are trained; it ends as if it never was."""
    root = tmp_path / "birds"
    shutil.copytree(birds, root)
    sorted((root / "train").rglob("*.jpg"))[-2].write_bytes(b"no image")

    def command(name: str) -> list[str]:
        words = [sys.executable, "-m", "tests.evaluate.probe.often_saved", "probe", str(root)]
        words += ["--model", "test_efficientnet", "--weights", "weights.pth", "--image-size", "64"]
        words += ["--dim", "8", "--heads", "gap,isqrt_cov", "--seeds", "2", "--epochs", "3", "--workers", "0"]
        return [*words, "--out", str(tmp_path / name), "--cache", str(tmp_path / f"{name}-cache")]

    def half_way() -> bool:
        states = (json.loads(file.read_text()) for file in (tmp_path / "killed-cache").rglob("state.json"))
        return any(0 < state["done"] < SPECIES * 12 for state in states)

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    for reached in (half_way, lambda: "| gap |" in (tmp_path / "killed" / "table.md").read_text()):
        process = subprocess.Popen(command("killed"), stdout=subprocess.DEVNULL, env=environment)
        while process.poll() is None:
            with contextlib.suppress(OSError):
                if reached():
                    break
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
    for name in ("killed", "whole"):
        subprocess.run(command(name), check=True, capture_output=True, timeout=240, env=environment)
    killed, whole = (
        json.loads((tmp_path / name / "results.json").read_text()) for name in ("killed", "whole")
    )
    assert killed["images_left_out"] == {"train": 1, "test": 0}
    for ours, theirs in zip(killed["rows"], whole["rows"], strict=True):
        for key in ("head", "seed", "val", "test"):
            assert ours[key] == theirs[key]
