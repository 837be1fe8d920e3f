"""Runs survive kills, stops, other numbers of processes, a full disk and NaN, in real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.data.pictures import TINY10, needs_tiny10
from tests.training.recorded_run import global_batches, hashes, launch, steps

pytestmark = needs_tiny10

ROOT = Path(__file__).parents[2]
# 12 steps per epoch, with 5 images left over in each.
BATCHES, LAST = 12, 24
DATA: dict[str, Any] = {"data.path": str(TINY10), "data.limit": 125}


def folder(path: Path, name: str) -> Path:
    (path / name).mkdir(parents=True)
    return path / name


def events(run: Path, what: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("event") == what]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on two processes from beginning to end, with the record in ``record`` and the run in ``run``."""
    path = tmp_path_factory.mktemp("undisturbed")
    record = folder(path, "record")
    assert launch(2, record, {"recipe": {**DATA, "out": str(path / "run")}}) == [0, 0]
    assert list(steps(record, 0)) == list(range(LAST))
    return path


def test_each_sample_comes_once_in_an_epoch(undisturbed: Path) -> None:
    batches = global_batches((undisturbed / "record", 2))
    for epoch in range(2):
        ids = [i for step in range(BATCHES) for i in batches[epoch * BATCHES + step]]
        assert len(set(ids)) == len(ids) == 10 * BATCHES
    assert batches[0] != batches[BATCHES]


@pytest.mark.slow
def test_stopped_twice_in_an_epoch_it_ends_as_if_it_never_was(undisturbed: Path, tmp_path: Path) -> None:
    record, run = folder(tmp_path, "record"), tmp_path / "run"
    recipe = {**DATA, "out": str(run)}
    # Only one rank receives the signal, in the middle of a step. Both stop after it, with a checkpoint.
    codes = launch(2, record, {"recipe": {**recipe, "data.workers": 1}, "sigterm": [1, 2]})
    assert codes == [143, 143]
    assert (run / "checkpoints" / "step-00000003").is_dir()
    assert launch(2, record, {"recipe": recipe, "sigterm": [0, 7]}) == [143, 143]
    assert (run / "checkpoints" / "step-00000008").is_dir()
    assert launch(2, record, {"recipe": {**recipe, "data.workers": 2}}) == [0, 0]
    assert [event["step"] for event in events(run, "resumed")] == [3, 8]
    for rank in (0, 1):  # every step of every rank has the same images and random numbers
        assert steps(record, rank) == steps(undisturbed / "record", rank)
    assert hashes(run, LAST) == hashes(undisturbed / "run", LAST)
    assert set(hashes(run, LAST)) == {"model.safetensors", "optimizer.safetensors", "ema.safetensors"}
    assert predictions(run) == predictions(undisturbed / "run")


@pytest.mark.slow
def test_stopped_in_either_stage_it_ends_as_if_it_never_was(tmp_path: Path) -> None:
    recipe = {**DATA, "schedule.head_first": 0.5}
    whole, parts = folder(tmp_path, "whole"), folder(tmp_path, "parts")
    assert launch(2, whole, {"recipe": {**recipe, "out": str(tmp_path / "whole-run")}}) == [0, 0]
    run = {"recipe": {**recipe, "out": str(tmp_path / "run")}}
    for rank, last in ((1, 6), (0, BATCHES - 1), (1, BATCHES + 3)):  # in stage 1, between stages, in stage 2
        assert launch(2, parts, {**run, "sigterm": [rank, last]}) == [143, 143]
    assert launch(2, parts, run) == [0, 0]
    for rank in (0, 1):
        assert steps(parts, rank) == steps(whole, rank)
    assert hashes(tmp_path / "run", LAST) == hashes(tmp_path / "whole-run", LAST)


def predictions(run: Path) -> str:
    return (run / "predictions.csv").read_text()


@pytest.mark.parametrize("layout", ["folder", pytest.param("shards", marks=pytest.mark.slow)])
def test_on_another_number_of_processes_the_batches_stay(tmp_path: Path, layout: str) -> None:
    recipe = {**DATA, "out": str(tmp_path / "run")}
    if layout == "shards":
        recipe |= {"data.path": shards(tmp_path), "data.limit": None, "data.window": 2}
    records = [folder(tmp_path, name) for name in ("whole", "two", "one", "two-again")]
    whole = {"recipe": {**recipe, "out": str(tmp_path / "whole-run")}}
    assert launch(1, records[0], whole) == [0]
    assert launch(2, records[1], {"recipe": recipe, "sigterm": [0, 4]}) == [143, 143]
    assert launch(1, records[2], {"recipe": recipe, "sigterm": [0, 15]}) == [143]
    assert launch(2, records[3], {"recipe": recipe}) == [0, 0]
    parts = [global_batches((record, size)) for record, size in zip(records[1:], (2, 1, 2), strict=True)]
    assert [(min(part), max(part)) for part in parts] == [(0, 4), (5, 15), (16, LAST - 1)]
    joined = parts[0] | parts[1] | parts[2]
    assert joined == global_batches((records[0], 1))
    for epoch in range(2):
        ids = [i for step in range(BATCHES) for i in joined[epoch * BATCHES + step]]
        assert len(set(ids)) == len(ids) == 10 * BATCHES


