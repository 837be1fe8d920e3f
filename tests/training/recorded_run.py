"""Training runs in separate processes, which record the batch of each step and can be disturbed.

``launch`` forks them from a process that has already imported everything.

Alternatively, run ``torchrun -m tests.training.recorded_run RECORD PLAN``, with ``PLAN`` as JSON.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import multiprocessing
import os
import resource
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# A small network with everything that has state: BatchNorm, momentum, an average, dropout, mixing.
RECIPE: dict[str, Any] = {
    "model.backbone": "test_resnet",
    "model.dim": 8,
    "model.image_size": 64,
    "model.drop_rate": 0.2,
    "model.preprocessing": {"crop_pct": 1.0},
    "loss.mixup": 0.2,
    "loss.cutmix": 0.5,
    "optimizer.name": "sgd",
    "optimizer.lr": 0.05,
    "loop.ema": 0.9,
    "loop.deterministic": True,
    "batch_size": 10,
    "schedule.epochs": 2,
    "data.workers": 0,
    "trackers": [],
}


# A run that takes longer counts as hanging.
SECONDS = 120


def launch(
    world_size: int,
    record: Path,
    plan: Mapping[str, Any],
) -> list[int | None]:
    """Run ``plan["recipe"]`` on ``world_size`` processes and return their exit codes."""
    context = multiprocessing.get_context("fork")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        context.Process(target=_main, args=({**group, "RANK": str(rank)}, record, dict(plan)))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


def _main(group: Mapping[str, str], record: Path, plan: dict[str, Any]) -> None:
    import torch

    os.environ |= group
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    with (record / f"stderr-{os.environ['RANK']}.txt").open("a") as file:
        os.dup2(file.fileno(), 2)
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115  # pytest had replaced it
    faulthandler.dump_traceback_later(SECONDS - 20, file=2)  # prints where it hangs, if it does
    sys.exit(run(record, plan))


def run(record: Path, plan: dict[str, Any]) -> int:
    """Run training through the command line, so that exit codes and messages are those of ``covpool``.

    It draws no report, which would take longer than everything else.
    """
    from covpool.cli import train
    from covpool.cli.main import main
    from covpool.training import run as runs
    from covpool.training.recipe_files import read_recipe
    from covpool.training.step import Learner

    rank = int(os.environ.get("RANK", 0))
    (record / f"pid-{rank}").write_text(str(os.getpid()))
    learn = Learner.step

    def step(self: Learner, batch: Any, cursor: int) -> Any:
        batch = _disturbed(batch, cursor, rank, plan)
        outcome = learn(self, batch, cursor)
        _note(record / f"steps-{rank}.jsonl", batch, cursor, outcome)
        return outcome

    Learner.step = step  # type: ignore[method-assign]
    runs._finish = lambda folder, summary, *_: folder.write_summary({**summary, "finished": True})
    arguments = train.Arguments(read_recipe(None, {**RECIPE, **plan["recipe"]}), plan.get("compare"))
    train.train = train.train._replace(parse=lambda words: (arguments, False))
    return main(["train"])


def _disturbed(batch: Any, cursor: int, rank: int, plan: dict[str, Any]) -> Any:
    """Apply the plan for a rank at a cursor, for example ``{"sigterm": [rank, cursor]}``."""
    here = [rank, cursor]
    if plan.get("sigterm") == here:
        os.kill(os.getpid(), signal.SIGTERM)
    if plan.get("sigkill") == here:
        os.kill(os.getpid(), signal.SIGKILL)
    if plan.get("sigstop") == here:  # alive but silent, like a disconnected machine
        os.kill(os.getpid(), signal.SIGSTOP)
    if plan.get("full_disk") == here:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    if here in plan.get("nan", []):
        batch = batch._replace(images=batch.images * float("nan"))
    return batch


def _note(path: Path, batch: Any, cursor: int, outcome: Any) -> None:
    import torch

    state = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
    line = {"cursor": cursor, "ids": batch.ids.tolist(), "rng": state, "skipped": outcome.skipped}
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def steps(record: Path, rank: int) -> dict[int, dict[str, Any]]:
    """Return the records of a rank by cursor. A repeated step must be identical."""
    found: dict[int, dict[str, Any]] = {}
    path = record / f"steps-{rank}.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        one = json.loads(line)
        assert found.setdefault(one["cursor"], one) == one
    return found


def global_batches(*records: tuple[Path, int]) -> dict[int, list[int]]:
    """Return the sorted ids of every global batch, from records of the given numbers of ranks."""
    found: dict[int, list[int]] = {}
    for record, world_size in records:
        ranks = [steps(record, rank) for rank in range(world_size)]
        for cursor in ranks[0]:
            ids = sorted(i for rank in ranks for i in rank[cursor]["ids"])
            assert found.setdefault(cursor, ids) == ids
    return found


def hashes(folder: Path, step: int) -> dict[str, str]:
    """Return the hashes of weights, momentum and average at a step. Equal hashes mean equal bits."""
    manifest = json.loads((folder / "checkpoints" / f"step-{step:08d}" / "manifest.json").read_bytes())
    found = {
        name: part["sha256"] for name, part in manifest["parts"].items() if name.endswith(".safetensors")
    }
    assert found
    return found


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), json.loads(sys.argv[2])))
