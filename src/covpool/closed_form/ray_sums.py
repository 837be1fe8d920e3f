"""Sum vectors on a Ray cluster: each task sums some files, and a tree of tasks merges the sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import ray

from covpool.closed_form.sums import Sums
from covpool.closed_form.vectors import Adding, PassProblems, VectorFile, merged_sums
from covpool.inference import Running
from covpool.inference.ray_engine import cluster

# Files of a task: 16,384 images, whose rows take about as much memory as their sums.
FILES_PER_TASK = 64


class Summed(NamedTuple):
    """The sums of some files, and the problems of their images."""

    sums: dict[str, Sums]
    problems: PassProblems


def summed_by_ray(adding: Adding, files: Sequence[VectorFile], running: Running) -> Summed:
    """Return the sums over files that all machines of the cluster can read."""
    if not files:
        return Summed(adding.sums([]), PassProblems())
    shares = [files[start : start + FILES_PER_TASK] for start in range(0, len(files), FILES_PER_TASK)]
    with cluster(running.ray_address):
        settings = ray.put(adding)
        level: list[Any] = [_sum.remote(settings, share) for share in shares]
        while len(level) > 1:
            pairs = [level[k : k + 2] for k in range(0, len(level), 2)]
            level = [_merge.remote(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
        summed: Summed = ray.get(level[0])
        return summed


@ray.remote
def _sum(adding: Adding, files: Sequence[VectorFile]) -> Summed:
    problems = PassProblems()

    def parts() -> Any:
        for file in files:
            part = file.read()
            problems.note("train", part)
            yield part

    return Summed(adding.sums(parts()), problems)


@ray.remote
def _merge(first: Summed, second: Summed) -> Summed:
    first.problems.add(second.problems)
    return Summed(merged_sums(first.sums, second.sums), first.problems)
