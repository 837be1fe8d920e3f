"""Measure what sums of vectors cost as the number of images grows, and with two processes.

    python -m lab sums            # about 15 minutes on two cores; rerun it to resume
    python -m lab figures sums    # the tables in docs/closed_form.md

Vectors are random: the cost does not depend on their values. One process adds vectors to sums; its time per
image and its memory are noted at every power of ten. Then one process with one thread is compared with two
processes of one thread each that add half of the images and reduce their sums, interleaved. The costs on
paper follow from these figures.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from covpool.closed_form.sums import Rows, Sums
from covpool.processes import Processes
from covpool.terminal import human
from lab.bench.steps import from_two_processes
from lab.bench.table import table
from lab.record import (
    RESULTS,
    ROOT,
    committed_file,
    new_record,
    read_record,
    record_file,
    resumed,
    with_block,
    write_record,
)

NAME = "sums"
CLASSES = 1000
BATCH = 1024
# Channels, and the largest number of images: one pass with d = 128 over a million images would take an hour.
GROWTH = {64: 1_000_000, 128: 100_000}
# With fewer images, the vectors are kept, not sums. The reduction takes the same time for any number.
PAIR_IMAGES, ROUNDS = {64: 65_536, 128: 32_768}, 3


def width_of(dim: int) -> int:
    """Return the length of the vector of d channels."""
    return dim * (dim + 1) // 2


def batches(images: int, width: int, seed: int = 0) -> Iterator[Rows]:
    """Yield random vectors. The same values come again, with other labels and numbers."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(BATCH, width, generator=generator)
    for start in range(0, images, BATCH):
        count = min(BATCH, images - start)
        labels = torch.randint(CLASSES, (count,), generator=generator)
        yield Rows(vectors[:count], labels, torch.arange(start, start + count) + seed * 10**9)


def new_sums(width: int) -> Sums:
    """Return empty sums that keep no rows."""
    return Sums("random", [str(k) for k in range(CLASSES)], width, max_rows_bytes=0)


