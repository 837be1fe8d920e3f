"""The support table in docs/methods.md: supported cases agree with eager mode, the others still fail."""

from __future__ import annotations

import copy
import re
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor_config

from covpool.nn import CovPool
from covpool.nn.pooling import METHODS
from tests.functional.portability import BATCH, check_onnx
from tests.functional.tolerances import assert_close
from tests.nn.test_portable import assert_all_close, everything

PAGE = Path(__file__).parents[3] / "docs" / "methods.md"
C = 6

# torch's own code raises these warnings during tracing and code generation.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Row(NamedTuple):
    """A method with options, and for each target ``"yes"`` or the operator that is missing."""

    method: str
    options: dict[str, Any]
    compiled: str
    exported: str
    onnx: str

    def __str__(self) -> str:
        return " ".join([self.method, *(f"{name}={value}" for name, value in self.options.items())])

    def pool(self) -> CovPool:
        torch.manual_seed(0)
        return CovPool(C, self.method, dim=None, **self.options)


def read_rows() -> list[Row]:
    """Return the table between two comments, or nothing if the tests run without the checkout."""
    if not PAGE.exists():
        return []
    table = re.search(
        r"<!-- support:begin -->\n(.*?)<!-- support:end -->", PAGE.read_text("utf-8"), re.DOTALL
    )
    assert table is not None
    lines = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table[1].splitlines() if line]
    rows = []
    for name, *answers in lines[2:]:
        method, *options = name.replace("`", "").split()
        rows.append(Row(method, dict(option.split("=") for option in options), *map(_answer, answers)))
    return rows


def _answer(cell: str) -> str:
    if cell == "yes":
        return cell
    operator = re.fullmatch(r"no: `(aten\.\w+)`", cell)
    assert operator is not None, f"{cell!r} is neither yes nor no with an operator"
    return operator[1]


ROWS = read_rows()


def rows(*fast: str) -> pytest.MarkDecorator:
    """Parametrize over all rows. Rows that are not named are slow."""
    return pytest.mark.parametrize(
        "row",
        [pytest.param(row, marks=() if str(row) in fast else pytest.mark.slow, id=str(row)) for row in ROWS],
    )


def batches() -> list[tuple[Tensor, ...]]:
    return [(torch.randn(batch, C, 4, 5),) for batch in (3, 1, 5)]


def as_the_page_says(answer: str) -> AbstractContextManager[object]:
    """Expect no error if the page says yes, otherwise an error that names the missing operator."""
    if answer == "yes":
        return nullcontext()
    missing = rf"No ONNX function found for <OpOverload\(op='{re.escape(answer)}'"
    return pytest.raises(torch.onnx.errors.OnnxExporterError, match=missing)


def check_trained_compiled(row: Row, backend: str) -> None:
    """Check training, including randomness: value and all gradients, for two batch sizes."""
    torch.compiler.reset()
    pool = row.pool()
    eager = copy.deepcopy(pool)
    compiled = torch.compile(pool, fullgraph=True, dynamic=True, backend=backend)
    for n, inputs in enumerate(batches()[::2]):  # a batch of one compiles to a separate program
        with torch.compiler.set_stance("fail_on_recompile" if n else "default"):
            torch.manual_seed(1)
            got = everything(compiled, inputs)
        torch.manual_seed(1)
        assert_all_close(
            {name.removeprefix("_orig_mod."): value for name, value in got.items()}, everything(eager, inputs)
        )


@pytest.mark.skipif(not ROWS, reason="tests without the checkout around them")
def test_the_table_has_every_method() -> None:
    assert {row.method for row in ROWS if not row.options} == set(METHODS)
    assert len({str(row) for row in ROWS}) == len(ROWS)
    assert {row.compiled for row in ROWS} == {"yes"}, "write the test that the failure is still there"
    assert {row.exported for row in ROWS} == {"yes"}, "write the test that the failure is still there"


@pytest.mark.slow
@rows("cov")
def test_compiled_whole_and_dynamic(row: Row) -> None:
    check_trained_compiled(row, "aot_eager")


@rows()
def test_compiled_by_inductor(row: Row) -> None:
    with inductor_config.patch(fallback_random=True):  # draw random numbers as torch itself does
        check_trained_compiled(row, "inductor")


@rows("isqrt_cov", "mpn_cov", "dropcov")
def test_exported_with_a_dynamic_batch(row: Row) -> None:
    """Compare values only: the gradient of an exported program comes from its operators, not from covpool."""
    pool, (example, *others) = row.pool().eval(), batches()
    program = torch.export.export(pool, example, dynamic_shapes=(BATCH,)).module()
    for inputs in others:
        assert_close(program(*inputs), pool(*inputs), relative=1e-5)


@rows()
def test_onnx_with_a_dynamic_batch(row: Row, tmp_path: Path) -> None:
    pool, (example, *others) = row.pool().eval(), batches()
    with as_the_page_says(row.onnx):
        check_onnx(pool, tmp_path / "pool.onnx", example, others)
