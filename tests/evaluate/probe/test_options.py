"""Invalid options are refused when they are created."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from covpool.models import ModelConfig
from covpool.models.config import head_config
from tests.evaluate.probe.small_probing import OPTIONS


@pytest.mark.parametrize("changes", [{"weights": None}, {"pretrained": True}])
def test_weights_come_from_one_place(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="pass --pretrained or --weights FILE"):
        dataclasses.replace(OPTIONS, **changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"drop_rate": 1.0}, "drop_rate must be from 0 to below 1; got 1.0"),
        ({"label_smoothing": -0.1}, "label_smoothing must be from 0 to below 1"),
        ({"lr": 0.0}, "lr must be above 0"),
        ({"weight_decay": -1.0}, "weight_decay"),
    ],
)
def test_numbers_out_of_range(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(OPTIONS, **changes)


@pytest.mark.parametrize(
    ("head", "sentence"),
    [
        ("isqrt", "a head must be one of"),
        ("gap+max", "the part after \\+ in a head must be one of"),
        ("gap+gap", "gap\\+gap is gap twice"),
        ("gap@dim=8", "gap has no options; got 'gap@dim=8'"),
        ("isqrt_cov:dim=64", "an option of a head is written @name=value, as in isqrt_cov@dim=64; got"),
        ("isqrt_cov@dim", "an option of a head is written @name=value, as in isqrt_cov@dim=64; got"),
    ],
)
def test_unknown_heads(head: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(OPTIONS, heads=(head,))


def test_options_of_a_head() -> None:
    """A head sets options of the model and of the method. The other options are those of all heads."""
    backbone = ModelConfig("test_efficientnet", num_classes=3, layers="last4")
    head = "isqrt_cov@dim=64@iteration=paper@steps=5@normalization=frobenius"
    ours = head_config(head, backbone, 128, 0.5, expands=True)
    assert (ours.dim, ours.layers, ours.fusion) == (64, "last4", "each")
    assert ours.pool_options == {"iteration": "paper", "steps": 5, "normalization": "frobenius"}
    other = head_config("cov@layers=all-stages@fusion=concat+gap", backbone, 128, 0.5, expands=True)
    assert (other.dim, other.layers, other.fusion, other.join) == (128, "all-stages", "concat", "gap")
    first = head_config("efficient_probing@value=false", backbone, 128, 0.5, expands=True)
    assert (first.dim, first.layers, first.pool_options) == (None, "last", {"value": False})
