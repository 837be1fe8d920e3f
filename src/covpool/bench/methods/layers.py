"""Single layers, and the matrix decompositions alone, on one clock: Tables 2(a) and 2(b)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from covpool.bench.contenders.contender import MEASURES, value_alone
from covpool.bench.figures import rounded, timing_figures
from covpool.bench.memory import bytes_kept_for_backward
from covpool.bench.methods.entries import REFERENCE, Entry
from covpool.bench.problem import Problem
from covpool.bench.timing import MakeProgress, Schedule, silence, time_interleaved
from covpool.functional import covariance

DECOMPOSITIONS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "eigh": torch.linalg.eigh,
    "svd": torch.linalg.svd,
}


class Timed(NamedTuple):
    """A layer or a decomposition at one size: what to call, and what it keeps for its gradient."""

    value: Callable[[], object]
    value_and_gradient: Callable[[], object]
    bytes_kept: int


def measure_layers(
    problem: Problem, entries: Sequence[Entry], schedule: Schedule, progress: MakeProgress = silence
) -> dict[str, Any]:
    """Time and memory of every entry and decomposition at one size."""
    timed = {entry.label: _layer(entry, problem) for entry in entries}
    timed |= {name: _decomposition(name, problem) for name in DECOMPOSITIONS}
    found: dict[str, dict[str, Any]] = {name: {} for name in timed}
    for measure in MEASURES:
        with progress(f"rounds of layers at {problem.size.name}, {measure.replace('_', ' ')}") as tell:
            timings = time_interleaved(
                {name: getattr(ready, measure) for name, ready in timed.items()},
                reference=REFERENCE,
                schedule=schedule,
                seed=problem.seed,
                device=problem.device,
                tell=tell,
            )
        for name, timing in timings.items():
            found[name][measure] = timing_figures(timing)
    size = problem.size
    for name, ready in timed.items():
        found[name]["bytes_kept_per_image"] = rounded(ready.bytes_kept / size.batch)
    return {
        "channels": size.channels,
        "positions": size.positions,
        "batch": size.batch,
        "entries": {entry.label: found[entry.label] for entry in entries},
        "decompositions": {name: found[name] for name in DECOMPOSITIONS},
    }


def _layer(entry: Entry, problem: Problem) -> Timed:
    torch.manual_seed(problem.seed)  # some methods draw projections
    layer = entry.layer(problem.size.channels).to(problem.device)
    x = problem.features
    upstream = _noise(problem, problem.size.batch, layer.out_features)
    return Timed(
        partial(value_alone, layer, x),
        partial(_trained, layer, x, upstream),
        bytes_kept_for_backward(layer, x, besides=(*layer.parameters(), *layer.buffers())),
    )


def _trained(layer: torch.nn.Module, features: Tensor, upstream: Tensor) -> None:
    """The result and every gradient that training needs: of the features, and of parameters if there are."""
    leaf = features.detach().requires_grad_()
    torch.autograd.grad(layer(leaf), [leaf, *layer.parameters()], upstream)


def _decomposition(name: str, problem: Problem) -> Timed:
    """Of the covariances of the features, as symmetric matrices of full size."""
    decompose = DECOMPOSITIONS[name]
    sigma = covariance(problem.features)
    with torch.no_grad():
        upstream = [torch.randn_like(factor) for factor in decompose(sigma)]
    return Timed(
        partial(_decomposed, decompose, sigma),
        partial(_differentiated, decompose, sigma, upstream),
        bytes_kept_for_backward(decompose, sigma),
    )


def _decomposed(decompose: Callable[[Tensor], tuple[Tensor, ...]], sigma: Tensor) -> None:
    with torch.no_grad():
        decompose(sigma)


def _differentiated(
    decompose: Callable[[Tensor], tuple[Tensor, ...]], sigma: Tensor, upstream: Sequence[Tensor]
) -> None:
    leaf = sigma.detach().requires_grad_()
    torch.autograd.grad(decompose(leaf), leaf, upstream)


def _noise(problem: Problem, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(problem.seed)
    return torch.randn(*shape, generator=generator).to(problem.device)
