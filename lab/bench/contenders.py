"""The contenders: ``isqrt_cov`` and its variants, the paper's equations as printed, and decompositions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from covpool.functional import isqrt_cov
from lab.bench.layers import Problem, value_alone


@dataclass(frozen=True)
class Prepared:
    """A contender set up for one problem: two calls to time.

    ``pool`` is the contender as a differentiable function of the features; None if it only represents an
    amount of work.
    """

    value: Callable[[], object]
    value_and_gradient: Callable[[], object]
    pool: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Contender:
    """A way to compute the root of the covariance.

    Attributes:
        name: name in the results.
        summary: one-line description for readers of the results.
        prepare: function that sets it up for a problem; it is not timed.
        same_iteration: whether it computes the same function as ``isqrt_cov``, so that its distance from
            the float64 result is rounding and not different mathematics.
        dispatches_products: whether its products pass through torch's dispatcher and can be counted.
    """

    name: str
    summary: str
    prepare: Callable[[Problem], Prepared]
    same_iteration: bool = False
    dispatches_products: bool = True


def prepared_pool(pool: Callable[[Tensor], Tensor], problem: Problem) -> Prepared:
    """Prepare the value, and the value with gradient, of a differentiable function of the features."""
    return Prepared(
        value=partial(value_alone, pool, problem.features),
        value_and_gradient=partial(value_and_gradient, pool, problem.features, problem.upstream),
        pool=pool,
    )


def value_and_gradient(
    pool: Callable[[Tensor], Tensor], features: Tensor, upstream: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the result, and the gradient of ``⟨upstream, result⟩`` with respect to the features."""
    leaf = features.detach().requires_grad_()
    result = pool(leaf)
    (gradient,) = torch.autograd.grad(result, leaf, upstream)
    return result.detach(), gradient


def _prepare(problem: Problem, **options: Any) -> Prepared:
    return prepared_pool(
        partial(isqrt_cov, **{"iteration": "paper", "steps": problem.steps, **options}), problem
    )


def _prepare_compiled(problem: Problem) -> Prepared:
    # Otherwise compilations for earlier sizes count towards dynamo's limit of recompilations.
    torch.compiler.reset()

    def pool(x: Tensor) -> Tensor:
        return isqrt_cov(x, iteration="paper", steps=problem.steps)

    compiled: Callable[[Tensor], Tensor] = torch.compile(pool, fullgraph=True, dynamic=False)
    return prepared_pool(compiled, problem)


OURS = Contender("ours", "isqrt_cov with the steps of the paper", _prepare, same_iteration=True)
RECOMPUTE = Contender(
    "recompute",
    'isqrt_cov(backward="recompute")',
    partial(_prepare, backward="recompute"),
    same_iteration=True,
)
BFLOAT16 = Contender(
    "bfloat16",
    "isqrt_cov(compute_dtype=torch.bfloat16)",
    partial(_prepare, compute_dtype=torch.bfloat16),
    same_iteration=True,
)
FLOAT16 = Contender(
    "float16",
    "isqrt_cov(compute_dtype=torch.float16)",
    partial(_prepare, compute_dtype=torch.float16),
    same_iteration=True,
)
# The error of fitted steps is that of the fit against 5 paper steps.
FITTED_3 = Contender(
    "fitted 3",
    "isqrt_cov(steps=3)",
    partial(_prepare, iteration="fitted", steps=3),
    same_iteration=True,
)
FITTED_4 = Contender(
    "fitted 4",
    "isqrt_cov(steps=4)",
    partial(_prepare, iteration="fitted", steps=4),
    same_iteration=True,
)
COMPILED = Contender(
    "compiled",
    "torch.compile(isqrt_cov, fullgraph=True)",
    _prepare_compiled,
    same_iteration=True,
    dispatches_products=False,
)


def eigh_root_of_covariance(x: Tensor) -> Tensor:
    """Map features ``(B, C, n)`` to ``U √Λ Uᵀ`` with ``Σ = U Λ Uᵀ`` from torch.linalg.eigh."""
    eigenvalues, vectors = torch.linalg.eigh(_covariance(x))
    return _assemble(vectors, eigenvalues)


def svd_root_of_covariance(x: Tensor) -> Tensor:
    """Map features ``(B, C, n)`` to ``U √S Uᵀ`` with ``Σ = U S Vᵀ`` from torch.linalg.svd."""
    vectors, singular_values, _ = torch.linalg.svd(_covariance(x))
    return _assemble(vectors, singular_values)


