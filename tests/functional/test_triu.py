"""The upper triangle as a vector: order, scaling, and the inverse operation."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from covpool.functional import triu_unvec, triu_vec
from tests.functional.paper import symmetric


def test_row_by_row_and_unscaled() -> None:
    """The paper's convention: (0,0) (0,1) (0,2) (1,1) (1,2) (2,2), with off-diagonals unscaled."""
    c = torch.tensor([[0.0, 1.0, 2.0], [9.0, 3.0, 4.0], [9.0, 9.0, 5.0]])
    assert triu_vec(c).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert triu_unvec(torch.arange(6.0)).tolist() == [[0.0, 1.0, 2.0], [1.0, 3.0, 4.0], [2.0, 4.0, 5.0]]


@pytest.mark.parametrize("d", [1, 2, 3, 8, 65])
@pytest.mark.parametrize("leading", [(), (2,), (0,), (2, 3)])
def test_round_trip(d: int, leading: tuple[int, ...]) -> None:
    c = symmetric(torch.randn(*leading, d, d))
    v = triu_vec(c)
    assert v.shape == (*leading, d * (d + 1) // 2)
    assert torch.equal(triu_unvec(v), c)
    assert torch.equal(triu_vec(triu_unvec(v)), v)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_keeps_dtype(dtype: torch.dtype) -> None:
    c = torch.eye(3, dtype=dtype)
    assert triu_vec(c).dtype == dtype
    assert triu_unvec(triu_vec(c)).dtype == dtype


def test_reads_transposed_and_expanded_input() -> None:
    c = symmetric(torch.randn(3, 3))
    assert torch.equal(triu_vec(c.mT), triu_vec(c))
    assert torch.equal(triu_vec(c.expand(2, 3, 3)), triu_vec(c).expand(2, 6))


@pytest.mark.parametrize(("f", "shape"), [(triu_vec, (2, 3, 3)), (triu_unvec, (2, 6))])
def test_derivatives(f: object, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert gradcheck(f, x, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert gradgradcheck(f, x, check_fwd_over_rev=True, check_batched_grad=True)


@pytest.mark.parametrize("length", [0, 2, 4, 5, 7, 32895])
def test_length_that_is_no_triangle(length: int) -> None:
    with pytest.raises(ValueError, match=rf"v must have d\(d\+1\)/2 entries.*got {length}"):
        triu_unvec(torch.zeros(2, length))


def test_matrix_that_is_not_square() -> None:
    with pytest.raises(ValueError, match=r"c must be square matrices \(\.\.\., m, m\); got shape \(2, 3\)"):
        triu_vec(torch.zeros(2, 3))
