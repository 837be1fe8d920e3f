"""The equations of sections 3.1 to 3.3 of the paper, written out plainly: the oracle of these tests.

It uses no symmetry and saves no products. Autograd differentiates every operation, so both the values and the
derivatives of the library can be compared with this file.

Matrices are ``(..., m, m)``, features ``(..., C, n)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

Steps = int | tuple[tuple[float, float], ...]

FLAT_ULPS = 4  # documented: the range of a flat channel is within this many rounding units of its magnitude


def symmetric(a: Tensor) -> Tensor:
    """½(A + Aᵀ)."""
    return (a + a.mT) / 2


def covariance(x: Tensor) -> Tensor:
    """Σ = X Ī Xᵀ with Ī = (I − 1/n)/n, with the n×n matrix Ī formed explicitly (section 3.1)."""
    n = x.shape[-1]
    i_bar = (torch.eye(n, dtype=x.dtype) - torch.ones(n, n, dtype=x.dtype) / n) / n
    return x @ i_bar @ x.mT


def weighted_covariance(x: Tensor, weights: Tensor) -> Tensor:
    """Σ_p w_p (x_p − μ)(x_p − μ)ᵀ with w divided by its sum. Not in the paper; w = 1/n gives its Σ."""
    w = (weights / weights.sum(-1, keepdim=True)).unsqueeze(-2)
    centred = x - (x * w).sum(-1, keepdim=True)
    return (centred * w) @ centred.mT


def newton_schulz(a: Tensor, steps: Steps) -> tuple[list[Tensor], list[Tensor]]:
    """Eqn. (2): ``[Y_0 .. Y_N]`` and ``[Z_0 .. Z_N]``. The paper's coefficients are 3/2 and -1/2."""
    eye = torch.eye(a.shape[-1], dtype=a.dtype).expand_as(a)
    ys, zs = [a], [eye]
    for of_eye, of_product in ((1.5, -0.5),) * steps if isinstance(steps, int) else steps:
        y, z = ys[-1], zs[-1]
        ys.append(y @ (of_eye * eye + of_product * z @ y))
        zs.append((of_eye * eye + of_product * z @ y) @ z)
    return ys, zs


def newton_schulz_backward(grad_y: Tensor, grad_z: Tensor, ys: list[Tensor], zs: list[Tensor]) -> Tensor:
    """Eqns. (6) and (7): the gradient with respect to A, given the gradients of ``Y_N`` and ``Z_N``."""
    eye = zs[0]
    steps = len(ys) - 1
    for k in range(steps, 1, -1):
        y, z = ys[k - 1], zs[k - 1]
        next_grad_y = grad_y @ (3 * eye - y @ z) - z @ grad_z @ z - z @ y @ grad_y
        next_grad_z = (3 * eye - y @ z) @ grad_z - y @ grad_y @ y - grad_z @ z @ y
        grad_y, grad_z = next_grad_y / 2, next_grad_z / 2
    a = ys[0]
    return (grad_y @ (3 * eye - a) - grad_z - a @ grad_y) / 2


def trace(a: Tensor) -> Tensor:
    """tr(A), ``(..., 1, 1)``."""
    return a.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]


def frobenius(a: Tensor) -> Tensor:
    """‖A‖_F, ``(..., 1, 1)``."""
    return (a * a).sum((-2, -1), keepdim=True).sqrt()


NORMS = {"trace": trace, "frobenius": frobenius}


def post_compensation_backward(
    grad_c: Tensor, y: Tensor, sigma: Tensor, normalization: str
) -> tuple[Tensor, Tensor]:
    """Eqn. (5), or (9) for the Frobenius norm: the gradients of ``Y_N`` and, through this path only, of Σ."""
    inner = trace(grad_c.mT @ y)
    if normalization == "trace":
        eye = torch.eye(sigma.shape[-1], dtype=sigma.dtype)
        return trace(sigma).sqrt() * grad_c, inner / (2 * trace(sigma).sqrt()) * eye
    norm = frobenius(sigma)
    return norm.sqrt() * grad_c, inner / (2 * norm**1.5) * sigma


def pre_normalization_backward(
    grad_a: Tensor, grad_sigma_post: Tensor, sigma: Tensor, normalization: str
) -> Tensor:
    """Eqn. (8), or (10) for the Frobenius norm: the gradient of Σ from the gradient of A."""
    inner = trace(grad_a.mT @ sigma)
    if normalization == "trace":
        t = trace(sigma)
        eye = torch.eye(sigma.shape[-1], dtype=sigma.dtype)
        return -inner / t**2 * eye + grad_a / t + grad_sigma_post
    norm = frobenius(sigma)
    return -inner / norm**3 * sigma + grad_a / norm + grad_sigma_post


def covariance_backward(grad_sigma: Tensor, x: Tensor) -> Tensor:
    """Eqn. (11) with its erratum: for features ``(C, n)`` it is (G + Gᵀ) X Ī, not ĪX(G + Gᵀ)."""
    n = x.shape[-1]
    i_bar = (torch.eye(n, dtype=x.dtype) - torch.ones(n, n, dtype=x.dtype) / n) / n
    return (grad_sigma + grad_sigma.mT) @ x @ i_bar


def matrix_sqrt(
    sigma: Tensor, steps: Steps = 5, normalization: str = "trace", compensation: str = "matched"
) -> Tensor:
    """Eqns. (3), (2) and (4) in sequence, applied to ½(Σ + Σᵀ)."""
    sigma = symmetric(sigma)
    t = NORMS[normalization](sigma)
    y = newton_schulz(sigma / t, steps)[0][-1]
    return y * t.sqrt() if compensation == "matched" else y


def inverse_matrix_sqrt(
    sigma: Tensor, steps: Steps = 5, normalization: str = "trace", compensation: str = "matched"
) -> Tensor:
    """The other output of Eqn. (2), compensated by 1/√t."""
    sigma = symmetric(sigma)
    t = NORMS[normalization](sigma)
    z = newton_schulz(sigma / t, steps)[1][-1]
    return z / t.sqrt() if compensation == "matched" else z


def isqrt_cov(
    x: Tensor,
    steps: Steps = 5,
    normalization: str = "trace",
    compensation: str = "matched",
    weights: Tensor | None = None,
) -> Tensor:
    """The complete layer: the square root of the covariance."""
    sigma = covariance(x) if weights is None else weighted_covariance(x, weights)
    return matrix_sqrt(sigma, steps, normalization, compensation)


def flat_channels(x: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return a mask ``(..., C, 1)`` of the channels that are constant to within rounding in ``dtype``."""
    keep = torch.ones_like(x, dtype=torch.bool) if weights is None else (weights > 0).unsqueeze(-2)
    low = x.masked_fill(~keep, torch.inf).amin(-1, keepdim=True)
    high = x.masked_fill(~keep, -torch.inf).amax(-1, keepdim=True)
    magnitude = torch.maximum(low.abs(), high.abs())
    return (high - low <= FLAT_ULPS * torch.finfo(dtype).eps * magnitude) | (low > high)
