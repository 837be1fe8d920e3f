"""How a bundle is refused, how models are compared, and limits to do it within."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from covpool.errors import BundleError
from covpool.models.bundle import load_model, read_card
from tests.models.bundles.samples import all_tensors


def assert_refused(folder: Path, reason: str) -> None:
    for read in (load_model, read_card):
        with pytest.raises(BundleError, match=reason) as caught:
            read(folder)
        message = str(caught.value)
        assert message.startswith(f"bundle {str(folder)!r}: ")
        assert message.isprintable()
        assert len(message) < 1000


def assert_not_loaded(folder: Path, reason: str) -> None:
    """What only the network can tell; the card in itself is in order."""
    read_card(folder)
    with pytest.raises(BundleError, match=reason):
        load_model(folder)


def assert_same(found: nn.Module, wanted: nn.Module) -> None:
    assert all_tensors(found).keys() == all_tensors(wanted).keys()
    for name, tensor in all_tensors(wanted).items():
        other = all_tensors(found)[name]
        assert other.dtype == tensor.dtype, name
        assert torch.equal(bits(other), bits(tensor)), name


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """To compare by: zeros have a sign, and NaN is not equal to itself."""
    return tensor.detach().flatten().contiguous().view(torch.uint8)


@contextmanager
def limited(kind: int, limit: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)
