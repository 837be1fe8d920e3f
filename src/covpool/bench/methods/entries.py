"""What is compared: every pooling method, and those of its variants that the paper tells apart."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from covpool.functional.arguments import check_choice
from covpool.nn.pooling import METHODS, Method

# Methods that are run otherwise than once by default: the options of each run. A forward and a backward
# pass of improved B-CNN by SVD or by iteration are the four of the paper; the fifth needs neither.
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "isqrt_cov": ({}, {"steps": 3}, {"normalization": "frobenius"}),
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


@dataclass(frozen=True)
class Entry:
    """A method with options: a row of the table."""

    method: str
    options: Mapping[str, Any]

    @property
    def label(self) -> str:
        """The row's name, ``isqrt_cov steps=3``."""
        return " ".join([self.method, *(f"{name}={value}" for name, value in self.options.items())])

    @property
    def summary(self) -> str:
        """The method's own line on itself."""
        return METHODS[self.method].summary

    def layer(self, channels: int) -> Method:
        """A new layer, in training."""
        layer: Method = METHODS[self.method](channels, **self.options).train()
        return layer


def chosen_entries(methods: Collection[str] | None = None) -> list[Entry]:
    """All variants of the methods named, or of all; the reference is always there."""
    wanted = set(METHODS) if methods is None else {*methods, REFERENCE}
    for name in wanted:
        check_choice("methods", name, METHODS)
    return [
        Entry(name, options) for name in METHODS if name in wanted for options in VARIANTS.get(name, ({},))
    ]