def shards(path: Path) -> str:
    """Write 125 images of tiny10 in several small tars, and some to validate on. Return the folder."""
    from covpool.data.shards.write import write_shards
    from covpool.data.sources import open_images
    from covpool.training.splits import split_off

    images = open_images(TINY10, "train")
    for split, count in (("train", 125), ("val", 40)):
        part = split_off(images, count / len(images), seed=len(split))[1]
        assert len(part) == count
        index = write_shards(part, path / "shards" / split, shard_bytes=60_000, seed=0)
        assert split == "val" or len(index.shards) > 3
    return str(path / "shards")


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_and_started_again_it_ends_as_if_it_never_was(
    undisturbed: Path, tmp_path: Path, killed: int
) -> None:
    record, run = folder(tmp_path, "record"), tmp_path / "run"
    recipe = {**DATA, "out": str(run), "checkpoint.steps": 1}
    codes = launch(2, record, {"recipe": recipe, "sigkill": [killed, 4]})
    assert codes[killed] == -signal.SIGKILL
    assert codes[1 - killed] not in (0, None)  # it cannot continue alone
    assert launch(2, record, {"recipe": recipe}) == [0, 0]
    assert [event["step"] for event in events(run, "resumed")] == [4]
    for rank in (0, 1):
        assert steps(record, rank) == steps(undisturbed / "record", rank)
    assert hashes(run, LAST) == hashes(undisturbed / "run", LAST)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 0])
def test_a_process_that_does_not_answer_is_named(tmp_path: Path, lost: int) -> None:
    """The process is alive but silent: its connections stay open, like those of a disconnected machine.

    The store is in the process of rank 0, so without it the other process cannot ask who is left.
    """
    record, run = folder(tmp_path, "record"), tmp_path / "run"
    recipe = {**DATA, "out": str(run), "checkpoint.steps": 1}
    plan = {"recipe": {**recipe, "loop.timeout": 0.05}, "sigstop": [lost, 4]}
    released = threading.Thread(target=release, args=(record, lost, 1 - lost))
    released.start()
    codes = launch(2, record, plan)
    released.join()
    assert codes[1 - lost] == 2
    message = (record / f"stderr-{1 - lost}.txt").read_text()
    name = f"rank {lost} on {socket.gethostname()}" if lost else "the machine with the store of torchrun"
    assert f"{name} does not answer" in message
    assert "the command stops. Rerun it to resume" in message
    assert launch(2, record, {"recipe": recipe}) == [0, 0]
    assert [event["step"] for event in events(run, "resumed")] == [4]


def release(record: Path, stopped: int, other: int) -> None:
    """Kill a stopped process after the other has reported it. The other must not wait for it."""
    give_up = time.monotonic() + 100
    while time.monotonic() < give_up:
        time.sleep(0.2)
        path = record / f"stderr-{other}.txt"
        if path.exists() and "does not answer" in path.read_text():
            break
    os.kill(int((record / f"pid-{stopped}").read_text()), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_killed_under_torchrun_it_ends_as_if_it_never_was(
    undisturbed: Path, tmp_path: Path, killed: int
) -> None:
    record, run = folder(tmp_path, "record"), tmp_path / "run"
    plan = {"recipe": {**DATA, "out": str(run), "checkpoint.steps": 1, "checkpoint.keep": 3}}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "2", "-m", "tests.training.recorded_run", str(record), json.dumps(plan)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
        try:
            kill_when(record, killed, cursor=4)
            assert process.wait(240) == 0, (tmp_path / "output").read_text()[-2000:]
        finally:
            process.kill()
    (resumed,) = events(run, "resumed")
    assert 4 <= resumed["step"] < LAST
    assert resumed["step"] % BATCHES, "it should have been killed in the middle of an epoch"
    for rank in (0, 1):
        assert steps(record, rank) == steps(undisturbed / "record", rank)
    assert hashes(run, LAST) == hashes(undisturbed / "run", LAST)


def kill_when(record: Path, rank: int, cursor: int) -> None:
    """Send SIGKILL to a rank as soon as it has done a step."""
    give_up = time.monotonic() + 120
    while cursor not in finished_steps(record, rank):
        assert time.monotonic() < give_up, "it did not begin"
        time.sleep(0.005)
    os.kill(int((record / f"pid-{rank}").read_text()), signal.SIGKILL)


def finished_steps(record: Path, rank: int) -> list[int]:
    path = record / f"steps-{rank}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["cursor"] for line in lines if line.endswith("}")]


