"""Processes of torchrun and tasks of Ray give the sums of one process, also if they are killed."""

from __future__ import annotations

import os
import random
import shutil
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from covpool.cli.main import main
from covpool.closed_form.fitting import fit
from covpool.closed_form.kept import SUMS, load_sums
from covpool.closed_form.solve import ridge, solve_divided
from covpool.closed_form.sums import Rows, Sums
from covpool.errors import UsageError
from covpool.processes import Processes
from tests.closed_form.test_fitting import SMALL, birds, small
from tests.closed_form.test_kept import assert_same_model
from tests.closed_form.test_sums import made_rows, new_sums
from tests.data.pictures import needs_sparrows
from tests.forked import errors, finish, fork

__all__ = ["birds"]
KILLS = 10
KEPT = [*SMALL, "--keep-sums", "--heads", "isqrt_cov"]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def in_three(act: Callable[..., None], folder: Path, *arguments: object) -> None:
    """Call ``act(rank, 3, port, *arguments)`` in three processes."""
    port, logs = free_port(), [folder / f"{rank}.log" for rank in range(3)]
    running = [fork(partial(act, rank, 3, port, *arguments), log) for rank, log in enumerate(logs)]
    for process, log in zip(running, logs, strict=True):
        finish(process, log)


def reduce_in(rank: int, world_size: int, port: int, max_rows_bytes: int, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    rows = made_rows(3000)
    sums = Sums("vectors", new_sums(exact=True).classes, rows.vectors.shape[1], max_rows_bytes=max_rows_bytes)
    sums.add(rows[rank::world_size])
    reduced = sums.reduced(Processes(rank, world_size, torch.device("cpu")))
    if rank == 0:
        torch.save(reduced.to_tensors(), out)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("max_rows_bytes", [0, 1 << 30])
def test_sums_over_three_processes_are_those_of_one(max_rows_bytes: int, tmp_path: Path) -> None:
    file = str(tmp_path / "sums")
    in_three(reduce_in, tmp_path, max_rows_bytes, file)
    alone = new_sums(exact=max_rows_bytes > 0)
    alone.add(made_rows(3000))
    expected, reduced = alone.to_tensors(), torch.load(file)
    assert reduced.keys() == expected.keys()
    for name, tensor in expected.items():
        found = reduced[name]
        if name.endswith("gram"):  # the blocks below the diagonal have no meaning
            tensor, found = tensor.triu(), found.triu()
        torch.testing.assert_close(found, tensor, atol=1e-9, rtol=1e-12)


def solve_in(rank: int, world_size: int, port: int, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    rows, classes = made_rows(3000), new_sums(exact=True).classes
    ours = torch.arange(len(classes))[rank::world_size]
    chosen = rows[torch.isin(rows.labels, ours)]
    place = torch.zeros(len(classes), dtype=torch.int64)
    place[ours] = torch.arange(len(ours))
    sums = Sums("vectors", [classes[k] for k in ours], rows.vectors.shape[1])
    sums.add(Rows(chosen.vectors, place[chosen.labels], chosen.images))
    solution = solve_divided(sums, Processes(rank, world_size, torch.device("cpu")))
    torch.save((ours, solution.weight, solution.bias, solution.strength), f"{out}-{rank}")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_classes_divided_over_processes_have_the_classifier_of_one(tmp_path: Path) -> None:
    in_three(solve_in, tmp_path, str(tmp_path / "solved"))
    alone = new_sums(exact=False)
    alone.add(made_rows(3000))
    expected = ridge(alone)
    for rank in range(3):
        ours, weight, bias, strength = torch.load(tmp_path / f"solved-{rank}")
        assert strength == expected.strength
        torch.testing.assert_close(weight, expected.weight[ours], atol=1e-8, rtol=0)
        torch.testing.assert_close(bias, expected.bias[ours], atol=1e-8, rtol=0)


def run_rank(rank: int, world_size: int, port: int, words: list[str]) -> int:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return main(words)


def start(workers: int, out: str, folder: Path) -> list[tuple[object, Path]]:
    """Fit in some processes, as torchrun starts them."""
    words, port = ["fit", "birds", *KEPT, "--out", out, "--basis", "first"], free_port()
    logs = [folder / f"{rank}.log" for rank in range(workers)]
    if workers == 1:
        return [(fork(lambda: main(words), logs[0]), logs[0])]
    return [(fork(partial(run_rank, rank, workers, port, words), log), log) for rank, log in enumerate(logs)]


@needs_sparrows
@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_every_image_counts_once_however_often_processes_are_killed(
    workers: int, birds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covpool.closed_form.vectors.ROWS_PER_FILE", 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    fit("birds", "first", **small(heads=("isqrt_cov",), keep_sums=True))
    begun = time.monotonic()
    for process, log in start(workers, "undisturbed", tmp_path):
        finish(process, log)  # type: ignore[arg-type]
    seconds, chance, interrupted = time.monotonic() - begun, random.Random(0), 0
    for _ in range(KILLS):
        running = start(workers, "killed", tmp_path)
        time.sleep(seconds * chance.random())
        interrupted += any(process.is_alive() for process, _ in running)  # type: ignore[attr-defined]
        for process, _ in running:
            process.kill()  # type: ignore[attr-defined]
            process.join()  # type: ignore[attr-defined]
        if Path("killed/results.json").exists():  # it had finished: begin again
            shutil.rmtree("killed")
    for process, log in start(workers, "killed", tmp_path):
        finish(process, log)  # type: ignore[arg-type]
    assert interrupted >= KILLS // 2
    assert len(load_sums(Path("killed", SUMS))[0]) == 30
    assert_same_model("killed", "undisturbed")
    assert_same_model("killed", "first")


@needs_sparrows
@pytest.mark.slow
def test_what_needs_one_process_says_so(birds: Path, tmp_path: Path) -> None:
    words = ["fit", "birds", *SMALL, "--finetune", "--out", "tuned"]
    port, logs = free_port(), [tmp_path / f"{rank}.log" for rank in range(2)]
    running = [fork(partial(run_rank, rank, 2, port, words), log) for rank, log in enumerate(logs)]
    for process in running:
        process.join()
    assert [process.exitcode for process in running] == [2, 2]
    assert "--finetune needs one process" in errors(logs[0])


@needs_sparrows
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_ray_gives_the_sums_of_one_process(birds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # or its workers get no time on a busy machine
    monkeypatch.setattr("covpool.closed_form.vectors.ROWS_PER_FILE", 4)
    photo = next((birds / "train").glob("*/*.jpg"))
    (photo.parent / "broken.jpg").write_bytes(photo.read_bytes()[:500])
    options = small(heads=("isqrt_cov",), keep_sums=True)
    fit("birds", "first", **options)
    alone = fit("birds", "alone", basis="first", **options)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200 * 2**20)
    try:
        monkeypatch.setattr("covpool.closed_form.ray_sums.FILES_PER_TASK", 1)  # 8 tasks, three levels
        found = fit("birds", "cluster", basis="first", engine="ray", **options)
    finally:
        ray.shutdown()
    assert_same_model("cluster", "alone")
    assert found.metrics["problems"] == alone.metrics["problems"] == {"unreadable": 1}


@needs_sparrows
@pytest.mark.slow
@pytest.mark.usefixtures("birds")
@pytest.mark.parametrize("kind", ["shards", "parquet"])
def test_other_sources_give_the_same_model(kind: str) -> None:
    options = small(heads=("isqrt_cov",), keep_sums=True)
    fit("birds/train", "folder", **options)
    if kind == "shards":
        assert main(["shard", "birds/train", "--out", "other"]) == 0
    else:
        write_parquet(Path("birds/train"), Path("other"))
    fit("other", "again", basis="folder", **options)
    assert_same_model("again", "folder")


def write_parquet(folder: Path, out: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    photos = sorted(folder.glob("*/*.jpg"))
    table = pa.table(
        {
            "image": [{"bytes": photo.read_bytes(), "path": photo.name} for photo in photos],
            "label": [photo.parent.name for photo in photos],
        }
    )
    out.mkdir()
    pq.write_table(table, out / "train.parquet")


def test_unknown_engines_are_refused() -> None:
    with pytest.raises(UsageError, match="engine must be"):
        fit("birds", engine="cluster")
