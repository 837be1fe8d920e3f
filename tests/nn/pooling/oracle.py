"""Reference values for every method: numpy and scipy in float64, and finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from covpool.nn.pooling import METHODS

Array = NDArray[np.float64]


def covariance(x: Tensor) -> list[Array]:
    """Compute the covariance with numpy's own function, per image."""
    return [np.cov(image.numpy(), bias=True) for image in x]


def second_moment(x: Tensor) -> list[Array]:
    """Compute the second moment as a sum over positions."""
    return [np.einsum("cp,dp->cd", image, image) / image.shape[1] for image in x.numpy()]


def root_of_covariance(x: Tensor) -> list[Array]:
    """Compute the root from the singular values of the centered features, which may include zeros."""
    roots = []
    for image in x.numpy():
        vectors, values, _ = np.linalg.svd(image - image.mean(1, keepdims=True), full_matrices=False)
        roots.append((vectors * values) @ vectors.T / np.sqrt(image.shape[1]))
    return roots


def upper(matrix: Array) -> Array:
    """Return the upper triangle, row by row."""
    return np.asarray(matrix)[np.triu_indices(len(matrix))]


def pooled(method: str, x: Tensor, **options: Any) -> Array:
    """Return the method's vectors for features ``(B, C, n)``."""
    return METHODS[method](x.shape[1], **options).to(x.dtype)(x).detach().numpy()


def check_gradient(method: str, x: Tensor, **options: Any) -> None:
    """Check the gradient with respect to the features against finite differences."""
    pool = METHODS[method](x.shape[1], **options).to(x.dtype)
    assert torch.autograd.gradcheck(pool, x.clone().requires_grad_())


def upstream(y: Tensor) -> Tensor:
    """Return an upstream gradient with both signs, the same for every image."""
    return torch.sin(torch.arange(y.shape[-1], dtype=y.dtype)).expand_as(y)


def value_and_gradient(
    pool: Callable[..., Tensor], x: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the vectors and the gradient of the features."""
    leaf = x.detach().clone().requires_grad_()
    y = pool(leaf, weights)
    return y.detach(), torch.autograd.grad(y, leaf, upstream(y))[0]
