"""Solutions from sums, compared with scikit-learn and with fits that leave images out one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge

from covpool.closed_form.solve import Kind, Solution, logistic, ridge, solve, temperature
from covpool.closed_form.strength import STEP
from covpool.closed_form.sums import Rows, Sums
from covpool.errors import UsageError


def made_sums(images: int, width: int, *, exact: bool = True, noise: float = 1.0) -> Sums:
    """Return vectors of four classes whose means differ."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (images,), generator=generator)
    means = torch.randn(4, width, generator=generator)
    vectors = 5 + means[labels] + noise * torch.randn(images, width, generator=generator)
    numbers = torch.randint(2**62, (images,), generator=generator)
    sums = Sums("made", "wxyz", width, max_rows_bytes=1 << 30 if exact else 0)
    sums.add(Rows(vectors, labels, numbers))
    return sums


def arrays(sums: Sums) -> tuple[np.ndarray, np.ndarray]:
    """Return vectors and one-hot labels."""
    x, y = sums.rows.vectors.double(), torch.nn.functional.one_hot(sums.rows.labels, 4).double()
    return x.numpy(), y.numpy()


def oracle(x: np.ndarray, y: np.ndarray, strength: float) -> Ridge:
    """Fit scikit-learn's ridge regression with the penalty that ``strength`` stands for."""
    penalty = strength * float(((x - x.mean(0)) ** 2).sum(1).mean())
    return Ridge(alpha=penalty, solver="cholesky").fit(x, y)


SIZES = [(60, 200), (300, 30)]


@pytest.mark.parametrize(("images", "width"), SIZES)
def test_ridge_is_scikit_learns(images: int, width: int) -> None:
    sums = made_sums(images, width)
    found = ridge(sums)
    x, y = arrays(sums)
    expected = oracle(x, y, found.strength)
    np.testing.assert_allclose(found.weight.numpy(), expected.coef_, atol=1e-9)
    np.testing.assert_allclose(found.bias.numpy(), expected.intercept_, atol=1e-9)


def left_out_scores(sums: Sums, group: np.ndarray, penalty: float) -> np.ndarray:
    """Fit once per group, without it. The penalty is that of all images."""
    x, y = arrays(sums)
    scores = np.empty_like(y)
    for one in np.unique(group):
        kept = group != one
        scores[~kept] = Ridge(alpha=penalty, solver="cholesky").fit(x[kept], y[kept]).predict(x[~kept])
    return scores


def test_the_strength_has_the_smallest_leave_one_out_error() -> None:
    sums = made_sums(60, 200, noise=3.0)
    found = ridge(sums)
    x, y = arrays(sums)
    scale = float(((x - x.mean(0)) ** 2).sum(1).mean())

    def error(strength: float) -> float:
        scores = left_out_scores(sums, np.arange(60), strength * scale)
        return float(((scores - y) ** 2).sum())

    errors = [error(found.strength * factor) for factor in (1 / STEP, 1, STEP)]
    assert errors[1] == min(errors)


def test_held_out_scores_are_those_of_fits_without_the_fold() -> None:
    sums = made_sums(60, 200)
    found = ridge(sums)
    x, _ = arrays(sums)
    penalty = found.strength * float(((x - x.mean(0)) ** 2).sum(1).mean())
    expected = left_out_scores(sums, sums.rows.folds.numpy(), penalty)
    np.testing.assert_allclose(found.held_out.numpy(), expected, atol=1e-9)


def test_sums_alone_give_the_solution_of_the_rows() -> None:
    rows, parts = ridge(made_sums(2000, 30)), ridge(made_sums(2000, 30, exact=False))
    assert rows.strength == parts.strength
    torch.testing.assert_close(parts.weight, rows.weight, atol=1e-10, rtol=0)
    torch.testing.assert_close(parts.bias, rows.bias, atol=1e-10, rtol=0)
    # Without rows, only images of the first fold are held out; their scores are the same.
    same = torch.isin(rows.images, parts.images)
    torch.testing.assert_close(parts.held_out, rows.held_out[same], atol=1e-10, rtol=0)
    assert bool((parts.images % 5 == 0).all())


@pytest.mark.parametrize(("images", "width"), SIZES)
def test_logistic_regression_is_scikit_learns(images: int, width: int) -> None:
    sums = made_sums(images, width, noise=3.0)
    found = logistic(sums)
    x, y = arrays(sums)
    centered = x - x.mean(0)
    scale = float((centered**2).sum(1).mean()) ** 0.5
    expected = LogisticRegression(C=1 / found.strength, tol=1e-8, max_iter=5000).fit(
        centered / scale, y.argmax(1)
    )
    scores = torch.from_numpy(x) @ found.weight.T + found.bias
    scores = scores - scores.mean(1, keepdim=True)
    reference = expected.decision_function(centered / scale)
    assert np.abs(scores.numpy() - reference).max() < 0.03 * np.abs(reference).max()


def test_the_temperature_minimizes_the_loss() -> None:
    scores = torch.randn(500, 5, dtype=torch.float64)
    labels = torch.distributions.Categorical(logits=scores * 8).sample()
    assert temperature(scores, labels) == pytest.approx(8, rel=0.3)
    assert temperature(scores[:0], labels[:0]) == 1.0


def test_solve_returns_probabilities_and_prefers_ridge() -> None:
    sums = made_sums(200, 20, noise=4.0)
    found = solve(sums)
    assert found.kind == "ridge"
    assert temperature(found.held_out, found.labels) == 1.0
    assert solve(sums, kind="logistic").kind == "logistic"


@pytest.mark.parametrize("kind", ["ridge", "logistic"])
def test_balance_raises_the_recall_of_a_rare_class(kind: Kind) -> None:
    generator = torch.Generator().manual_seed(1)
    labels = (torch.rand(400, generator=generator) < 0.06).long()
    vectors = torch.randn(400, 10, generator=generator) + 0.8 * labels[:, None]
    sums = Sums("made", ("common", "rare"), 10)
    sums.add(Rows(vectors, labels, torch.arange(400)))

    def recall(found: Solution) -> float:
        scores = vectors.double() @ found.weight.T + found.bias
        return float((scores.argmax(1) == 1)[labels == 1].double().mean())

    assert recall(solve(sums, kind=kind, balance=True)) > recall(solve(sums, kind=kind)) + 0.2


def test_one_class_is_not_enough() -> None:
    sums = Sums("made", ("a", "b"), 3)
    sums.add(Rows(torch.randn(4, 3), torch.zeros(4, dtype=torch.int64), torch.arange(4)))
    with pytest.raises(UsageError, match="at least two classes"):
        solve(sums)


@pytest.mark.parametrize("images", [4, 40])
def test_equal_vectors_have_no_classifier(images: int) -> None:
    sums, tried = Sums("made", ("a", "b"), 3), []
    sums.add(Rows(torch.zeros(images, 3), torch.arange(images) % 2, torch.arange(images)))
    with pytest.raises(UsageError, match="the vectors of all images are equal"):
        solve(sums, progress=lambda done, total: tried.append(done))
    assert tried == [0]
