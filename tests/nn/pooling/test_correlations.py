"""Correlation pooling and iSICE, against their equations in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from covpool.nn.pooling import METHODS
from tests.nn.pooling.inputs import SPECTRA, C, full_rank, rank_deficient
from tests.nn.pooling.oracle import Array, check_gradient, covariance, pooled, upper

spectra = pytest.mark.parametrize("spectrum", SPECTRA)


def root(matrix: Array) -> Array:
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.sqrt(values.clip(min=0))) @ vectors.T


class TestCorrelation:
    @spectra
    def test_is_the_root_of_the_correlation(self, spectrum: str) -> None:
        x = SPECTRA[spectrum]()
        expected = [upper(root(np.corrcoef(image))) for image in x.numpy()]
        found = pooled("correlation", x, iteration="paper", steps=25, eps=1e-14)
        np.testing.assert_allclose(found, expected, atol=1e-6)

    def test_eps_is_relative_to_the_mean_variance(self) -> None:
        x, eps = full_rank(), 0.3
        expected = []
        for sigma in covariance(x):
            variance = sigma.diagonal() + eps * sigma.trace() / C
            expected.append(upper(root(sigma / np.sqrt(np.outer(variance, variance)))))
        found = pooled("correlation", x, iteration="paper", steps=25, eps=eps)
        np.testing.assert_allclose(found, expected, atol=1e-9)

    def test_the_scale_of_a_channel_does_not_matter(self) -> None:
        x, scale = full_rank(), torch.logspace(-2, 2, C, dtype=torch.float64)[:, None]
        options = {"eps": 1e-18}
        np.testing.assert_allclose(
            pooled("correlation", x * scale, **options), pooled("correlation", x, **options), atol=1e-6
        )

    def test_a_constant_channel_is_zero(self) -> None:
        """Positions of weight zero do not count, even where the channel is not constant there."""
        x, weights = full_rank().float(), torch.ones(2, 12)
        x[:, 2, :9], weights[:, 9:] = 7.7, 0.0
        for chosen in (weights, weights.bool()):
            vector = METHODS["correlation"](C)(x, chosen)
            others = METHODS["correlation"](C - 1)(x[:, [0, 1, 3, 4, 5], :9])
            rows, columns = np.triu_indices(C)
            live = torch.from_numpy((rows != 2) & (columns != 2))
            # The mean variance, to which eps is relative, has one channel less.
            torch.testing.assert_close(vector[:, live], others, atol=1e-4, rtol=1e-3)
            assert vector[:, ~live].abs().max() < 0.05

    @spectra
    def test_gradient(self, spectrum: str) -> None:
        check_gradient("correlation", SPECTRA[spectrum](), eps=0.1)


class TestIsice:
    @staticmethod
    def inverse(matrix: Array) -> Array:
        """Return the square of Z after 7 steps of Eqn. (2)."""
        y, z, eye = matrix / matrix.trace(), np.eye(C), np.eye(C)
        for _ in range(7):
            y, z = y @ (3 * eye - z @ y) / 2, (3 * eye - z @ y) @ z / 2
        return z @ z / matrix.trace()

    @pytest.mark.parametrize("steps", [1, 2, 5])
    @pytest.mark.parametrize("features", [full_rank, rank_deficient])
    def test_is_the_descent_of_the_paper(self, steps: int, features: object) -> None:
        x, lr, sparsity = features(), 0.7, 0.05  # type: ignore[operator]
        expected = []
        for sigma in covariance(x):
            a = sigma / sigma.trace()
            s = self.inverse(a)
            for i in range(steps):
                size = lr * (1 - i / max(steps - 1, 1)) if steps > 1 else 0.0
                slope = a - self.inverse(s)
                plus, minus = np.maximum(s, 0), np.maximum(-s, 0)
                plus = np.maximum(plus - size * (slope + sparsity), 0)
                minus = np.maximum(minus - size * (-slope + sparsity), 0)
                s = plus - minus
            expected.append(upper(s))
        found = pooled("isice", x, steps=steps, lr=lr, sparsity=sparsity)
        np.testing.assert_allclose(found, expected, atol=1e-9)

    def test_more_sparsity_gives_more_zeros(self) -> None:
        x = full_rank()
        zeros = [(pooled("isice", x, sparsity=sparsity) == 0).mean() for sparsity in (0.0, 0.1, 1.0)]
        assert zeros[0] < zeros[1] < zeros[2]

    def test_without_sparsity_it_is_near_the_inverse(self) -> None:
        x = full_rank(positions=40)
        expected = [upper(np.linalg.inv(sigma / sigma.trace())) for sigma in covariance(x)]
        np.testing.assert_allclose(pooled("isice", x, sparsity=0.0, lr=0.1), expected, rtol=0.02, atol=0.2)

    @spectra
    def test_gradient(self, spectrum: str) -> None:
        check_gradient("isice", SPECTRA[spectrum]())
