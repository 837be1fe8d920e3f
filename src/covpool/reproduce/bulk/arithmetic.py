"""A billion images by formulas: bytes, hours, requests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from covpool.reproduce.bulk.rates import BACKBONE, SIZES

IMAGES = 10**9
ROWS_PER_FILE = 1024
SHARD_BYTES = 256 * 10**6  # as covpool shard makes them
DIMS, PROJECTED = (64, 128, 256), 512
# Requests a second to one prefix of S3, by its documentation.
GETS, PUTS = 5500, 3500
# An A100 in bfloat16 by its data sheet, and the part of that which a convolutional network is assumed to get.
PEAK_FLOPS, UTILISATION = 312e12, 0.1


def table(results: dict[str, Any]) -> str:
    """All tables, one below the other."""
    return "\n\n".join([storage(), hours(results), requests(results)])


def storage() -> str:
    """Of vectors."""
    lengths = [(f"d = {d}", d * (d + 1) // 2) for d in DIMS] + [(f"projected to {PROJECTED}", PROJECTED)]
    rows = [
        (name, f"{length:,}", *(f"{IMAGES * length * size / 1e12:,.1f} TB" for size in (4, 2)))
        for name, length in lengths
    ]
    return _markdown(("vector", "numbers", "float32", "float16"), rows)


def hours(results: dict[str, Any]) -> str:
    """Of cores and of a GPU."""
    rows = []
    for name, rate in results["images a core-second"].items():
        rows.append((name, f"{rate:.1f} images a core-second", f"{core_hours(rate):,.0f} core-hours"))
    for size in SIZES:
        flops, decoded = (
            results["forward FLOPs"][str(size)],
            results["images a core-second"][f"decode {size}"],
        )
        rate = PEAK_FLOPS * UTILISATION / flops
        told = f"{flops / 1e9:.1f} GFLOPs, {rate:,.0f} images a second, fed by {rate / decoded:.0f} cores"
        rows.append((f"{BACKBONE} {size} on an A100, estimate", told, f"{gpu_hours(flops):,.0f} GPU-hours"))
    return _markdown(("what", "rate", "a billion images"), rows)


def requests(results: dict[str, Any]) -> str:
    """To an object store, and how long they take at its limits if nothing else does."""
    size = results["bytes an image"]
    shards = math.ceil(IMAGES * size / SHARD_BYTES)
    a_shard = SHARD_BYTES // size
    files = shards * math.ceil(a_shard / ROWS_PER_FILE)
    counts = [
        ("GET, an image each", IMAGES, GETS),
        (f"GET, shards of {SHARD_BYTES // 10**6} MB and their indexes", 2 * shards, GETS),
        (f"PUT, files of {ROWS_PER_FILE} rows at most", files, PUTS),
    ]
    rows = [
        (what, f"{count:,}", f"{limit:,} a second", _duration(count / limit)) for what, count, limit in counts
    ]
    return _markdown(("requests", "how many", "limit", "at the limit"), rows)


def core_hours(rate: float) -> float:
    """Of a billion images at a rate in images a core-second."""
    return IMAGES / rate / 3600


def gpu_hours(flops: float) -> float:
    """Of a billion images, by the FLOPs of one: an estimate."""
    return IMAGES * flops / (PEAK_FLOPS * UTILISATION) / 3600


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} hours" if seconds >= 3600 else f"{seconds / 60:,.1f} minutes"


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
