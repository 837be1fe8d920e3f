"""Only the same call resumes a folder of results."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import shutil
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from covpool.evaluate.probe import probe, probing
from covpool.inference import store
from covpool.storage.manifest import Manifest
from tests.data.pictures import needs_sparrows
from tests.evaluate.probe.small_probing import OPTIONS, SPECIES
from tests.evaluate.test_lock import hold
from tests.forked import command, finish, send_when
from tests.inference.small import picture, write_folder

pytestmark = needs_sparrows


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


def test_other_settings_want_another_folder(probed: Any, birds: Path, cache: Path) -> None:
    other = dataclasses.replace(OPTIONS, lr=0.1)
    with pytest.raises(ValueError, match=r"has results without lr: use another --out"):
        probe(str(birds), other, out=probed.folder, cache=cache)


@pytest.mark.slow
def test_a_call_that_came_to_nothing_binds_nobody(birds: Path, cache: Path, tmp_path: Path) -> None:
    """Heads are checked before features are computed, and the cache may be inside the output folder."""
    wrong = dataclasses.replace(OPTIONS, seeds=1, heads=("gap", "cls"))
    with pytest.raises(ValueError, match="no class token"):
        probe(str(birds), wrong, out=tmp_path / "out", cache=tmp_path / "out" / "cache")
    assert not list(tmp_path.rglob("*.npy"))
    right = dataclasses.replace(wrong, heads=("gap",), lr=0.01)
    assert probe(str(birds), right, out=tmp_path / "out", cache=tmp_path / "out" / "cache").record["rows"]


@pytest.mark.slow
def test_a_stop_among_features_in_the_same_folder(
    birds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = dataclasses.replace(OPTIONS, seeds=1, heads=("gap",), val_fraction=0.0)
    out, inside = tmp_path / "out", tmp_path / "out" / "cache"

    def stop(what: str, done: int, total: int) -> None:
        if what == "images":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        probe(str(birds), one, out=out, cache=inside, progress=stop)
    assert probe(str(birds), one, out=out, cache=inside).record["rows"]


def test_two_processes_do_not_share_a_folder(birds: Path, cache: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    is_held = context.Event()
    other = context.Process(target=hold, args=(tmp_path / "out", is_held))
    other.start()
    assert is_held.wait(60)
    try:
        with pytest.raises(ValueError, match="another process is writing into"):
            probe(str(birds), OPTIONS, out=tmp_path / "out", cache=cache)
    finally:
        other.kill()
        other.join()


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["sparrow"], "has only one class, 'sparrow'"),
        (["auk", os.fsdecode(b"schw\xe4n")], "is not UTF-8: rename its folder"),
    ],
)
def test_classes_are_looked_at_first(tmp_path: Path, names: list[str], sentence: str) -> None:
    for split in ("train", "test"):
        for name in names:
            write_folder(tmp_path / "data" / split / name, {"1.jpg": picture(0), "2.jpg": picture(1)})
    with pytest.raises(ValueError, match=sentence):
        probe(str(tmp_path / "data"), OPTIONS, out=tmp_path / "out", cache=tmp_path / "cache")


def test_an_image_for_each_class_leaves_none_to_choose_by(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for number, name in enumerate(("auk", "bee", "cat", "dog", "elk")):
            write_folder(tmp_path / "data" / split / name, {"1.jpg": picture(number)})
    with pytest.raises(ValueError, match="every class keeps one; --val-fraction 0 chooses no best head"):
        probe(str(tmp_path / "data"), OPTIONS, out=tmp_path / "out", cache=tmp_path / "cache")


@pytest.mark.slow
def test_more_seeds_may_be_asked_for(birds: Path, cache: Path, tmp_path: Path) -> None:
    one = dataclasses.replace(OPTIONS, seeds=1, heads=("gap",), val_fraction=0.0)
    first = probe(str(birds), one, out=tmp_path, cache=cache)
    assert first.record["best"] is None  # there are no validation images to choose by
    both = probe(str(birds), dataclasses.replace(one, seeds=2), out=tmp_path, cache=cache)
    assert both.record["rows"][:1] == first.record["rows"]
    assert len(both.record["rows"]) == 2


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
    with pytest.raises(ValueError, match="has results of other images or weights: use another --out"):
        probe(str(root), options, out=tmp_path / "out", cache=tmp_path / "cache")


def test_a_folder_of_something_else_is_left_alone(birds: Path, tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "covpool.json").write_text("precious")
    with pytest.raises(ValueError, match="holds other files: use a new --out"):
        probe(str(birds), OPTIONS, out=tmp_path, cache=tmp_path / "cache")
    assert (tmp_path / "bundle" / "covpool.json").read_text() == "precious"


@pytest.mark.parametrize(("inside", "what"), [("out", "results"), ("cache", "features")])
def test_nothing_goes_among_the_images(birds: Path, tmp_path: Path, inside: str, what: str) -> None:
    places = {"out": tmp_path / "out", "cache": tmp_path / "cache", inside: birds / "among"}
    with pytest.raises(ValueError, match=f"{what} would go into the images themselves, .*: give --{inside}"):
        probe(str(birds), OPTIONS, **places)
    assert not (birds / "among").exists()


def test_killed_it_goes_on(birds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL comes during extraction and during training. The results are those of an uninterrupted run."""
    root, log = tmp_path / "birds", tmp_path / "log"
    shutil.copytree(birds, root)
    sorted((root / "train").rglob("*.jpg"))[-2].write_bytes(b"no image")
    # Compute and save features of four images at a time.
    monkeypatch.setattr(store, "SECONDS_BETWEEN_SAVES", 0.0)
    whole_batches = probing.Extractor.__init__
    monkeypatch.setattr(
        probing.Extractor,
        "__init__",
        lambda self, model, options, *rest: whole_batches(
            self, model, dataclasses.replace(options, extract_batch=4), *rest
        ),
    )

    def start(name: str) -> BaseProcess:
        words = ["--model", "test_efficientnet", "--weights", "weights.pth", "--image-size", "64"]
        words += ["--dim", "8", "--heads", "gap,isqrt_cov", "--seeds", "2", "--epochs", "3", "--workers", "0"]
        places = ["--out", tmp_path / name, "--cache", tmp_path / f"{name}-cache"]
        return command("probe", root, *words, *places, log=log)

    def half_way() -> bool:
        files = (tmp_path / "killed-cache").rglob("manifest.json")
        parts = (part for file in files for part in Manifest.read(file.read_bytes()).parts.values())
        return any(0 < part.facts["done"] < SPECIES * 12 for part in parts)

    send_when(start("killed"), half_way, log)
    send_when(start("killed"), lambda: "| gap |" in (tmp_path / "killed" / "table.md").read_text(), log)
    for name in ("killed", "whole"):
        finish(start(name), log)
    killed, whole = (
        json.loads((tmp_path / name / "results.json").read_text()) for name in ("killed", "whole")
    )
    assert killed["images_left_out"] == {"train": 1, "test": 0}
    for ours, theirs in zip(killed["rows"], whole["rows"], strict=True):
        for key in ("head", "seed", "val", "test"):
            assert ours[key] == theirs[key]
