r"""The paper's equations, written down one after the other and no further thought about.

It stands for the code that users of the paper run today, in its best light: it works on the whole
batch at once, and it keeps only what its equations read again. The covariance goes through the n×n
centring matrix, one for each image; a Newton-Schulz step back is Eqn. (6) as printed, with YZ and ZY
made once each. At K steps (K >= 2) the root takes 3K - 3 products forward and 10K - 12 back (12 and 38
at K = 5), the covariance 2 and 2.

Its gradient is the true one for a symmetric upstream gradient only, like that of the equations.

Shapes: x ``(B, C, n)``; everything else ``(B, C, C)`` but for the centring matrices ``(B, n, n)`` and
the traces ``(B, 1, 1)``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from covpool.bench.contenders.contender import Contender, Prepared, prepared_pool
from covpool.bench.problem import Problem


def plain_isqrt_cov(x: Tensor, *, steps: int = 5) -> Tensor:
    """Features ``(B, C, n)`` to the root of their covariance, ``(B, C, C)``."""
    sigma: Tensor = _PlainCovariance.apply(x)  # type: ignore[no-untyped-call]
    root: Tensor = _PlainRoot.apply(sigma, steps)  # type: ignore[no-untyped-call]
    return root


class _PlainCovariance(Function):
    """Section 3.1 and Eqn. (11), with the transposition that the printed Eqn. (11) lacks."""

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
    """Pre-normalisation by the trace, the iteration, post-compensation: Eqns. (3), (2), (4)."""

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
    """Eqns. (6) and (7), from the gradient of ``Y_K`` to that of A."""
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
    """Eqn. (6) at k = K, where the gradient of ``Z_K`` is zero: six products."""
    yz, zy = y.bmm(z), z.bmm(y)
    next_dy = 0.5 * (dy.bmm(three - yz) - zy.bmm(dy))
    next_dz = -0.5 * y.bmm(dy).bmm(y)
    return next_dy, next_dz


def _step_backward(dy: Tensor, dz: Tensor, y: Tensor, z: Tensor, three: Tensor) -> tuple[Tensor, Tensor]:
    """Eqn. (6): ten products."""
    yz, zy = y.bmm(z), z.bmm(y)
    next_dy = 0.5 * (dy.bmm(three - yz) - z.bmm(dz).bmm(z) - zy.bmm(dy))
    next_dz = 0.5 * ((three - yz).bmm(dz) - y.bmm(dy).bmm(y) - dz.bmm(zy))
    return next_dy, next_dz


def _three_identities(like: Tensor) -> Tensor:
    return 3.0 * torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def _prepare(problem: Problem) -> Prepared:
    return prepared_pool(partial(plain_isqrt_cov, steps=problem.steps), problem)


PLAIN = Contender(
    "plain",
    "the paper's equations as printed, covariance through the n×n centring matrix",
    _prepare,
    same_iteration=True,
)
