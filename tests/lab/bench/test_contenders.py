"""Every contender computes the correct values, with the expected number of matrix products."""

from __future__ import annotations

from functools import partial

import pytest
import scipy.linalg
import torch

from covpool.functional import isqrt_cov
from covpool.functional.isqrt_cov import cheaper_side
from covpool.provenance import Results
from lab.bench.bare_engine import recorded_products
from lab.bench.contenders import (
    eigh_root_of_covariance,
    plain_isqrt_cov,
    svd_root_of_covariance,
    value_and_gradient,
)
from lab.bench.isqrt_cov import CONTENDERS
from lab.bench.layers import MEASURES, Problem, Size, bytes_kept_for_backward

TINY = Problem(Size("tiny", 16, 9, batch=2))
WIDE = Problem(Size("wide", 4, 60, batch=2))


def exact_roots(problem: Problem) -> torch.Tensor:
    """Return the square roots of the covariance matrices by scipy, ``(B, C, C)``."""
    roots = []
    for x in problem.features.double():
        centred = x - x.mean(-1, keepdim=True)
        roots.append(torch.from_numpy(scipy.linalg.sqrtm((centred @ centred.mT / x.shape[-1]).numpy()).real))
    return torch.stack(roots)


@pytest.mark.parametrize("steps", [1, 2, 5, 7])
@pytest.mark.parametrize("problem", [TINY, WIDE], ids=lambda problem: problem.size.name)
def test_plain_equations_give_the_value_and_gradient_of_isqrt_cov(problem: Problem, steps: int) -> None:
    features, upstream = problem.features.double(), problem.upstream.double()
    plain = value_and_gradient(lambda x: plain_isqrt_cov(x, steps=steps), features, upstream)
    paper = {"iteration": "paper", "steps": steps}
    ours = value_and_gradient(lambda x: isqrt_cov(x, side="channels", **paper), features, upstream)
    torch.testing.assert_close(plain, ours, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("pool", [eigh_root_of_covariance, svd_root_of_covariance])
@pytest.mark.parametrize("problem", [TINY, WIDE], ids=lambda problem: problem.size.name)
def test_decompositions_give_the_root(pool, problem: Problem) -> None:
    root = pool(problem.features.double())
    torch.testing.assert_close(root, exact_roots(problem), rtol=1e-6, atol=1e-6)


def test_newton_schulz_contenders_tend_to_the_root() -> None:
    features, root = WIDE.features.double(), exact_roots(WIDE)
    for pool in (partial(isqrt_cov, iteration="paper"), plain_isqrt_cov):
        torch.testing.assert_close(pool(features, steps=25), root, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pool", [eigh_root_of_covariance, svd_root_of_covariance])
def test_gradient_of_decompositions_is_that_of_the_root_at_full_rank(pool) -> None:
    features, upstream = WIDE.features.double(), WIDE.upstream.double()
    gradient = value_and_gradient(pool, features, upstream)[1]
    ours = value_and_gradient(lambda x: isqrt_cov(x, iteration="paper", steps=25), features, upstream)[1]
    torch.testing.assert_close(gradient, ours, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in CONTENDERS if name not in ("compiled", "bare")])
def test_every_contender_is_finite_for_a_singular_covariance(name: str) -> None:
    pool = CONTENDERS[name].prepare(TINY).pool
    assert pool is not None
    for tensor in value_and_gradient(pool, TINY.features, TINY.upstream):
        assert tensor.isfinite().all()


def test_plain_takes_the_products_of_the_public_code() -> None:
    plain = CONTENDERS["plain"].prepare(TINY)
    value = len(recorded_products(plain.value))
    assert value == 12 + 2
    assert len(recorded_products(plain.value_and_gradient)) - value == 38 + 2


@pytest.mark.parametrize("problem", [TINY, WIDE], ids=lambda problem: problem.size.name)
@pytest.mark.parametrize("measure", MEASURES)
def test_bare_engine_replays_the_products_of_ours(problem: Problem, measure: str) -> None:
    ours = recorded_products(getattr(CONTENDERS["ours"].prepare(problem), measure))
    bare = recorded_products(getattr(CONTENDERS["bare"].prepare(problem), measure))
    assert [layout(product) for product in bare] == [layout(product) for product in ours]
    assert sharing(bare) == sharing(ours)


def layout(product) -> list[tuple]:
    return [(factor.shape, factor.stride) for factor in (product.left, product.right)]


def sharing(products) -> list[int]:
    """Return the number of the tensor behind each factor, in order of first appearance."""
    seen: dict[int, int] = {}
    factors = [factor for product in products for factor in (product.left, product.right)]
    return [seen.setdefault(factor.memory, len(seen)) for factor in factors]


def test_bare_engine_does_not_use_one_hot_buffer() -> None:
    bare = recorded_products(CONTENDERS["bare"].prepare(TINY).value_and_gradient)
    assert len(set(sharing(bare))) > len(bare) / 2


def test_bare_engine_reads_the_iterates_where_the_gradient_reads_them_again() -> None:
    """The expected buffers were counted by hand, for five steps on the positions side.

    The value uses M, A, T₀, one buffer for T₁..T₄, Y₁..Y₄, Z₂..Z₄, the kernel and M·kernel. The gradient
    adds the symmetric gradient, its product with M, that product times Mᵀ, a recomputed Z₁, and the
    workspace of the iteration.
    """
    problem = Problem(Size("hand", 16, 9, batch=2))
    assert cheaper_side(16, 9, 5) == "positions"
    recorded = recorded_products(CONTENDERS["bare"].prepare(problem).value_and_gradient)
    value, gradient = recorded[:15], recorded[15:]
    assert len(set(sharing(value))) == 13
    assert len(set(sharing(gradient + value))) <= 13 + 4 + 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_compiled_gives_the_value_and_gradient_of_eager() -> None:
    pool = CONTENDERS["compiled"].prepare(TINY).pool
    assert pool is not None
    compiled = value_and_gradient(pool, TINY.features, TINY.upstream)
    paper = {"iteration": "paper", "steps": TINY.steps}
    eager = value_and_gradient(lambda x: isqrt_cov(x, **paper), TINY.features, TINY.upstream)
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)


