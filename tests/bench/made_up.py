"""Results that nobody measured, to see what is said of them."""

from __future__ import annotations

from typing import Any

from covpool.provenance.origin import Results


def timing(ratio: float, spread: float = 0.05, seconds: float = 0.016) -> dict[str, Any]:
    """So many times the reference, which takes a millisecond an image in a batch of 16."""
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
    """Layers by their times over ``isqrt_cov``, which is there at 1."""
    return {
        "channels": 256,
        "positions": 169,
        "batch": 16,
        "entries": {label: layer(ratio, spread) for label, ratio in {"isqrt_cov": 1.0, **ratios}.items()},
        "decompositions": {"eigh": layer(eigh), "svd": layer(2 * eigh)},
    }


def steps(batch: int, isqrt_cov: float, mpn_cov: float, two_over_one: float = 1.5) -> dict[str, Any]:
    """Steps of so many seconds on one process."""
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
    """Of such sizes and steps, from where ``base`` comes."""
    network = {"network": "alexnet", "image_size": 224, "classes": 1000, "hidden": [8]}
    training = None if trained is None else {**network, "threads_per_process": 1, "steps": trained}
    return {**base, "layers": layers or {}, "training": training}
