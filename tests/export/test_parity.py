from __future__ import annotations

import math

import numpy as np
import pytest

from covpool.export.parity import Parity, compare, objection

REFERENCE = np.array([[1.0, 3.0, -4.0], [2.0, 0.0, 1.0]], dtype=np.float32)


def test_figures_by_hand() -> None:
    found = np.array([[1.0, 3.5, -4.0], [0.5, 0.0, 1.0]], dtype=np.float32)
    parity = compare(REFERENCE, found)
    assert (parity.images, parity.agreeing, parity.top1) == (2, 1, 0.5)
    assert parity.absolute == 1.5
    assert parity.relative == 1.5 / 4


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_no_agreement(value: float) -> None:
    found = REFERENCE.copy()
    found[0, 1] = value
    parity = compare(REFERENCE, found)
    assert parity.absolute == parity.relative == math.inf
    assert parity.agreeing == (2 if value == math.inf else 1)
    assert objection("model.onnx", "float32", parity) is not None


def test_nothing_but_zeros() -> None:
    zeros = np.zeros((2, 3), dtype=np.float32)
    assert compare(zeros, zeros).relative == 0
    assert compare(zeros, zeros + 1).relative == math.inf


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"logits have shape \(2, 2\), and torch's \(2, 3\)"):
        compare(REFERENCE, REFERENCE[:, :2])


@pytest.mark.parametrize(
    ("precision", "agreeing", "relative", "sentence"),
    [
        ("float32", 1000, 1e-3, None),
        ("float32", 999, 0.0, "on 999 of 1000 images, 99.90 %, below the 100 % that float32 must reach"),
        (
            "float32",
            1000,
            2e-3,
            "differ from torch's by 2.0e-03 of the largest, above the 0.001 that float32",
        ),
        ("float16", 990, 0.3, None),
        ("float16", 989, 0.0, "on 989 of 1000 images, 98.90 %, below the 99 % that float16 must reach"),
        ("int8", 970, 0.3, None),
        ("int8", 969, 0.0, "on 969 of 1000 images, 96.90 %, below the 97 % that int8 must reach"),
    ],
)
def test_tolerances(precision: str, agreeing: int, relative: float, sentence: str | None) -> None:
    found = objection("the file", precision, Parity(1000, agreeing, relative, relative))
    if sentence is None:
        assert found is None
    else:
        assert found is not None
        assert sentence in found
        assert "the file" in found
