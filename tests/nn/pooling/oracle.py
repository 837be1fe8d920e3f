"""What every method is compared with: numpy and scipy in float64, and finite differences."""

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
    """By numpy's own function, image by image."""
    return [np.cov(image.numpy(), bias=True) for image in x]


def second_moment(x: Tensor) -> list[Array]:
    """By a sum over positions."""
    return [np.einsum("cp,dp->cd", image, image) / image.shape[1] for image in x.numpy()]


def root_of_covariance(x: Tensor) -> list[Array]:
    """By the singular values of the centred features, which no zero among them disturbs."""
    roots = []
    for image in x.numpy():
        vectors, values, _ = np.linalg.svd(image - image.mean(1, keepdims=True), full_matrices=False)
        roots.append((vectors * values) @ vectors.T / np.sqrt(image.shape[1]))
    return roots


def upper(matrix: Array) -> Array:
    """The upper triangle row by row."""
    return np.asarray(matrix)[np.triu_indices(len(matrix))]


def pooled(method: str, x: Tensor, **options: Any) -> Array:
    """The method's vector of features ``(B, C, n)``."""
    return METHODS[method](x.shape[1], **options).to(x.dtype)(x).detach().numpy()


def check_gradient(method: str, x: Tensor, **options: Any) -> None:
    """The gradient with respect to the features is that of finite differences."""
    pool = METHODS[method](x.shape[1], **options).to(x.dtype)
    assert torch.autograd.gradcheck(pool, x.clone().requires_grad_())


def upstream(y: Tensor) -> Tensor:
    """A gradient of all signs, the same at every call."""
    return torch.sin(torch.arange(y.numel(), dtype=y.dtype)).reshape(y.shape)


def value_and_gradient(
    pool: Callable[..., Tensor], x: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The vectors, and the gradient of the features."""
    leaf = x.detach().clone().requires_grad_()
    y = pool(leaf, weights)
    return y.detach(), torch.autograd.grad(y, leaf, upstream(y))[0]
