"""Training in two network namespaces, which stand for two machines, and the link between them is cut."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.data.pictures import TINY10, needs_tiny10
from tests.training import recorded_run
from tests.training.recorded_run import hashes, steps

pytestmark = [needs_tiny10, pytest.mark.slow]

# Seconds to wait for the other machine.
LIMIT = 12
FIRST, SECOND = "10.77.0.1", "10.77.0.2"


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """Create two linked network namespaces and return their names."""
    import covpool.training.run  # noqa: F401  # once, for all processes

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
    """Start one of the two processes of a training run, each on its own machine."""
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
    """Wait for both processes and return their exit codes."""
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
        assert time.monotonic() - cut < LIMIT + 60  # naming the lost rank takes some time too
    finally:
        for process in both:
            process.kill()
            process.join()
    messages = [(tmp_path / f"stderr-{rank}.txt").read_text() for rank in range(2)]
    assert "rank 1 on " in messages[0]
    assert (
        "does not answer (limit: 0.2 min; of covpool train: --loop.timeout): the command stops" in messages[0]
    )
    assert "the machine with the store of torchrun does not answer" in messages[1]
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


# Under torchrun, with a classifier that is sharded over the machines.
WORDS = (
    f"train {TINY10} --model test_vit --model.dim 8 --limit 125 --batch-size 25 --epochs 4 --workers 0 "
    "--loop.divide-classes true --deterministic true --checkpoint-steps 1 --loop.timeout 0.5"
).split()
RENDEZVOUS = "keep_alive_interval=2,keep_alive_max_attempt=3,read_timeout=20,join_timeout=120"


class Node:
    """torchrun on a machine, with one process."""

    def __init__(self, machines: list[str], number: int, run: Path) -> None:
        self.machine = machines[number]
        self.log = run.with_name(f"{run.name}-{number}-{time.monotonic_ns()}.log")
        torchrun = ["torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-id", run.name]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{FIRST}:29501"]
        torchrun += ["--rdzv-conf", f"{RENDEZVOUS},is_host={1 - number}"]
        torchrun += ["--local-addr", (FIRST, SECOND)[number]]
        command = ["ip", "netns", "exec", machines[number], sys.executable, "-m", *torchrun]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                [*command, "-m", "covpool", *WORDS, "--out", str(run)],
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def kill(self) -> None:
        """Kill all processes of the machine at once, like a power failure."""
        found = subprocess.run(["ip", "netns", "pids", self.machine], capture_output=True, check=True)
        for number in found.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(number), signal.SIGKILL)
        self.process.wait()

    def code(self, seconds: float) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.log.read_text()[-3000:]) from None


def checkpoints(run: Path) -> int:
    """Return the last step that has a checkpoint."""
    return max((int(path.name[5:]) for path in (run / "checkpoints").glob("step-????????")), default=0)


def wait_for_checkpoint(run: Path, step: int, nodes: list[Node]) -> None:
    give_up = time.monotonic() + 240
    while checkpoints(run) < step:
        assert time.monotonic() < give_up, nodes[0].log.read_text()[-3000:]
        time.sleep(0.1)


def weights(run: Path) -> dict[str, bytes]:
    files = sorted((run / "bundle").glob("*.safetensors"))
    assert len(files) == 3  # the backbone, and the rows of each machine
    return {path.name: path.read_bytes() for path in files}


def test_two_nodes_of_torchrun_survive_a_cut_and_a_killed_node(machines: list[str], tmp_path: Path) -> None:
    started: list[Node] = []

    def launch(run: Path) -> list[Node]:
        nodes = [Node(machines, number, run) for number in range(2)]
        started.extend(nodes)
        return nodes

    try:
        whole = tmp_path / "whole"
        assert [node.code(400) for node in launch(whole)] == [0, 0]

        # The link is down for ten seconds in the middle of an epoch.
        cut = tmp_path / "cut"
        nodes = launch(cut)
        wait_for_checkpoint(cut, 3, nodes)
        assert ip("-n", machines[1], "link", "set", "eth0", "down")
        time.sleep(10)
        before = checkpoints(cut)
        assert ip("-n", machines[1], "link", "set", "eth0", "up")
        healed = time.monotonic()
        wait_for_checkpoint(cut, before + 1, nodes)
        print(f"after a cut of 10 s, training continues within {time.monotonic() - healed:.0f} s")
        assert [node.code(400) for node in nodes] == [0, 0]
        assert weights(cut) == weights(whole)

        # A machine dies. The other one stops, both are started again, and nothing is lost.
        killed = tmp_path / "killed"
        nodes = launch(killed)
        wait_for_checkpoint(killed, 7, nodes)
        nodes[1].kill()
        died = time.monotonic()
        assert nodes[0].code(180) != 0
        print(f"the death of a node ends the other after {time.monotonic() - died:.0f} s")
        reached = checkpoints(killed)
        assert reached >= 7
        nodes = launch(killed)
        assert [node.code(400) for node in nodes] == [0, 0]
        assert f"resuming from epoch {reached // 5 + 1}, step " in nodes[0].log.read_text()  # 5 steps each
        assert weights(killed) == weights(whole)
    finally:
        for node in started:
            node.kill()
