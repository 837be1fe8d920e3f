"""Made-up benchmark results, to test the reports."""

from __future__ import annotations

from typing import Any

from covpool.provenance import Results


def timing(ratio: float, spread: float = 0.05, seconds: float = 0.016) -> dict[str, Any]:
    """Return a timing of ``ratio`` times the reference (by default 1 ms per image, batch size 16)."""
    return {
        "seconds": {"median": seconds * ratio, "q1": seconds * ratio * 0.9, "q3": seconds * ratio * 1.1},
        "ratio": {"median": ratio, "q1": ratio * (1 - spread), "q3": ratio * (1 + spread)},
        "rounds": 5,
        "calls_per_sample": 1,
    }


def layer(ratio: float, spread: float = 0.05) -> dict[str, Any]:
    return {
        "value": timing(ratio, spread, seconds=0.008),
        "value_and_gradient": timing(ratio, spread),
        "bytes_kept_per_image": 2**20,
    }


def size(ratios: dict[str, float], eigh: float = 1.5, spread: float = 0.05) -> dict[str, Any]:
    """Return one size from the time of each layer relative to ``isqrt_cov``, which is added as 1.0."""
    return {
        "channels": 256,
        "positions": 169,
        "batch": 16,
        "entries": {label: layer(ratio, spread) for label, ratio in {"isqrt_cov": 1.0, **ratios}.items()},
        "decompositions": {"eigh": layer(eigh), "svd": layer(2 * eigh)},
    }


def steps(batch: int, isqrt_cov: float, mpn_cov: float, two_over_one: float = 1.5) -> dict[str, Any]:
    """Return training steps; ``isqrt_cov`` and ``mpn_cov`` are seconds per step on one process."""
    found: dict[str, Any] = {"batch": batch}
    for count, speed in (("one", 1.0), ("two", two_over_one)):
        found[count] = {
            "isqrt_cov": timing(1.0, seconds=isqrt_cov / speed),
            "mpn_cov": timing(mpn_cov / isqrt_cov, seconds=isqrt_cov / speed),
        }
    spread = {"median": two_over_one, "q1": two_over_one, "q3": two_over_one}
    return {**found, "two_over_one": {"isqrt_cov": spread, "mpn_cov": spread}}


def results_of(
    base: Results, layers: dict[str, Any] | None = None, trained: list[dict[str, Any]] | None = None
) -> Results:
    """Return ``base`` with other layers and training steps."""
    network = {"network": "alexnet", "image_size": 224, "classes": 1000, "hidden": [8]}
    training = None if trained is None else {**network, "threads_per_process": 1, "steps": trained}
    return {**base, "layers": layers or {}, "training": training}
