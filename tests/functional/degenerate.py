"""Degenerate features of several kinds, and hypothesis strategies that draw them."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.functional.pooling import DTYPES, NORMALIZATIONS, SIDES, Pooling
from tests.functional.samples import UNEVEN

CONSTANTS = [0.1, 7.7, 1.0, -3.3, 1 / 3, 1e-7, 6e4]


def constant(batch: int, channels: int, positions: int, generator: torch.Generator) -> Tensor:
    """Return channels that are each constant. The constants are mostly decimals that binary floats round."""
    chosen = torch.randint(len(CONSTANTS), (batch, channels, 1), generator=generator)
    return torch.tensor(CONSTANTS, dtype=torch.float64)[chosen].expand(-1, -1, positions).clone()


def noise(batch: int, channels: int, positions: int, generator: torch.Generator) -> Tensor:
    return torch.randn(batch, channels, positions, generator=generator, dtype=torch.float64)


def rank_one(batch: int, channels: int, positions: int, generator: torch.Generator) -> Tensor:
    return noise(batch, channels, 1, generator) @ noise(batch, 1, positions, generator)


def duplicated(batch: int, channels: int, positions: int, generator: torch.Generator) -> Tensor:
    return noise(batch, 1, positions, generator).expand(-1, channels, -1).clone()


def some_constant(batch: int, channels: int, positions: int, generator: torch.Generator) -> Tensor:
    x = noise(batch, channels, positions, generator)
    x[:, ::2] = constant(batch, channels, positions, generator)[:, ::2]
    return x


def offset(batch: int, channels: int, positions: int, generator: torch.Generator) -> Tensor:
    """Return features with a large offset per channel and a small spread around it."""
    return noise(batch, channels, positions, generator) * 1e-4 + 10 * noise(batch, channels, 1, generator)


def barely_not_constant(batch: int, channels: int, positions: int, generator: torch.Generator) -> Tensor:
    """Return constants with 0 to 11 float32 rounding units of noise, on both sides of the flat rule."""
    units = torch.randint(0, 12, (batch, channels, positions), generator=generator)
    return constant(batch, channels, positions, generator) * (1 + units * 2.0**-23)


def relu(batch: int, channels: int, positions: int, generator: torch.Generator) -> Tensor:
    """Return features like those of a backbone with ReLU: mostly zeros, some channels dead."""
    return (noise(batch, channels, positions, generator) - 1).relu()


def uneven(batch: int, channels: int, positions: int, generator: torch.Generator) -> Tensor:
    """Return channels with very different activation scales."""
    scales = torch.logspace(-6, 3, channels, dtype=torch.float64)[:, None]
    return noise(batch, channels, positions, generator) * scales


def one_spike(batch: int, channels: int, positions: int, generator: torch.Generator) -> Tensor:
    x = torch.zeros(batch, channels, positions, dtype=torch.float64)
    x[:, 0, 0] = 1.0
    return x


def zeros(batch: int, channels: int, positions: int, generator: torch.Generator) -> Tensor:
    return torch.zeros(batch, channels, positions, dtype=torch.float64)


KINDS = [
    zeros,
    constant,
    some_constant,
    barely_not_constant,
    offset,
    noise,
    relu,
    rank_one,
    duplicated,
    uneven,
    one_spike,
]
# The part of 1e-12 to 1e12 that each dtype can represent, with a margin for the spread of the features.
EXPONENTS = {
    torch.float16: (-3, 0),
    torch.bfloat16: (-12, 12),
    torch.float32: (-12, 12),
    torch.float64: (-12, 12),
}
WEIGHTS = ["none", "uniform", "random", "sparse", "mask", "all masked"]


@st.composite
def inputs(draw: st.DrawFn) -> tuple[Tensor, Tensor | None]:
    """Draw features of any kind, shape, scale and dtype, with weights of any kind."""
    batch, channels, positions = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from(DTYPES))
    scale = 10.0 ** draw(st.integers(*EXPONENTS[dtype]))
    x = draw(st.sampled_from(KINDS))(batch, channels, positions, generator) * scale
    x = x.clamp(-torch.finfo(dtype).max / 4, torch.finfo(dtype).max / 4).to(dtype)
    kind = draw(st.sampled_from(WEIGHTS))
    if kind == "none":
        return x, None
    weights = torch.rand(batch, positions, generator=generator) + 0.01
    if kind == "uniform":
        weights = torch.ones_like(weights)
    elif kind != "random":
        weights[torch.rand(batch, positions, generator=generator) < 0.5] = 0.0
    if kind == "all masked":
        weights[0] = 0.0
    return x, weights > 0 if kind == "mask" else weights


poolings = st.builds(
    Pooling,
    steps=st.integers(1, 7) | st.just(UNEVEN),
    normalization=st.sampled_from(NORMALIZATIONS),
    compensation=st.sampled_from(["matched", "none"]),
    side=st.sampled_from(["auto", *SIDES]),
    backward=st.sampled_from(["saved", "recompute"]),
    autocast=st.booleans(),
)