def test_every_kind_of_product_is_recorded_with_its_factors() -> None:
    a, b = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    total = torch.zeros(2, 3, 5)

    def run() -> None:
        torch.bmm(a, b)
        torch.bmm(a, b, out=total)
        torch.baddbmm(total, a, b)
        total.baddbmm_(a, b)
        a @ b
        a[0] @ b[0]

    products = recorded_products(run)
    assert len(products) == 6
    assert [product.left.shape for product in products] == [(2, 3, 4)] * 5 + [(3, 4)]
    assert products[0].multiplications == 2 * 3 * 4 * 5


def test_products_of_the_gradient_are_recorded() -> None:
    a = torch.randn(2, 3, 3, requires_grad=True)
    assert len(recorded_products(lambda: torch.bmm(a, a).sum().backward())) == 3


def test_a_transposed_factor_is_the_same_memory_with_other_strides() -> None:
    a = torch.randn(2, 3, 4)
    (product,) = recorded_products(lambda: torch.bmm(a, a.mT))
    assert product.left.memory == product.right.memory
    assert product.left.stride == (12, 4, 1)
    assert product.right.stride == (12, 1, 4)


def test_values_written_over_others_lie_in_the_same_place() -> None:
    a = torch.randn(2, 3, 3)

    def run() -> None:
        torch.bmm(a, a)
        a.mul_(2)
        torch.bmm(a, a)

    before, after = recorded_products(run)
    assert before.left.memory == after.left.memory


def test_memory_freed_and_used_again_is_another_factor() -> None:
    def run() -> None:
        for _ in range(3):
            fresh = torch.randn(2, 64, 64)
            torch.bmm(fresh, fresh)

    assert len({product.left.memory for product in recorded_products(run)}) == 3


FEATURES = torch.randn(2, 16, 9)


def test_nothing_is_kept_without_grad() -> None:
    assert bytes_kept_for_backward(torch.no_grad()(plain_isqrt_cov), FEATURES) == 0


def test_plain_keeps_its_iterates_and_the_centring_matrix() -> None:
    # Sigma, A, five Y and four Z of C×C; the n×n centering matrix; the trace.
    assert bytes_kept_for_backward(plain_isqrt_cov, FEATURES) == 2 * 4 * (11 * 16 * 16 + 9 * 9 + 1)


@pytest.mark.slow
def test_recompute_keeps_less_than_saved_and_saved_less_than_plain(results: Results) -> None:
    for size in results["sizes"].values():
        kept = {name: found["bytes_kept_per_image"] for name, found in size["contenders"].items()}
        assert kept["recompute"] < kept["ours"] < kept["plain"]
        assert kept["bare"] is None
