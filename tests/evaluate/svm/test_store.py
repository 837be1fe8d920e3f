"""Features on disk are complete, even after kills and errors."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from covpool.data.decode import decode
from covpool.data.look import UNREADABLE, read_content
from covpool.data.sources import open_images
from covpool.data.transforms import Preprocessing, evaluation_transform
from covpool.evaluate.svm.classifier import Features, make_features
from covpool.evaluate.svm.solvers import solve_streaming
from covpool.inference import store
from covpool.inference.forward import Pass
from covpool.models.bundle import load_model
from covpool.models.saving import save_model
from covpool.processes import Processes
from tests.data.pictures import needs_sparrows
from tests.evaluate.svm.samples import a_bundle, a_problem, some_sparrows
from tests.forked import DEADLINE, fork

pytestmark = needs_sparrows
KEY = {"of": "sparrows"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return some_sparrows(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_bundle(tmp_path_factory.mktemp("model") / "net", join="gap")


def make(folder: Path, bundle: Path, data: Path, **changes: Any) -> tuple[Features, list[str], list[int]]:
    """Return the features, the messages, and the number of finished images at each step."""
    messages: list[str] = []
    steps: list[int] = []
    images = open_images(data)
    settings = {
        "key": KEY,
        "content": read_content(images, lambda done, total: None),
        "progress": lambda done, total: steps.append(done),
        **changes,
    }
    made = make_features(
        folder,
        model=load_model(bundle),
        images=images,
        passing=Pass(4, 0),
        processes=Processes(0, 1, torch.device("cpu")),
        log=messages.append,
        **settings,
    )
    return made, messages, steps


def test_rows_are_images_and_their_mirror_images(data: Path, bundle: Path, tmp_path: Path) -> None:
    made, messages, steps = make(tmp_path / "features", bundle, data)
    assert messages == [f"features take 19.0 kB in {tmp_path / 'features'}"]
    assert steps == [4, 8, 12, 16, 18]
    model, images = load_model(bundle), open_images(data)
    assert np.array_equal(made.labels, images.labels)
    transform = evaluation_transform(Preprocessing.of(model.pretrained_cfg))
    picture = transform(decode(images.read(5)))
    with torch.no_grad():
        both = torch.stack([picture, picture.flip(-1)])
        received = model.forward_head(model.forward_features(both), pre_logits=True)
    parts = [torch.nn.functional.normalize(part) for part in (received[:, :36], received[:, 36:])]
    np.testing.assert_allclose(made.rows.read([10, 11]), torch.cat(parts, dim=1), atol=1e-5)


def test_finished_features_are_reused(data: Path, bundle: Path, tmp_path: Path) -> None:
    first, _, _ = make(tmp_path, bundle, data)
    again, messages, steps = make(tmp_path, bundle, data)
    assert (messages, steps) == ([], [])
    assert np.array_equal(again.rows.read(range(36)), first.rows.read(range(36)))
    assert np.array_equal(again.labels, first.labels)
    _, messages, steps = make(tmp_path, bundle, data, key={"of": "others"})
    assert messages
    assert steps[-1] == 18


@pytest.mark.parametrize(
    ("between_saves", "resumed"),
    [(0.0, [12, 16, 18]), pytest.param(1000.0, [4, 8, 12, 16, 18], marks=pytest.mark.slow)],
)
def test_a_kill_costs_what_was_not_saved(
    data: Path,
    bundle: Path,
    between_saves: float,
    resumed: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kill comes at the twelfth image, whose batch is not recorded in the file yet."""

    def die(done: int, total: int) -> None:
        if done >= 12:
            os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(store, "SECONDS_BETWEEN_SAVES", between_saves)
        process = fork(lambda: make(tmp_path / "killed", bundle, data, progress=die), tmp_path / "log")
    process.join(DEADLINE)
    assert process.exitcode == -signal.SIGKILL
    made, _, steps = make(tmp_path / "killed", bundle, data)
    assert steps == resumed
    whole, _, _ = make(tmp_path / "whole", bundle, data)
    assert np.array_equal(made.labels, whole.labels)
    np.testing.assert_allclose(made.rows.read(range(36)), whole.rows.read(range(36)), atol=1e-6)


def test_bad_images_are_left_out_and_kept_in_mind(data: Path, bundle: Path, tmp_path: Path) -> None:
    spoiled = Path(shutil.copytree(data, tmp_path / "data"))
    names = sorted((spoiled / "train").rglob("*.jpg"))
    for picture in names[4:8]:  # a whole batch
        picture.write_bytes(b"no picture")
    for _ in range(2):  # made and reused
        made, _, _ = make(tmp_path / "features", bundle, spoiled)
        assert [image.name for image in made.bad] == [str(path.relative_to(spoiled)) for path in names[4:8]]
        assert np.flatnonzero(made.labels < 0).tolist() == [4, 5, 6, 7]
        numbers, labels = made.samples()
        assert numbers.tolist() == [*range(8), *range(16, 36)]
        assert labels.tolist() == np.repeat(np.delete(made.labels, range(4, 8)), 2).tolist()


