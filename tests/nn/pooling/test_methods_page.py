"""The table of methods in docs/methods.md is correct about vector lengths, scale and gradients."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from covpool.nn.pooling import METHODS, Method
from tests.functional.tolerances import assert_close
from tests.nn.pooling.inputs import C, full_rank

PAGE = Path(__file__).parents[3] / "docs" / "methods.md"


class Row(NamedTuple):
    """The cells of one method, as written."""

    method: str
    computes: str
    paper: str
    out_features: str
    cost: str
    zeros: str
    scale: str
    gradient: str


def read_rows() -> dict[str, Row]:
    """Return the table between two comments, or nothing if the tests run without the checkout."""
    if not PAGE.exists():
        return {}
    table = re.search(
        r"<!-- methods:begin -->\n(.*?)<!-- methods:end -->", PAGE.read_text("utf-8"), re.DOTALL
    )
    assert table is not None
    lines = table[1].splitlines()[2:]
    rows = [Row(*(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])) for line in lines]
    return {row.method.strip("`"): row for row in rows}


ROWS = read_rows()
every_row = pytest.mark.parametrize("name", ROWS)


def make(name: str) -> Method:
    torch.manual_seed(0)
    return METHODS[name](C).double().eval()


@pytest.mark.skipif(not ROWS, reason="tests without the checkout around them")
def test_the_table_has_every_method_in_their_order() -> None:
    assert list(ROWS) == list(METHODS)


@every_row
def test_out_features(name: str) -> None:
    formula = re.sub(r"(?<=[d)])\(", "*(", ROWS[name].out_features)
    for channels in (1, 2, 10):
        assert eval(formula, {"d": channels}) == METHODS[name](channels).out_features


@every_row
def test_scale(name: str) -> None:
    pool, x, alpha = make(name), full_rank(), 3.0
    expected = {"1": pool(x), "α": alpha * pool(x), "α²": alpha**2 * pool(x)}
    scaled = pool(alpha * x)
    if ROWS[name].scale in expected:
        assert_close(scaled, expected[ROWS[name].scale], relative=1e-9)
        return
    assert ROWS[name].scale == "depends"
    assert not any(torch.allclose(scaled, other, rtol=1e-4) for other in expected.values())


@every_row
def test_gradient(name: str) -> None:
    """For approximate gradients, the method's own tests check the error."""
    if ROWS[name].gradient == "exact":
        # Test one random direction, because some vectors are long. The method's own tests cover all.
        assert torch.autograd.gradcheck(make(name), full_rank().requires_grad_(), fast_mode=True)
    else:
        assert ROWS[name].gradient == "approximate"


@every_row
def test_the_paper_is_that_of_the_documentation(name: str) -> None:
    text = " ".join((METHODS[name].__doc__ or "").split())
    *authors, source = re.split(r", (?!\d)", ROWS[name].paper.removeprefix("after "))
    for word in [*authors, *source.split()]:
        assert word in text, word