def _covariance(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred.bmm(centred.mT) / x.shape[-1]


def _assemble(vectors: Tensor, eigenvalues: Tensor) -> Tensor:
    """Return the root; eigenvalues below ``C · eps · λ_max`` count as zero and have zero derivative.

    The covariance of 196 positions has at least 61 zero eigenvalues among 256, where the root has no
    derivative. torch's gradient still divides by differences of eigenvalues. Rounding keeps the
    eigenvalues of generic features apart, so the gradient is finite, which is enough to time it. It may be
    inaccurate.
    """
    largest = eigenvalues.detach().amax(-1, keepdim=True)
    kept = eigenvalues > eigenvalues.shape[-1] * torch.finfo(eigenvalues.dtype).eps * largest
    # The inner where keeps the derivative of the root away from zero, where it is infinite.
    roots = torch.where(kept, torch.where(kept, eigenvalues, 1.0).sqrt(), 0.0)
    return (vectors * roots.unsqueeze(-2)).bmm(vectors.mT)


def _prepare_eigh(problem: Problem) -> Prepared:
    return prepared_pool(eigh_root_of_covariance, problem)


def _prepare_svd(problem: Problem) -> Prepared:
    return prepared_pool(svd_root_of_covariance, problem)


EIGH = Contender("eigh", "exact root by torch.linalg.eigh, torch's own gradient", _prepare_eigh)
SVD = Contender("svd", "exact root by torch.linalg.svd, torch's own gradient", _prepare_svd)


def plain_isqrt_cov(x: Tensor, *, steps: int = 5) -> Tensor:
    """Map features ``(B, C, n)`` to the root of their covariance ``(B, C, C)``, by the paper's equations.

    It represents the public code of the paper at its best: it processes the whole batch at once, and saves
    only the matrices that its equations read again. The covariance uses the n×n centering matrix of each
    image. The gradient of a Newton-Schulz step is Eqn. (6) as printed, with YZ and ZY computed once each.
    With K >= 2 steps the root takes 3K - 3 products forward and 10K - 12 backward (12 and 38 at K = 5), and
    the covariance 2 and 2. Like the equations, the gradient is correct only for a symmetric upstream
    gradient.
    """
    sigma: Tensor = _PlainCovariance.apply(x)  # type: ignore[no-untyped-call]
    root: Tensor = _PlainRoot.apply(sigma, steps)  # type: ignore[no-untyped-call]
    return root


class _PlainCovariance(Function):
    """Covariance of Section 3.1, and Eqn. (11) with the transposition that the printed one lacks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        batch, _, n = x.shape
        identity = torch.eye(n, dtype=x.dtype, device=x.device)
        centring = ((identity - 1.0 / n) / n).repeat(batch, 1, 1)
        ctx.save_for_backward(x, centring)
        return x.bmm(centring).bmm(x.mT)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        x, centring = ctx.saved_tensors
        (grad,) = grads
        return (grad + grad.mT).bmm(x).bmm(centring)


class _PlainRoot(Function):
    """Pre-normalization by the trace, the iteration, post-compensation: Eqns. (3), (2), (4)."""

    @staticmethod
    def forward(ctx: Any, sigma: Tensor, steps: int) -> Tensor:
        trace = sigma.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
        a = sigma / trace
        three = _three_identities(a)
        t = 0.5 * (three - a)
        ys, zs = [a.bmm(t)], [t]
        for k in range(2, steps + 1):
            y, z = ys[-1], zs[-1]
            t = 0.5 * (three - z.bmm(y))
            ys.append(y.bmm(t))
            if k < steps:  # Z_K is never read
                zs.append(t.bmm(z))
        ctx.steps = steps
        ctx.save_for_backward(sigma, trace, a, *ys, *zs[: steps - 1])
        return ys[-1] * trace.sqrt()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        sigma, trace, a, *iterates = ctx.saved_tensors
        ys, zs = iterates[: ctx.steps], iterates[ctx.steps :]
        (grad,) = grads
        identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
        post = (grad * ys[-1]).sum((-2, -1), keepdim=True) / (2 * trace.sqrt()) * identity  # Eqn. (5)
        grad_a = _iteration_backward(grad * trace.sqrt(), a, ys, zs)
        inner = (grad_a * sigma).sum((-2, -1), keepdim=True)
        return grad_a / trace - inner / trace**2 * identity + post, None  # Eqn. (8)


def _iteration_backward(dy: Tensor, a: Tensor, ys: list[Tensor], zs: list[Tensor]) -> Tensor:
    """Return the gradient of A from that of ``Y_K``, by Eqns. (6) and (7)."""
    three = _three_identities(a)
    dz = None
    for y, z in zip(reversed(ys[:-1]), reversed(zs), strict=True):
        if dz is None:
            dy, dz = _last_step_backward(dy, y, z, three)
        else:
            dy, dz = _step_backward(dy, dz, y, z, three)
    grad_a = dy.bmm(three - a) - a.bmm(dy)
    return 0.5 * (grad_a if dz is None else grad_a - dz)


def _last_step_backward(dy: Tensor, y: Tensor, z: Tensor, three: Tensor) -> tuple[Tensor, Tensor]:
    """Apply Eqn. (6) at k = K, where the gradient of ``Z_K`` is zero: six products."""
    yz, zy = y.bmm(z), z.bmm(y)
    next_dy = 0.5 * (dy.bmm(three - yz) - zy.bmm(dy))
    next_dz = -0.5 * y.bmm(dy).bmm(y)
    return next_dy, next_dz


def _step_backward(dy: Tensor, dz: Tensor, y: Tensor, z: Tensor, three: Tensor) -> tuple[Tensor, Tensor]:
    """Apply Eqn. (6): ten products."""
    yz, zy = y.bmm(z), z.bmm(y)
    next_dy = 0.5 * (dy.bmm(three - yz) - z.bmm(dz).bmm(z) - zy.bmm(dy))
    next_dz = 0.5 * ((three - yz).bmm(dz) - y.bmm(dy).bmm(y) - dz.bmm(zy))
    return next_dy, next_dz


def _three_identities(like: Tensor) -> Tensor:
    return 3.0 * torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def _prepare_plain(problem: Problem) -> Prepared:
    return prepared_pool(partial(plain_isqrt_cov, steps=problem.steps), problem)


PLAIN = Contender(
    "plain",
    "the paper's equations as printed, covariance through the n×n centring matrix",
    _prepare_plain,
    same_iteration=True,
)
