"""Options that make no sense are refused as they are made."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

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
    ],
)
def test_unknown_heads(head: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(OPTIONS, heads=(head,))
