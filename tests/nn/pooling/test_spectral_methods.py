"""Functions of the spectrum, the Gaussian embedding and the Cholesky factor, against scipy."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch

from covpool.nn.pooling import METHODS
from tests.nn.pooling.inputs import SPECTRA, C, full_rank, rank_deficient
from tests.nn.pooling.oracle import check_gradient, covariance, pooled, upper

spectra = pytest.mark.parametrize("spectrum", SPECTRA)


class TestDeepO2P:
    @pytest.mark.parametrize("eps", [1e-3, 0.5])
    @spectra
    def test_is_the_logarithm(self, spectrum: str, eps: float) -> None:
        x = SPECTRA[spectrum]()
        expected = [upper(scipy.linalg.logm(sigma + eps * np.eye(C))) for sigma in covariance(x)]
        np.testing.assert_allclose(pooled("deep_o2p", x, eps=eps), expected, atol=1e-10)

    @spectra
    def test_gradient(self, spectrum: str) -> None:
        check_gradient("deep_o2p", SPECTRA[spectrum](), eps=0.1)


class TestPowerTmlr:
    @pytest.mark.parametrize("power", [0.25, 0.5, 1.0])
    def test_is_the_tangent_vector(self, power: float) -> None:
        x = full_rank()
        powers = [scipy.linalg.fractional_matrix_power(sigma, power) for sigma in covariance(x)]
        expected = [upper((matrix - np.eye(C)) / power) for matrix in powers]
        np.testing.assert_allclose(pooled("power_tmlr", x, power=power), expected, atol=1e-11)

    def test_tends_to_the_logarithm(self) -> None:
        """The logarithm is the limit θ → 0 of the power-Euclidean metric."""
        x = full_rank()
        expected = [upper(scipy.linalg.logm(sigma)) for sigma in covariance(x)]
        np.testing.assert_allclose(pooled("power_tmlr", x, power=1e-7), expected, atol=1e-5)

    @spectra
    @pytest.mark.parametrize("power", [0.3, 0.5])
    def test_gradient(self, spectrum: str, power: float) -> None:
        check_gradient("power_tmlr", SPECTRA[spectrum](), power=power)


class TestG2DeNet:
    @staticmethod
    def embedded(image: np.ndarray, beta: float) -> np.ndarray:
        """Assemble the four blocks."""
        mean, sigma = image.mean(1, keepdims=True), np.cov(image, bias=True)
        return np.block([[sigma + beta**2 * mean @ mean.T, beta * mean], [beta * mean.T, np.ones((1, 1))]])

    @pytest.mark.parametrize("beta", [0.3, 1.0, 2.0])
    @pytest.mark.parametrize("root", ["svd", "newton_schulz"])
    def test_is_the_root_of_the_embedding(self, beta: float, root: str) -> None:
        x = full_rank()
        expected = [upper(scipy.linalg.sqrtm(self.embedded(image, beta))) for image in x.numpy()]
        found = pooled("g2denet", x, beta=beta, root=root, iteration="paper", steps=30)
        assert found.shape == (2, (C + 1) * (C + 2) // 2)
        np.testing.assert_allclose(found, expected, atol=1e-10)

    @spectra
    @pytest.mark.parametrize("root", ["svd", "newton_schulz"])
    def test_gradient(self, spectrum: str, root: str) -> None:
        check_gradient("g2denet", SPECTRA[spectrum](), root=root, beta=0.7)

    def test_tells_means_apart(self) -> None:
        """A method on the covariance alone cannot do this."""
        x = full_rank()
        moved = x + torch.linspace(-1, 1, C, dtype=x.dtype)[:, None]
        np.testing.assert_allclose(pooled("mpn_cov", moved), pooled("mpn_cov", x), atol=1e-12)
        assert np.abs(pooled("g2denet", moved) - pooled("g2denet", x)).max() > 0.1


class TestCholesky:
    @pytest.mark.parametrize("eps", [1e-6, 1e-2])
    @spectra
    def test_is_the_factor_with_a_logarithm(self, spectrum: str, eps: float) -> None:
        x = SPECTRA[spectrum]()
        expected = []
        for sigma in covariance(x):
            factor = np.linalg.cholesky(sigma + eps * np.eye(C))
            lower = np.tril(factor, -1)
            expected.append(upper(lower + lower.T + np.diag(2 * np.log(np.diag(factor)))))
        np.testing.assert_allclose(pooled("cholesky", x, eps=eps), expected, atol=1e-8)

    @spectra
    def test_gradient(self, spectrum: str) -> None:
        check_gradient("cholesky", SPECTRA[spectrum](), eps=0.05)

    def test_float32_where_a_factorisation_of_the_matrix_fails(self) -> None:
        """At this scale ε is far below the rounding of Σ, so pivots become negative."""
        x = rank_deficient(positions=3).float() * 1e3
        sigma = torch.stack([image.cov(correction=0) for image in x])
        _, failed = torch.linalg.cholesky_ex(sigma + 1e-6 * torch.eye(C))
        assert failed.any()
        found = METHODS["cholesky"](C)(x)
        assert found.isfinite().all()
        # The first pivot matches float64.
        exact = pooled("cholesky", x.double())
        np.testing.assert_allclose(found[:, 0], exact[:, 0], rtol=1e-5)


class TestPolarExpress:
    def test_is_the_root(self) -> None:
        x = full_rank()
        expected = [upper(scipy.linalg.sqrtm(sigma)) for sigma in covariance(x)]
        np.testing.assert_allclose(pooled("polar_express", x, steps=9), expected, atol=1e-10)

    @spectra
    def test_gradient(self, spectrum: str) -> None:
        check_gradient("polar_express", SPECTRA[spectrum]())


@pytest.mark.parametrize("power", [1e-4, 1e-6])
def test_a_small_power_keeps_its_digits_in_float32(power: float) -> None:
    """The tangent of the power tends to the logarithm. A difference of numbers near 1 would be noise."""
    x = full_rank()
    found = METHODS["power_tmlr"](C, power=power)(x.float()).numpy()
    np.testing.assert_allclose(found, pooled("power_tmlr", x, power=power), atol=1e-4)