def growth(dim: int, images: int) -> list[dict[str, float]]:
    """Return the cost of adding the next images at every power of ten."""
    sums, done, points = new_sums(width_of(dim)), 0, []
    sums.add(next(batches(BATCH, width_of(dim))))  # allocates, and chooses kernels
    marks = [10**k for k in range(3, 7) if 10**k <= images]
    cpu, wall, before = time.process_time(), time.perf_counter(), 0
    for rows in batches(images, width_of(dim)):
        sums.add(rows)
        done += len(rows)
        if marks and done >= marks[0]:
            points.append(
                {
                    "images": done,
                    "cpu_seconds_per_image": (time.process_time() - cpu) / (done - before),
                    "seconds_per_image": (time.perf_counter() - wall) / (done - before),
                    "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                }
            )
            marks.pop(0)
            cpu, wall, before = time.process_time(), time.perf_counter(), done
    return points


class Pair(NamedTuple):
    """Seconds of one process alone and of two, in one round."""

    alone: float
    together: float


def pair_rounds(processes: Processes, dim: int, images: int, rounds: int) -> Iterator[Pair]:
    """Add images in one process, and in both; yield the seconds of each round."""
    for _ in range(rounds + 1):
        seconds = []
        for share in (images, images // processes.world_size):
            dist.barrier()
            started = time.perf_counter()
            if share < images or processes.is_first:
                sums = new_sums(width_of(dim))
                for rows in batches(share, width_of(dim), processes.rank):
                    sums.add(rows)
                len(sums)  # adds the last rows
            if share < images:
                sums.reduced(processes)
            dist.barrier()
            seconds.append(time.perf_counter() - started)
        yield Pair(*seconds)


def on_paper(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what 100 million images and a million classes cost on 64 machines like this one."""
    rows = []
    for dim, points in record["growth"].items():
        width, per_image = width_of(int(dim)), points[-1]["cpu_seconds_per_image"]
        rows.append(
            {
                "dim": int(dim),
                "core_seconds_per_million": per_image * 1e6,
                "hours_of_64": per_image * 1e8 / 64 / record["machine"]["cores"] / 3600,
                "gram_bytes": 2 * 8 * width**2,
                "class_sums_bytes": 2 * 8 * 10**6 * width,
                "class_sums_bytes_of_64": 2 * 8 * 10**6 * width // 64,
                "vector_bytes_of_64": 4 * width * 10**8 // 64,
            }
        )
    return rows


def main(out: Path = RESULTS, again: bool = False) -> Path:
    """Measure the cost of sums from a thousand to a million images, and with two processes.

    Args:
        out: results folder.
        again: measure again what an earlier run has measured.
    """
    record = new_record(NAME, ("closed_form", "lab/bench"), seed=0) | {"growth": {}, "pairs": {}}
    file = record_file(record, out)
    record = resumed(record, file, same=("machine",), again=again)
    for dim, images in GROWTH.items():
        if str(dim) not in record["growth"]:
            record["growth"][str(dim)] = growth(dim, images)
            write_record(file, record)
            print(dim, record["growth"][str(dim)], file=sys.stderr)
    for dim, images in PAIR_IMAGES.items():
        if str(dim) not in record["pairs"]:
            rounds = list(from_two_processes(pair_rounds, dim, images, ROUNDS))[1:]  # the first warms up
            record["pairs"][str(dim)] = {
                "images": images,
                "seconds": [list(seconds) for seconds in rounds],
                "speed": statistics.median(seconds.alone / seconds.together for seconds in rounds),
            }
            write_record(file, record)
            print(dim, record["pairs"][str(dim)], file=sys.stderr)
    record["on_paper"] = on_paper(record)
    write_record(file, record, summary(record))
    print(file)
    return file


def summary(record: dict[str, Any]) -> str:
    """Return the tables of the page."""
    cells: list[list[str]] = []
    for dim, points in record["growth"].items():
        for point in points:
            cells.append(
                [
                    dim,
                    f"{point['images']:,}",
                    f"{1e3 * point['cpu_seconds_per_image']:.2f}",
                    human(point["memory_bytes"], "B"),
                ]
            )
    speeds = ", ".join(f"{pair['speed']:.2f} times (d = {dim})" for dim, pair in record["pairs"].items())
    paper: list[list[str]] = []
    for row in record["on_paper"]:
        paper.append(
            [
                str(row["dim"]),
                f"{row['hours_of_64']:.1g}",
                human(row["gram_bytes"], "B"),
                human(row["class_sums_bytes"], "B"),
                human(row["class_sums_bytes_of_64"], "B"),
                human(row["vector_bytes_of_64"], "B"),
            ]
        )
    return "\n".join(
        [
            f"The cost of adding random vectors of {CLASSES:,} classes to the sums, on "
            f"{record['machine']['cores']} cores of a CPU:",
            "",
            table(["d", "images", "CPU ms per image", "largest memory of the process"], cells),
            "",
            f"Two processes of one thread each are {speeds} as fast as one. This includes adding up their "
            "sums.",
            "",
            "The next table is an estimate for 100 million images of a million classes, on 64 machines with "
            "two processes each. The hours are those of the sums alone, without the backbone. covpool keeps "
            "two matrices Σxxᵀ: one of the images to solve with, and one of the held-out images.",
            "",
            table(
                [
                    "d",
                    "hours",
                    "both Σxxᵀ",
                    "class sums",
                    "class sums per machine",
                    "vectors per machine, on disk",
                ],
                paper,
            ),
        ]
    )


def write_pages(file: Path | None = None, page: Path = ROOT / "docs" / "closed_form.md") -> list[Path]:
    """Write the tables into the page.

    Args:
        file: results of ``python -m lab sums``; the committed ones if not given.
        page: Markdown page with marks.
    """
    block = summary(read_record(file or committed_file(NAME), NAME))
    page.write_text(with_block(page.read_text(encoding="utf-8"), NAME, block), encoding="utf-8")
    return [page]
