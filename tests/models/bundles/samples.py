"""Bundles for the tests of bundles, functions that tamper with one, and checks that it is refused."""

from __future__ import annotations

import hashlib
import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from covpool.errors import BundleError
from covpool.models import PooledClassifier, create_model
from covpool.models.bundle import load_model, read_card
from covpool.models.card import card_hash

CLASSES = ("Jay", "Zaunkönig", "鷦鷯")
# The fastest model to build.
TINY = {"backbone": "test_vit", "backbone_options": {"depth": 1}}


def trained(**options: Any) -> PooledClassifier:
    """Return a small model whose weights and BatchNorm statistics differ from those of a new one."""
    model = create_model(**{"dim": 8, "num_classes": len(CLASSES), **(options or TINY)})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
        model.train()(images(model))
    return model.eval()


def images(model: PooledClassifier) -> Tensor:
    parameter = next(model.parameters())
    return torch.randn(2, *model.pretrained_cfg["input_size"]).to(parameter.dtype)


def all_tensors(model: PooledClassifier) -> dict[str, Tensor]:
    """Return all parameters and buffers, including buffers that are not in the state dict."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def edit_card(folder: Path, edit: Callable[[dict[str, Any]], object], *, rehash: bool = True) -> None:
    """Edit the card. With ``rehash``, also recompute its hash, as an attacker would."""
    path = folder / "covpool.json"
    fields = json.loads(path.read_text(encoding="utf-8"))
    edit(fields)
    if rehash:
        fields["hash"] = card_hash(fields)
    path.write_text(json.dumps(fields), encoding="utf-8")


def put_weights(folder: Path, data: bytes) -> None:
    """Replace the weights, and record their hash and size in the card."""
    (folder / "model.safetensors").write_bytes(data)
    entry = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    edit_card(folder, lambda fields: fields["weights"].update(entry))


def edit_weights(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    edit(tensors)
    put_weights(folder, safetensors.torch.save(tensors))


def assert_refused(folder: Path, reason: str) -> None:
    for read in (load_model, read_card):
        with pytest.raises(BundleError, match=reason) as caught:
            read(folder)
        message = str(caught.value)
        assert message.startswith(f"bundle {str(folder)!r}: ")
        assert message.isprintable()
        assert len(message) < 1000


def assert_not_loaded(folder: Path, reason: str) -> None:
    """Check that the card is readable, but loading the model fails."""
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
    """Return the bytes of a tensor, which also distinguish 0.0 from -0.0."""
    return tensor.detach().flatten().contiguous().view(torch.uint8)


@contextmanager
def limited(kind: int, limit: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)
