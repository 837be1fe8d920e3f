"""Measure time and memory of single pooling layers and of matrix decompositions: the paper's Table 2."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from covpool.arguments import check_choice, check_whole
from covpool.errors import UsageError
from covpool.functional import covariance
from covpool.nn.pooling import METHODS, Method
from lab.bench.timing import MakeProgress, Schedule, rounded, silence, time_interleaved, timing_figures

MIB = 2**20
Measure = Literal["value", "value_and_gradient"]
MEASURES: tuple[Measure, ...] = ("value", "value_and_gradient")


@dataclass(frozen=True)
class Size:
    """The feature size ``(channels, positions)`` of an image, and the batch size."""

    name: str
    channels: int
    positions: int
    batch: int = 16

    def __post_init__(self) -> None:
        for name in ("channels", "positions", "batch"):
            check_whole(name, getattr(self, name))

    def is_that_of(self, size: Mapping[str, Any] | None) -> bool:
        """Return whether results are of this size; ``None`` stands for no results."""
        names = ("channels", "positions", "batch")
        return size is not None and all(size[name] == getattr(self, name) for name in names)


SIZES = {
    size.name: size
    for size in (
        Size("14x14", 256, 196),
        Size("13x13", 256, 169),
        Size("7x7", 256, 49),
        Size("vit", 768, 196, batch=8),
        Size("28x28", 256, 784),
    )
}


def chosen_sizes(names: Iterable[str | Size] | None, batch: int | None = None) -> list[Size]:
    """Return sizes by name or as ``"C:n"``; all named sizes for ``None``."""
    sizes = [_size(name) for name in (SIZES if names is None else names)]
    return sizes if batch is None else [replace(size, batch=batch) for size in sizes]


def _size(name: str | Size) -> Size:
    if isinstance(name, Size):
        return name
    if name in SIZES:
        return SIZES[name]
    channels, colon, positions = name.partition(":")
    if not (colon and channels.isdecimal() and positions.isdecimal()):
        raise UsageError(f"sizes must be among {', '.join(SIZES)}, or C:n such as 64:49; got {name!r}")
    return Size(name, int(channels), int(positions))


@dataclass(frozen=True)
class Problem:
    """The benchmark inputs of one size on one device: features and upstream gradient."""

    size: Size
    steps: int = 5
    seed: int = 0
    device: str = "cpu"

    @cached_property
    def features(self) -> Tensor:
        """Features ``(B, C, n)``, non-negative as after a ReLU."""
        size = self.size
        return self._normal(0, size.batch, size.channels, size.positions).relu()

    @cached_property
    def upstream(self) -> Tensor:
        """Upstream gradient ``(B, C, C)``, dense and symmetric.

        The paper's equations hold only for symmetric gradients. Symmetry does not change the cost.
        """
        size = self.size
        grad = self._normal(1, size.batch, size.channels, size.channels)
        return grad + grad.mT

    def _normal(self, stream: int, *shape: int) -> Tensor:
        # Drawn on the CPU, so that every device gets the same values.
        generator = torch.Generator().manual_seed(2 * self.seed + stream)
        return torch.randn(*shape, generator=generator).to(self.device)


def bytes_kept_for_backward(
    pool: Callable[[Tensor], object], features: Tensor, besides: Iterable[Tensor] = ()
) -> int:
    """Return the bytes that ``pool(features)`` saves for backward, without the features themselves.

    Every tensor that autograd saves passes through a hook. Tensors that share a storage are counted once,
    with the whole storage, because the whole storage stays in memory. Tensors in ``besides``, such as a
    layer's parameters, are not counted: they exist without a gradient too.
    """
    leaf = features.detach().requires_grad_()
    # Holding the tensors prevents their addresses from being reused.
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, _same):
        result = pool(leaf)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved}
    for tensor in (leaf, *besides):
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    del result
    return sum(storages.values())


def _same(tensor: Tensor) -> Tensor:
    return tensor


# Options of each run, for methods with more than one run. The paper has four variants of improved B-CNN,
# with forward and backward pass by SVD or by iteration; the fifth needs no SVD and no Lyapunov solver.
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "isqrt_cov": (
        {},
        {"steps": 3},
        {"iteration": "fitted", "steps": 3},
        {"iteration": "fitted", "steps": 4},
        {"normalization": "frobenius"},
    ),
    "improved_bcnn": (
        {"forward": "svd", "backward": "svd"},
        {"forward": "newton_schulz", "backward": "lyapunov"},
        {"forward": "newton_schulz", "backward": "svd"},
        {"forward": "svd", "backward": "lyapunov"},
        {"forward": "newton_schulz", "backward": "lyapunov_iteration"},
    ),
    "g2denet": ({"root": "svd"}, {"root": "newton_schulz"}),
    "cbp": ({"projection": "tensor_sketch"}, {"projection": "random_maclaurin"}),
}
REFERENCE = "isqrt_cov"


def paper_options(method: str) -> dict[str, Any]:
    """Return the options by which a method is the paper's: ``isqrt_cov`` with its 5 steps."""
    return {"iteration": "paper"} if method == "isqrt_cov" else {}


