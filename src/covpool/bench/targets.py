"""What ``isqrt_cov`` is asked to reach: value+gradient on 2 CPU cores, float32, 5 steps.

The one place where these numbers stand. Tables show them beside what was measured, and the slow tests
assert them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

MIB = 2**20

Quantity = Literal["speedup", "overhead", "cost", "memory"]


@dataclass(frozen=True)
class Target:
    """A bound on one figure at one size.

    Attributes:
        size: name of the size.
        quantity: ``"speedup"`` is the contender's time over ours, at least the bound; ``"overhead"``
            ours over the contender's, at most; ``"cost"`` the contender's over ours, at most;
            ``"memory"`` MiB an image that the contender keeps for the gradient, at most.
        contender: whose figure, or against whom.
        bound: the number to reach.
        limit: for a target that is not reached, what stands in the way.
    """

    size: str
    quantity: Quantity
    contender: str
    bound: float
    limit: str = ""

    @property
    def label(self) -> str:
        """The figure in words."""
        return {
            "speedup": f"speed over {self.contender}",
            "overhead": f"time over {self.contender}",
            "cost": f"{self.contender}: time over ours",
            "memory": f"{self.contender}: MiB an image kept for the gradient",
        }[self.quantity]

    @property
    def bound_text(self) -> str:
        """The bound as it stands in a table."""
        unit = " MiB" if self.quantity == "memory" else "x"
        return f"{'≥' if self.quantity == 'speedup' else '≤'} {self.bound:g}{unit}"

    def measured(self, size: dict[str, Any]) -> tuple[float, float, float] | None:
        """Median and quartiles in the results of a size; None if the contender was not measured."""
        found = size["contenders"].get(self.contender)
        if found is None:
            return None
        if self.quantity == "memory":
            kept = found["bytes_kept_per_image"] / MIB
            return kept, kept, kept
        ratio = found["value_and_gradient"]["ratio"]
        if self.quantity == "overhead":
            return 1 / ratio["median"], 1 / ratio["q3"], 1 / ratio["q1"]
        return ratio["median"], ratio["q1"], ratio["q3"]

    def met(self, figure: float, margin: float = 0.0) -> bool:
        """Whether a figure reaches the bound, give or take a margin (0.05: five per cent)."""
        if self.quantity == "speedup":
            return figure >= self.bound * (1 - margin)
        return figure <= self.bound * (1 + margin)


_SIZES = ("14x14", "13x13", "7x7", "vit", "28x28")

_PRODUCTS = "the products alone take four fifths of the time; transposed sums between them take the rest"
_CALLS = "half the time is the cost of some 150 small calls, not of arithmetic"
_SUMS = "nine transposed sums of 256×256, whose stride of a power of two defeats the cache"

TARGETS = (
    Target("14x14", "speedup", "plain", 3.2, _PRODUCTS),
    Target("13x13", "speedup", "plain", 4.0, _PRODUCTS),
    Target("7x7", "speedup", "plain", 22.0, _CALLS),
    Target("vit", "speedup", "plain", 22.0),
    Target("28x28", "speedup", "plain", 1.9),
    Target("14x14", "overhead", "bare", 1.25),
    Target("28x28", "overhead", "bare", 1.25, _SUMS),
    *(Target(size, "speedup", "eigh", 1.0, _SUMS if size == "28x28" else "") for size in _SIZES),
    *(Target(size, "cost", "compiled", 1.0) for size in _SIZES),
    Target("14x14", "memory", "ours", 1.9),
    Target("14x14", "memory", "recompute", 0.5),
)
