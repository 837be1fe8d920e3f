"""Checks before a run resumes: the images, the recipe, the files in its folder, and the lock."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from covpool.errors import CovpoolError, Interrupted, NotFiniteError
from covpool.training import trainer as trainer_module
from covpool.training.trainer import Trainer
from tests.data.pictures import TINY10, encode, needs_tiny10
from tests.training.recorded_run import launch
from tests.training.small import rows, train

pytestmark = [needs_tiny10, pytest.mark.usefixtures("_no_report")]


@pytest.fixture
def birds(tmp_path: Path) -> Path:
    """Write two classes with eight training images and two validation images each."""
    root = tmp_path / "birds"
    for split, count in (("train", 8), ("val", 2)):
        for name in sorted((TINY10 / "train").iterdir())[:2]:
            (root / split / name.name).mkdir(parents=True)
            for file in sorted(name.iterdir())[:count]:
                shutil.copy(file, root / split / name.name)
    return root


def changes(data: Path, **more: Any) -> dict[str, Any]:
    return {"data.path": str(data), "data.limit": None, "schedule.epochs": 2, "batch_size": 8, **more}


def stop_after(monkeypatch: pytest.MonkeyPatch, cursor: int) -> None:
    """Send SIGTERM to this process at step ``cursor`` of the next run."""
    learn = trainer_module.Learner.step

    def step(self: Any, batch: Any, at: int) -> Any:
        if at == cursor:
            os.kill(os.getpid(), signal.SIGTERM)
        return learn(self, batch, at)

    monkeypatch.setattr(trainer_module.Learner, "step", step)


def interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, Any]) -> Path:
    """Return the folder of a run that was stopped after two steps."""
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        with pytest.raises(Interrupted):
            train(tmp_path / "run", wanted)
    return tmp_path / "run"


def exchange(folder: Path) -> None:
    """Give each image of a class the content of the next one. Names, labels and their number stay."""
    files = sorted(folder.iterdir())
    contents = [file.read_bytes() for file in files]
    for file, content in zip(files, contents[1:] + contents[:1], strict=True):
        file.write_bytes(content)


@pytest.mark.parametrize("same_size", [False, True])
def test_exchanged_images_are_noticed(
    birds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_size: bool
) -> None:
    if same_size:  # uncompressed images of one size
        for number, file in enumerate(sorted(birds.rglob("*.*"))):
            file.unlink()
            file.with_suffix(".bmp").write_bytes(encode(Image.new("RGB", (40, 40), (number, 9, 9)), "BMP"))
    interrupted(tmp_path, monkeypatch, changes(birds))
    exchange(sorted((birds / "train").iterdir())[0])
    with pytest.raises(CovpoolError, match=r"the images have changed since .*run was started"):
        train(tmp_path / "run", changes(birds))


def test_a_copy_of_the_images_will_do(birds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy has other dates and another path."""
    interrupted(tmp_path, monkeypatch, changes(birds))
    shutil.copytree(birds, tmp_path / "copy", copy_function=shutil.copyfile)
    assert train(tmp_path / "run", changes(tmp_path / "copy")).summary["epochs"] == 2


def test_a_checkpoint_of_another_run_is_noticed(
    birds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(tmp_path / "one", monkeypatch, changes(birds))
    interrupted(tmp_path / "two", monkeypatch, changes(birds, **{"optimizer.lr": 0.25}))
    checkpoints = [tmp_path / name / "run" / "checkpoints" for name in ("one", "two")]
    shutil.rmtree(checkpoints[0])
    shutil.copytree(checkpoints[1], checkpoints[0])
    with pytest.raises(CovpoolError, match=r"checkpoint in .* is of a run with --lr 0.25, not 0.0005"):
        train(tmp_path / "one" / "run", changes(birds))


def test_damaged_files_of_a_run_do_not_stop_it(birds: Path, tmp_path: Path) -> None:
    (birds / "train" / sorted(os.listdir(birds / "train"))[0] / "bad.jpg").write_bytes(b"no image")
    wanted = changes(birds)
    run = train(tmp_path / "run", wanted).folder
    log, bad, summary = (run / name for name in ("log.jsonl", "bad_images.csv", "summary.json"))
    whole = log.read_text(), bad.read_text(), json.loads(summary.read_bytes())
    for damage in (b"", b"[]", b'"x"', b"\0\xff", b'{"finished": true}', b"{" * 5000):
        summary.write_bytes(damage)
        log.write_bytes(b'5\n[]\n{"step": "x"}\n\xff\0\n' + whole[0].encode() + b'{"step"')
        bad.write_bytes(b"name\n\0\n" + whole[1].encode() + b"a,b,c,d,e\n")
        assert train(run, wanted).summary["metrics"] == whole[2]["metrics"]
        assert json.loads(summary.read_bytes())["bad_images"] == 1
        kept = [json.loads(line) for line in log.read_text().splitlines()]
        assert kept[: len(whole[0].splitlines())] == [json.loads(line) for line in whole[0].splitlines()]


def test_after_a_kill_in_validation_the_learning_rate_is_that_of_the_epoch(
    birds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = rows(train(tmp_path / "whole", changes(birds)).folder / "metrics.csv")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "evaluate", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(tmp_path / "run", changes(birds))
    found = rows(train(tmp_path / "run", changes(birds)).folder / "metrics.csv")
    assert [row["lr"] for row in found] == [row["lr"] for row in whole]
    assert len({row["lr"] for row in found}) == 2


@pytest.mark.parametrize("val_fraction", [0.25, 0])
def test_weights_that_overflow_are_no_model(birds: Path, tmp_path: Path, val_fraction: float) -> None:
    shutil.rmtree(birds / "val")
    wanted = changes(birds, **{"data.val_fraction": val_fraction, "optimizer.lr": 1e30, "batch_size": 4})
    for _ in range(2):  # also when it is resumed
        with pytest.raises(NotFiniteError, match=r"not finite.*use a lower --lr"):
            train(tmp_path / "run", wanted)
    assert not (tmp_path / "run" / "summary.json").exists()


def test_a_second_run_in_the_folder_of_a_live_one_is_refused(tmp_path: Path) -> None:
    """The first of two real processes is paused in the middle of a run, so it is alive but silent."""
    out, records = tmp_path / "run", [tmp_path / "first", tmp_path / "second"]
    for record in records:
        record.mkdir()
    recipe = {"data.path": str(TINY10), "data.limit": 40, "out": str(out), "schedule.epochs": 1}
    codes: list[int | None] = []
    plan = {"recipe": {**recipe, "checkpoint.steps": 1}, "sigstop": [0, 2]}
    first = threading.Thread(target=lambda: codes.extend(launch(1, records[0], plan)))
    first.start()
    try:
        wait_until_stopped(records[0] / "pid-0")
        before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
        assert launch(1, records[1], {"recipe": recipe}) == [2]
        assert "another process is writing into" in (records[1] / "stderr-0.txt").read_text()
        after = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
        assert {path for path in after if after[path] != before.get(path)} <= {out / ".covpool-lock"}
    finally:
        os.kill(int((records[0] / "pid-0").read_text()), signal.SIGCONT)
        first.join()
    assert codes == [0]


def wait_until_stopped(pid: Path) -> None:
    give_up = time.monotonic() + 100
    while time.monotonic() < give_up:
        time.sleep(0.05)
        text = pid.read_text() if pid.exists() else ""
        if text and Path(f"/proc/{text}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return
    raise AssertionError("the run did not begin")
