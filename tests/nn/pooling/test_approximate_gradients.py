"""Methods with an approximate gradient: its values, and the cases where it is exact."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.interpolate
import scipy.linalg
import torch
from torch import Tensor

from covpool.nn.pooling import METHODS
from tests.nn.pooling.inputs import C, full_rank, rank_deficient, repeated
from tests.nn.pooling.oracle import Array, check_gradient, covariance, pooled, root_of_covariance, upper


def upstream() -> Array:
    """Return a symmetric upstream gradient for the root, the same in every test."""
    g = np.random.default_rng(3).standard_normal((C, C))
    return g + g.T


def gradient(method: str, x: Tensor, **options: object) -> Array:
    """Return the gradient of ``⟨G, root⟩`` with respect to the features of one image."""
    leaf = x.clone().requires_grad_()
    vector = METHODS[method](C, **options)(leaf)
    g = upstream()
    doubled = torch.from_numpy(upper(2 * g - np.diag(np.diag(g))))  # the triangle holds each pair once
    return torch.autograd.grad(vector, leaf, doubled[None])[0][0].numpy()


def of_features(of_sigma: Array, x: Tensor) -> Array:
    """Convert the gradient of Σ to the gradient of the features."""
    centred = x[0].numpy() - x[0].numpy().mean(1, keepdims=True)
    return 2 * of_sigma @ centred / x.shape[2]


@pytest.mark.parametrize("method", ["svd_taylor", "svd_pade"])
def test_the_value_is_the_exact_root(method: str) -> None:
    x = full_rank()
    expected = [upper(scipy.linalg.sqrtm(sigma)) for sigma in covariance(x)]
    np.testing.assert_allclose(pooled(method, x), expected, atol=1e-12)


@pytest.mark.parametrize("features", [full_rank, rank_deficient])
@pytest.mark.parametrize(
    ("method", "options"), [("svd_taylor", {"degree": 1000}), ("svd_pade", {"limit": 1e6})]
)
def test_exact_where_eigenvalues_are_apart(method: str, options: dict, features: object) -> None:
    check_gradient(method, features(), **options)


@pytest.mark.parametrize("method", ["svd_taylor", "svd_pade", "mpa_lya", "mtp_lya"])
def test_no_gradient_of_differences_in_general(method: str) -> None:
    """These gradients really are approximate: they fail gradcheck."""
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        check_gradient(method, repeated())


@pytest.mark.parametrize("method", ["svd_taylor", "svd_pade"])
@pytest.mark.parametrize("closeness", [0.0, 0.999])
def test_gradient_of_the_decomposition(method: str, closeness: float) -> None:
    """Compare with the authors' derivatives of eigenvectors and eigenvalues, in numpy.

    The eigenvalues are far apart, or some differ by a thousandth. For equal eigenvalues the gradient depends
    on which eigenvectors the library chooses.
    """
    x = (1 - closeness) * full_rank(1) + closeness * repeated(1)
    values, vectors = np.linalg.eigh(covariance(x)[0])
    k = np.zeros((C, C))
    for i in range(C):
        for j in range(C):
            if i == j:
                continue
            larger, smaller = max(values[i], values[j]), min(values[i], values[j])
            ratio = smaller / larger
            if method == "svd_taylor":
                series = sum(ratio**power for power in range(101))
            else:
                series = min(1 / max(1 - ratio, 1e-300), 1e4)
            k[i, j] = series / larger * (1 if values[i] > values[j] else -1)
    g = upstream()
    of_vectors = 2 * g @ vectors * np.sqrt(values)
    of_values = np.diag(vectors.T @ g @ vectors) / (2 * np.sqrt(values))
    inner = k.T * (vectors.T @ of_vectors)
    of_sigma = vectors @ ((inner + inner.T) / 2 + np.diag(of_values)) @ vectors.T
    np.testing.assert_allclose(gradient(method, x), of_features(of_sigma, x), atol=1e-9)


@pytest.mark.parametrize("degree", [0, 1, 5])
def test_the_approximant_of_the_geometric_series_is_its_sum(degree: int) -> None:
    """A denominator of degree one gives exactly 1/(1 − r). Any higher degree makes the system singular."""
    upper_one, lower_one = scipy.interpolate.pade([1.0] * (degree + 2), 1, degree)
    r = np.linspace(-0.9, 0.99, 50)
    np.testing.assert_allclose(upper_one(r) / lower_one(r), 1 / (1 - r), rtol=1e-12)
    with pytest.raises(np.linalg.LinAlgError, match=r"(?i)singular"):
        scipy.interpolate.pade([1.0] * (2 * degree + 5), degree + 2, degree + 2)


@pytest.mark.parametrize("method", ["mpa_lya", "mtp_lya"])
def test_gradient_solves_lyapunov_at_the_approximate_root(method: str) -> None:
    x = full_rank(1)
    triangle = torch.from_numpy(pooled(method, x))
    row, column = np.triu_indices(C)
    root = np.zeros((C, C))
    root[row, column] = root[column, row] = triangle[0]
    of_sigma = scipy.linalg.solve_continuous_lyapunov(root, upstream())
    np.testing.assert_allclose(gradient(method, x, backward_steps=20), of_features(of_sigma, x), atol=1e-8)


def simplex() -> Tensor:
    """Return five equidistant positions in six channels: four eigenvalues are equal, two are zero."""
    turned, _ = np.linalg.qr(np.random.default_rng(4).standard_normal((C, C)))
    return torch.from_numpy(turned[:, :5] @ np.eye(5))[None]


@pytest.mark.parametrize(("method", "degree"), [("mpa_lya", 10), ("mtp_lya", 200)])
@pytest.mark.parametrize(
    "features",
    [
        simplex,
        *(pytest.param(x, marks=pytest.mark.slow) for x in (lambda: full_rank(1, 30), lambda: repeated(1))),
    ],
)
def test_of_high_degree_both_are_exact(method: str, degree: int, features: object) -> None:
    """This includes fewer positions than channels, where the usual quotient is off by 30 %."""
    x = features()
    expected = [upper(root) for root in root_of_covariance(x)]
    np.testing.assert_allclose(pooled(method, x, degree=degree), expected, atol=1e-6)
    check_gradient(method, x, degree=degree, backward_steps=16)


def test_pade_at_the_papers_size_is_near_the_root() -> None:
    """For d=256 on 14×14, keeping zeros at zero reduces the error from about 0.3 to a few hundredths."""
    x = torch.randn(1, 256, 196, generator=torch.Generator().manual_seed(0)).relu()
    exact = METHODS["mpn_cov"](256)(x)
    found = METHODS["mpa_lya"](256)(x)
    assert (found - exact).norm() / exact.norm() < 0.08