@dataclass(frozen=True)
class Entry:
    """A method with options: a row of the table."""

    method: str
    options: Mapping[str, Any]

    @property
    def label(self) -> str:
        """Name of the row, such as ``isqrt_cov steps=3``."""
        return " ".join([self.method, *(f"{name}={value}" for name, value in self.options.items())])

    @property
    def summary(self) -> str:
        """One-line summary of the method."""
        return METHODS[self.method].summary

    def layer(self, channels: int) -> Method:
        """Return a new layer in training mode."""
        options = {**paper_options(self.method), **self.options}
        layer: Method = METHODS[self.method](channels, **options).train()
        return layer


def chosen_entries(methods: Collection[str] | None = None) -> list[Entry]:
    """Return all variants of the given methods, or of all; the reference is always included."""
    chosen = set(METHODS) if methods is None else {*methods, REFERENCE}
    for name in chosen:
        check_choice("methods", name, METHODS)
    return [
        Entry(name, options) for name in METHODS if name in chosen for options in VARIANTS.get(name, ({},))
    ]


DECOMPOSITIONS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "eigh": torch.linalg.eigh,
    "svd": torch.linalg.svd,
}


class Timed(NamedTuple):
    """The functions to time for a layer or decomposition at one size, and the bytes saved for backward."""

    value: Callable[[], object]
    value_and_gradient: Callable[[], object]
    bytes_kept: int


def measure_layers(
    problem: Problem, entries: Sequence[Entry], schedule: Schedule, progress: MakeProgress = silence
) -> dict[str, Any]:
    """Measure time and memory of every entry and decomposition at one size."""
    timed = {entry.label: _layer(entry, problem) for entry in entries}
    timed |= {name: _decomposition(name, problem) for name in DECOMPOSITIONS}
    measured: dict[str, dict[str, Any]] = {name: {} for name in timed}
    for measure in MEASURES:
        with progress(f"rounds of layers at {problem.size.name}, {measure.replace('_', ' ')}") as log:
            timings = time_interleaved(
                {name: getattr(ready, measure) for name, ready in timed.items()},
                reference=REFERENCE,
                schedule=schedule,
                seed=problem.seed,
                device=problem.device,
                log=log,
            )
        for name, timing in timings.items():
            measured[name][measure] = timing_figures(timing)
    size = problem.size
    for name, ready in timed.items():
        measured[name]["bytes_kept_per_image"] = rounded(ready.bytes_kept / size.batch)
    return {
        "channels": size.channels,
        "positions": size.positions,
        "batch": size.batch,
        "entries": {entry.label: measured[entry.label] for entry in entries},
        "decompositions": {name: measured[name] for name in DECOMPOSITIONS},
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


def value_alone(pool: Callable[[Tensor], Tensor], features: Tensor) -> Tensor:
    """Return the result, with nothing saved for backward."""
    with torch.no_grad():
        return pool(features)


def _trained(layer: torch.nn.Module, features: Tensor, upstream: Tensor) -> None:
    """Compute the result and the gradients of the features and of any parameters, as in training."""
    leaf = features.detach().requires_grad_()
    torch.autograd.grad(layer(leaf), [leaf, *layer.parameters()], upstream)


def _decomposition(name: str, problem: Problem) -> Timed:
    """Return the timed functions of a decomposition of the features' covariances."""
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
