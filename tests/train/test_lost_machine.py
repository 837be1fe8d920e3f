"""Two machines and a cable between them, which is cut: network namespaces, in which real processes train."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.data.pictures import TINY10, needs_tiny10
from tests.train import recorded_run
from tests.train.recorded_run import hashes, steps

pytestmark = [needs_tiny10, pytest.mark.slow]

# Seconds to wait for the other machine.
LIMIT = 12
FIRST, SECOND = "10.77.0.1", "10.77.0.2"


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """The names of two namespaces."""
    import covpool.train.fitting  # noqa: F401  # once, for all processes

    names = [f"covpool-{os.getpid()}-{number}" for number in range(2)]
    if sys.platform != "linux" or os.geteuid() != 0 or not ip("netns", "add", names[0]):
        pytest.skip("network namespaces need Linux and root")
    try:
        assert ip("netns", "add", names[1])
        cable = ["link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0"]
        assert ip(*cable, "netns", names[1])
        for name, address in zip(names, (FIRST, SECOND), strict=True):
            assert ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            assert ip("-n", name, "link", "set", "eth0", "up")
            assert ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            ip("netns", "delete", name)


def ip(*words: str) -> bool:
    try:
        return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def start(machine: str, rank: int, record: Path, run: Path, epochs: int) -> BaseProcess:
    """One of two processes of a training run, on a machine of its own."""
    recipe = {"data.path": str(TINY10), "data.limit": 125, "schedule.epochs": epochs, "out": str(run)}
    plan = {"recipe": {**recipe, "loop.timeout": LIMIT / 60, "checkpoint.steps": 1}}
    group = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": FIRST, "MASTER_PORT": "29500"}
    arguments = (machine, {**group, "GLOO_SOCKET_IFNAME": "eth0"}, record, plan)
    process = multiprocessing.get_context("fork").Process(target=train_on, args=arguments)
    process.start()
    return process


def train_on(machine: str, group: dict[str, str], record: Path, plan: dict[str, Any]) -> None:
    with open(f"/var/run/netns/{machine}") as namespace:
        assert ctypes.CDLL(None).setns(namespace.fileno(), 0) == 0
    recorded_run._main(group, record, plan)


def wait_for_step(record: Path, step: int) -> None:
    give_up = time.monotonic() + 100
    while step not in steps(record, 0):
        assert time.monotonic() < give_up, (record / "stderr-0.txt").read_text()[-2000:]
        time.sleep(0.05)


def codes(both: list[BaseProcess]) -> list[int | None]:
    """Wait for both processes; their exit codes."""
    for process in both:
        process.join(120)
    return [process.exitcode for process in both]


def test_a_cut_for_good_ends_both_and_names_the_lost_one(machines: list[str], tmp_path: Path) -> None:
    both = [start(machine, rank, tmp_path, tmp_path / "run", 99) for rank, machine in enumerate(machines)]
    try:
        wait_for_step(tmp_path, 4)
        assert ip("-n", machines[1], "link", "set", "eth0", "down")
        cut = time.monotonic()
        assert codes(both) == [2, 2]
        assert time.monotonic() - cut < LIMIT + 60  # to name the lost one takes some time too
    finally:
        for process in both:
            process.kill()
            process.join()
    told = [(tmp_path / f"stderr-{rank}.txt").read_text() for rank in range(2)]
    assert "rank 1 on " in told[0]
    assert "does not answer (limit: 0.2 min, --loop.timeout): the run stops" in told[0]
    assert "the machine with the store of torchrun does not answer" in told[1]
    assert list((tmp_path / "run" / "checkpoints").iterdir())


def test_a_short_cut_changes_nothing(machines: list[str], tmp_path: Path) -> None:
    for name in ("whole", "cut"):
        record = tmp_path / name
        record.mkdir()
        both = [start(machine, rank, record, record / "run", 3) for rank, machine in enumerate(machines)]
        try:
            wait_for_step(record, 4)
            if name == "cut":
                assert ip("-n", machines[1], "link", "set", "eth0", "down")
                time.sleep(5)
                assert ip("-n", machines[1], "link", "set", "eth0", "up")
            assert codes(both) == [0, 0]
        finally:
            for process in both:
                process.kill()
                process.join()
    assert hashes(tmp_path / "cut" / "run", 36) == hashes(tmp_path / "whole" / "run", 36)
