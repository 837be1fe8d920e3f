"""Check simple arguments, and the choices that several packages share. Importing it does not import torch.

Every message names the argument and says what to do. :mod:`covpool.functional.numerics` checks tensors.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

from covpool.errors import UsageError, UsageTypeError

Device = Literal["auto", "cpu", "cuda", "mps", "xpu"]
DEVICES = ("auto", "cpu", "cuda", "mps", "xpu")
Layers = Literal["last", "last4", "all-stages"]
LAST: Layers = "last"
SEVERAL: tuple[Layers, ...] = ("last4", "all-stages")  # each has the layers of those before it
LAYERS: tuple[Layers, ...] = (LAST, *SEVERAL)
Fusion = Literal["each", "concat"]
FUSIONS = ("each", "concat")
Join = Literal["cls", "gap"]
# How the names in a file of weights become timm's.
KeyMap = Mapping[str, str | None] | Literal["order"] | None
# In place of a pooling method: the class token of a transformer.
CLASS_TOKEN = "cls"
# The two defaults of ``dim``, the number of channels that second-order methods pool. The layer and the
# networks have the paper's 256. Heads on a frozen backbone have 128: their classifier has a quarter of the
# parameters, and the sums of the closed form take a sixteenth of the memory. ``python -m lab one_pass``
# compares 64 to 256.
DIM = 256
FROZEN_DIM = 128


def check_choice(name: str, value: object, choices: Collection[object]) -> None:
    """Raise unless ``value`` is one of ``choices``."""
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise UsageError(f"{name} must be one of {listed}; got {value!r}{did_you_mean(value, choices)}")


def did_you_mean(value: object, choices: Collection[object]) -> str:
    """The choices that look like ``value``, as the end of a sentence; nothing if none does."""
    names = [choice for choice in choices if isinstance(choice, str)]
    # As papers write them, iSQRT-COV, is near as well.
    spelled = value.casefold().replace("-", "_") if isinstance(value, str) else ""
    near = difflib.get_close_matches(spelled, names, n=3)
    return f": did you mean {' or '.join(map(repr, near))}?" if near else ""


def check_whole(name: str, value: object, *, at_least: int = 1, expected: str = "an int") -> None:
    """Raise unless ``value`` is a whole number and not below ``at_least``."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageTypeError(f"{name} must be {expected}; got {type(value).__name__}")
    if value < at_least:
        raise UsageError(f"{name} must be at least {at_least}; got {value}")


def check_positive(name: str, value: object) -> None:
    """Raise unless ``value`` is a finite number above zero."""
    if not 0 < _number(name, value) < math.inf:
        raise UsageError(f"{name} must be above 0; got {value}")


def check_not_negative(name: str, value: object) -> None:
    """Raise unless ``value`` is a finite number and not below zero."""
    if not 0 <= _number(name, value) < math.inf:
        raise UsageError(f"{name} must be at least 0; got {value}")


def check_same(folder: Path, given: Mapping[str, object], earlier: Mapping[str, object]) -> None:
    """Raise if the results in a folder have other values by name than those given."""
    for name, value in given.items():
        if (before := earlier.get(name)) != value:
            its_own = f"without {name}" if before is None else f"with {name} {before!r}"
            raise UsageError(f"{folder} has results {its_own}: use another --out")


def _number(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise UsageTypeError(f"{name} must be a number; got {type(value).__name__}")
    return value