def test_a_nan_never_reaches_the_weights(tmp_path: Path) -> None:
    record, run = folder(tmp_path, "record"), tmp_path / "run"
    recipe = {**DATA, "out": str(run), "schedule.epochs": 1, "checkpoint.steps": 1, "checkpoint.keep": 99}
    # In the second bad step, only one rank's share contains NaN. Both ranks must skip it.
    plan = {"recipe": {**recipe, "loop.max_skips": 2}, "nan": [[0, 3], [1, 3], [1, 6]]}
    assert launch(2, record, plan) == [0, 0]
    skipped = [cursor for cursor, step in steps(record, 0).items() if step["skipped"]]
    assert skipped == [3, 6] == [c for c, step in steps(record, 1).items() if step["skipped"]]
    for cursor in skipped:  # weights, BatchNorm statistics, momentum and average are as before
        assert hashes(run, cursor + 1) == hashes(run, cursor)
    assert hashes(run, 5) != hashes(run, 4)
    noted = events(run, "skipped")
    batches = global_batches((record, 2))
    assert [(event["step"], sorted(event["ids"])) for event in noted] == [(4, batches[3]), (7, batches[6])]
    assert all(name.startswith("train/") for name in noted[0]["names"])
    assert json.loads((run / "summary.json").read_bytes())["skipped_steps"] == 2


@pytest.mark.slow
def test_too_many_nans_stop_the_run(tmp_path: Path) -> None:
    record, run = folder(tmp_path, "record"), tmp_path / "run"
    plan = {"recipe": {**DATA, "out": str(run), "loop.max_skips": 1}, "nan": [[1, 3], [0, 5]]}
    assert launch(2, record, plan) == [2, 2]
    message = (record / "stderr-0.txt").read_text()
    assert "2 steps had a loss or a gradient that is not finite, more than --max-skips 1" in message
    assert "--max-skips" not in (record / "stderr-1.txt").read_text()  # only the first rank reports it


def test_a_full_disk_leaves_the_last_checkpoint(undisturbed: Path, tmp_path: Path) -> None:
    record, run = folder(tmp_path, "record"), tmp_path / "run"
    recipe = {**DATA, "out": str(run), "checkpoint.steps": 4}
    assert launch(2, record, {"recipe": recipe, "full_disk": [0, 5]}) == [2, 2]
    message = (record / "stderr-0.txt").read_text()
    assert "no checkpoint could be written" in message
    assert "Traceback" not in message
    names = [path.name for path in (run / "checkpoints").iterdir()]
    assert names == ["step-00000004"], "and nothing half written beside it"
    assert launch(2, record, {"recipe": recipe}) == [0, 0]
    assert [event["step"] for event in events(run, "resumed")] == [4]
    assert hashes(run, LAST) == hashes(undisturbed / "run", LAST)


@pytest.mark.slow
def test_a_file_system_that_is_full_leaves_the_last_checkpoint(undisturbed: Path, tmp_path: Path) -> None:
    record, disk = folder(tmp_path, "record"), folder(tmp_path, "disk")
    mount = ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    run = disk / "run"
    recipe = {**DATA, "out": str(run), "checkpoint.steps": 2, "checkpoint.keep": 99}
    try:
        assert launch(2, record, {"recipe": recipe}) == [2, 2]
        message = (record / "stderr-0.txt").read_text()
        assert "no checkpoint could be written" in message
        assert "No space left on device" in message
        *old, last = sorted(path.name for path in (run / "checkpoints").iterdir())
        assert old  # free some space, as a user would
        for name in old:
            shutil.rmtree(run / "checkpoints" / name)
        assert launch(2, record, {"recipe": {**recipe, "checkpoint.keep": 1}}) == [0, 0]
        assert [f"step-{event['step']:08d}" for event in events(run, "resumed")] == [last]
        assert hashes(run, LAST) == hashes(undisturbed / "run", LAST)
    finally:
        subprocess.run(["umount", str(disk)], check=False)


@pytest.mark.slow
@pytest.mark.parametrize(("head_first", "stops"), [(0.0, (3,)), (0.5, (3, BATCHES - 1))])
def test_resumed_on_three_processes_it_ends_as_if_it_never_was(
    tmp_path: Path, head_first: float, stops: tuple[int, ...]
) -> None:
    # With three gradients the order of addition matters: DDP must use the same buckets before and after.
    recipes = [
        {**DATA, "out": str(tmp_path / name), "schedule.head_first": head_first}
        for name in ("whole", "stopped")
    ]
    assert launch(3, folder(tmp_path, "whole-record"), {"recipe": recipes[0]}) == [0, 0, 0]
    record = folder(tmp_path, "record")
    for stop in stops:
        assert launch(3, record, {"recipe": recipes[1], "sigterm": [2, stop]}) == [143, 143, 143]
    assert launch(3, record, {"recipe": recipes[1]}) == [0, 0, 0]
    assert hashes(tmp_path / "stopped", LAST) == hashes(tmp_path / "whole", LAST)


@pytest.mark.slow
def test_two_poolings_are_compared_on_two_processes(tmp_path: Path) -> None:
    record, run = folder(tmp_path, "record"), tmp_path / "run"
    recipe = {**DATA, "out": str(run), "schedule.epochs": 1}
    plan = {"recipe": recipe, "compare": "gap"}
    assert launch(2, record, {**plan, "sigterm": [1, 3]}) == [143, 143]
    assert launch(2, record, plan) == [0, 0]
    assert {path.name for path in run.iterdir()} >= {"isqrt_cov", "gap", "report.html"}