@pytest.mark.parametrize("name", ["features.npy", "manifest.json"])
def test_what_was_deleted_or_cut_is_made_anew(data: Path, bundle: Path, tmp_path: Path, name: str) -> None:
    first, _, _ = make(tmp_path, bundle, data)
    rows = first.rows.read(range(36))
    for damage in (lambda file: file.unlink(), lambda file: os.truncate(file, 150)):
        damage(tmp_path / name)
        again, _, steps = make(tmp_path, bundle, data)
        assert steps[-1] == 18
        np.testing.assert_allclose(again.rows.read(range(36)), rows, atol=1e-6)


def test_an_image_that_cannot_be_read_for_a_while_is_not_given_up(
    data: Path, bundle: Path, tmp_path: Path
) -> None:
    there = Path(shutil.copytree(data, tmp_path / "data"))
    content = read_content(open_images(there), lambda done, total: None)
    name = sorted((there / "train").rglob("*.jpg"))[6]
    gone = name.rename(tmp_path / "elsewhere")
    name.symlink_to(gone.with_name("nowhere"))
    with pytest.raises(ValueError, match=r"became unreadable during the run \(No such file or directory\)"):
        make(tmp_path / "features", bundle, there, content=content)
    name.unlink()
    gone.rename(name)
    made, _, _ = make(tmp_path / "features", bundle, there, content=content)
    assert made.bad == []
    assert (made.labels >= 0).all()


def test_an_image_that_was_cut_after_it_was_hashed_is_not_given_up(
    data: Path, bundle: Path, tmp_path: Path
) -> None:
    """Its hash would stand for bytes that it no longer has."""
    there = Path(shutil.copytree(data, tmp_path / "data"))
    content = read_content(open_images(there), lambda done, total: None)
    name = sorted((there / "train").rglob("*.jpg"))[6]
    whole = name.read_bytes()
    name.unlink()
    name.write_bytes(whole[:1000])
    with pytest.raises(ValueError, match=r"became unreadable during the run \(it has changed\)"):
        make(tmp_path / "features", bundle, there, content=content)


def test_an_image_that_could_never_be_read_is_given_up(data: Path, bundle: Path, tmp_path: Path) -> None:
    there = Path(shutil.copytree(data, tmp_path / "data"))
    name = sorted((there / "train").rglob("*.jpg"))[6]
    name.unlink()
    name.symlink_to(tmp_path / "nowhere")
    content = read_content(open_images(there), lambda done, total: None)
    assert [i for i in range(18) if content.images[32 * i : 32 * i + 32] == UNREADABLE] == [6]
    made, _, _ = make(tmp_path / "features", bundle, there, content=content)
    assert np.flatnonzero(made.labels < 0).tolist() == [6]


def test_a_disk_without_room(
    data: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr("covpool.inference.place.shutil.disk_usage", lambda folder: usage(1000))
    with pytest.raises(ValueError, match=r"^features take 19.0 kB and .* has 1.00 kB free: give another"):
        make(tmp_path, bundle, data)
    assert list(tmp_path.iterdir()) == []


def test_there_must_be_room_for_what_the_solver_keeps_too(
    data: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage, columns = namedtuple("usage", "free"), load_model(bundle).head_hidden_size
    free = 18 * 2 * 4 * columns  # features of 18 images; 432 more bytes are for 3 classes
    monkeypatch.setattr("covpool.inference.place.shutil.disk_usage", lambda folder: usage(free + 431))
    with pytest.raises(ValueError, match="give another folder"):
        make(tmp_path, bundle, data)
    monkeypatch.setattr("covpool.inference.place.shutil.disk_usage", lambda folder: usage(free + 432))
    make(tmp_path, bundle, data)


def test_what_a_killed_solver_left_is_removed(data: Path, bundle: Path, tmp_path: Path) -> None:
    make(tmp_path, bundle, data)

    def die(done: int, violation: float) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    process = fork(lambda: solve_streaming(a_problem(3, 10, 20), tmp_path, passes=die), tmp_path / "svm.log")
    process.join(DEADLINE)
    assert process.exitcode == -signal.SIGKILL
    for log in tmp_path.glob("svm.*"):
        log.unlink()
    (left,) = tmp_path.glob("svm-*")
    make(tmp_path, bundle, data, key={"of": "others"})
    assert not left.exists()
    (tmp_path / "svm-notes").mkdir()
    (tmp_path / "svm-notes" / "diary.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds other files, such as 'svm-notes'"):
        make(tmp_path, bundle, data)


def test_features_that_are_not_finite_are_refused(data: Path, tmp_path: Path) -> None:
    model = load_model(a_bundle(tmp_path / "whole"))
    with torch.no_grad():
        weight = next(model.backbone_parts()[0].parameters())  # finite weights, but their sums overflow
        weight[::2], weight[1::2] = 3e38, -3e38
    spoiled = save_model(model, tmp_path / "spoiled")
    first = open_images(data).name(0)
    sentence = f"^the features of 4 images of a batch are not finite in float32, first of {first}: check"
    with pytest.raises(ValueError, match=sentence):
        make(tmp_path / "features", spoiled, data)


def test_a_folder_of_something_else_is_left_alone(data: Path, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "diary.txt").write_text("mine")
    (tmp_path / "manifest.json").write_text(json.dumps({"key": "another program's"}))
    with pytest.raises(ValueError, match=r"holds other files, such as 'diary.txt': use a new folder"):
        make(tmp_path, bundle, data)
    assert len(list(tmp_path.iterdir())) == 2
