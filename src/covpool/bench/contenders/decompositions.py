r"""The exact root by an eigenvalue or a singular value decomposition, with torch's own gradient.

The covariance of 196 positions has at least 61 zero eigenvalues among 256, where the root has no
derivative. To be finite, both contenders count eigenvalues below ``C · eps · λ_max`` (the usual
bound on the rounding of the decomposition) as zero, with zero derivative. What remains is the
division by differences of eigenvalues inside torch's gradient; rounding keeps those of generic
features apart, so it is finite, which is enough for a clock. Whether it is accurate is not claimed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from covpool.bench.contenders.contender import Contender, Prepared, prepared_pool
from covpool.bench.problem import Problem


def eigh_root_of_covariance(x: Tensor) -> Tensor:
    """Features ``(B, C, n)`` to ``U √Λ Uᵀ`` with ``Σ = U Λ Uᵀ`` from torch.linalg.eigh."""
    eigenvalues, vectors = torch.linalg.eigh(_covariance(x))
    return _assemble(vectors, eigenvalues)


def svd_root_of_covariance(x: Tensor) -> Tensor:
    """Features ``(B, C, n)`` to ``U √S Uᵀ`` with ``Σ = U S Vᵀ`` from torch.linalg.svd."""
    vectors, singular_values, _ = torch.linalg.svd(_covariance(x))
    return _assemble(vectors, singular_values)


def _covariance(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred.bmm(centred.mT) / x.shape[-1]


def _assemble(vectors: Tensor, eigenvalues: Tensor) -> Tensor:
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
