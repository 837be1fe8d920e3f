"""What a network's pooling method receives and gives while something runs through it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from covpool.models.model import PooledClassifier
from covpool.nn.pooling.method import Method


@dataclass
class Seen:
    """Of the last batch.

    Attributes:
        received: features ``(B, d, n)``, after the reduction.
        given: the vector ``(B, D)``.
    """

    received: Tensor = field(init=False)
    given: Tensor = field(init=False)


@contextmanager
def watched_pooling(model: PooledClassifier) -> Iterator[Seen]:
    """Within ``with``, note what goes through the method of a model that pools."""
    seen = Seen()

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        seen.received, seen.given = inputs[0], output

    assert isinstance(model.pool.pooling, Method)
    handle = model.pool.pooling.register_forward_hook(note)
    try:
        yield seen
    finally:
        handle.remove()
