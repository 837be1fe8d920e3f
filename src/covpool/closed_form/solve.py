r"""Solve a linear classifier from sums: ridge regression in closed form, or logistic regression.

With centered vectors X and centered one-hot labels Y, ridge regression is

.. math::
    W = (X^T X + \lambda I)^{-1} X^T Y = X^T (X X^T + \lambda I)^{-1} Y

The bias restores the means. :math:`\lambda` is a multiple, the strength, of the mean squared norm of the
centered vectors. It is the one with the smallest squared error on images that the solution has not seen:

- With fewer images than columns, each image is left out in turn. With
  :math:`A = (X X^T + \lambda I)^{-1}` and B images, the errors of the images g that are left out together
  are exactly :math:`(\lambda A_{gg} - \tfrac1B 1 1^T)^{-1} (\lambda A Y)_g`.
- Otherwise a solution from the sums of four fifths of the images is measured on the sums of the last fifth.

Letters as in :mod:`covpool.closed_form.sums`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from covpool.closed_form.strength import Progress, best_strength, silent
from covpool.closed_form.sums import FOLDS, Part, Sums
from covpool.errors import UsageError
from covpool.processes import Processes

Kind = Literal["ridge", "logistic"]
# Images × columns × classes above which logistic regression is not tried.
MAX_LOGISTIC = 4e9
LOGISTIC_ITERATIONS = 100


@dataclass(frozen=True)
class Solution:
    """A linear classifier.

    Attributes:
        kind: how it was solved.
        strength: strength of the regularization. Ridge regression uses its product with the mean squared
            norm of the centered vectors. For logistic regression, it is the inverse of scikit-learn's ``C``
            for vectors of mean squared norm 1.
        weight: ``(K, p)`` in float64.
        bias: ``(K,)`` in float64.
        held_out: scores ``(B, K)`` of images that the solution of their fold has not seen: of all kept rows,
            or of the held-out images among them.
        labels: ``(B,)``, the classes of these images.
        images: ``(B,)``, their numbers.
    """

    kind: Kind
    strength: float
    weight: Tensor
    bias: Tensor
    held_out: Tensor
    labels: Tensor
    images: Tensor

    @property
    def accuracy(self) -> float:
        """The top-1 accuracy on held-out images."""
        return float((self.held_out.argmax(dim=1) == self.labels).double().mean())

    def scaled(self, factors: Tensor | float) -> Solution:
        """Return the classifier with its scores multiplied, by one factor or one per class."""
        rows = torch.as_tensor(factors, dtype=torch.float64)
        return dataclasses.replace(
            self,
            weight=self.weight * (rows[:, None] if rows.ndim else rows),
            bias=self.bias * rows,
            held_out=self.held_out * rows,
        )


def solve(
    sums: Sums, *, kind: Kind | None = None, balance: bool = False, progress: Progress = silent
) -> Solution:
    """Return the classifier of some sums, with scores whose softmax are probabilities.

    Args:
        sums: of the training images.
        kind: ``"ridge"`` or ``"logistic"``; ``None`` for ridge regression, unless logistic regression is
            significantly more accurate on held-out images. It is tried only if all vectors are kept and it
            is quick.
        balance: count every class alike, for unbalanced training images. The better solver is chosen before.
        progress: called with the number of strengths that were tried, and the largest number of trials.

    Raises:
        UsageError: if fewer than two classes have images, or all vectors are equal.
    """
    if int((sums.counts() > 0).sum()) < 2:
        raise UsageError("a classifier needs images of at least two classes")
    try:
        return _solved(sums, kind, balance, progress)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]  # not in its stubs
        raise UsageError(
            "no classifier can be solved: the vectors of all images are equal, so use larger images, or "
            "sums from a file are damaged"
        ) from error


def _solved(sums: Sums, kind: Kind | None, balance: bool, progress: Progress) -> Solution:
    solutions: list[Solution] = []
    if kind != "logistic":
        solutions.append(ridge(sums, progress))
    work = len(sums) * min(sums.width, len(sums)) * len(sums.classes)
    if kind == "logistic" or (kind is None and sums.is_exact and work <= MAX_LOGISTIC):
        solutions.append(logistic(sums, progress))
    best = solutions[-1] if len(solutions) == 1 or _is_better(*reversed(solutions)) else solutions[0]
    if balance:
        best = _balanced(best, sums.counts().double().clamp(min=1))
    return best.scaled(temperature(best.held_out, best.labels))


def _balanced(solution: Solution, counts: Tensor) -> Solution:
    """Return a classifier whose scores do not depend on how many images each class has.

    The scores of ridge regression are probabilities, which are divided by the share of the class. Those of
    logistic regression are logarithms of probabilities, from which its logarithm is subtracted.
    """
    factors = counts.mean() / counts
    if solution.kind == "ridge":
        return solution.scaled(factors)
    shift = factors.log()
    return dataclasses.replace(solution, bias=solution.bias + shift, held_out=solution.held_out + shift)


def _is_better(solution: Solution, rival: Solution) -> bool:
    """Return whether the difference in held-out accuracy is significant: above 2 standard errors."""
    right = [(each.held_out.argmax(dim=1) == each.labels).double() for each in (solution, rival)]
    difference = right[0] - right[1]
    return bool(difference.mean() > 2 * difference.std() / len(difference) ** 0.5)


def ridge(sums: Sums, progress: Progress = silent) -> Solution:
    """Return the solution of ridge regression."""
    if not sums.is_exact:
        return _ridge_of_parts(sums, progress)
    if len(sums) > sums.width:
        return _ridge_of_many_rows(sums, progress)
    return _ridge_of_few_rows(sums, progress)


# --- fewer images than columns: the dual, with exact leave-one-out


def _ridge_of_few_rows(sums: Sums, progress: Progress) -> Solution:
    rows = sums.rows
    x_Bp, y_BK = rows.vectors.double(), F.one_hot(rows.labels, len(sums.classes)).double()
    mean_p, mean_K = x_Bp.mean(dim=0), y_BK.mean(dim=0)
    x_Bp -= mean_p
    gram_BB = x_Bp @ x_Bp.T
    scale = float(gram_BB.diagonal().mean())
    images = torch.arange(len(rows))
    best: tuple[float, Tensor, Tensor] | None = None  # error, inverse and targets of the best strength so far

    def error(strength: float) -> float:
        nonlocal best
        inverse, targets = _dual(gram_BB, y_BK - mean_K, strength * scale)
        squares = float(_left_out_errors(inverse, targets, strength * scale, images).square().sum())
        if best is None or squares < best[0]:
            best = squares, inverse, targets
        return squares

    strength = best_strength(error, progress)
    assert best is not None
    _, inverse, targets = best
    held_out = y_BK - _left_out_errors(inverse, targets, strength * scale, rows.folds)
    weight_pK = x_Bp.T @ targets
    bias = mean_K - mean_p @ weight_pK
    return Solution("ridge", strength, weight_pK.T, bias, held_out, rows.labels, rows.images)


def _dual(gram_BB: Tensor, y_BK: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """Return ``(gram + penalty I)⁻¹``, and its product with y."""
    regularized = gram_BB.clone()
    regularized.diagonal().add_(penalty)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(regularized))
    return inverse, inverse @ y_BK


def _left_out_errors(inverse_BB: Tensor, targets_BK: Tensor, penalty: float, groups_B: Tensor) -> Tensor:
    """Return labels minus scores of every image, by solutions without its group; see the module."""
    share = 1 / len(inverse_BB)
    if len(groups_B.unique()) == len(groups_B):
        return penalty * targets_BK / (penalty * inverse_BB.diagonal() - share)[:, None]
    errors = torch.empty_like(targets_BK)
    for group in groups_B.unique():
        images = (groups_B == group).nonzero()[:, 0]
        block = penalty * inverse_BB[images[:, None], images] - share
        errors[images] = torch.linalg.solve(block, penalty * targets_BK[images])
    return errors


# --- more images than columns: the primal, from sums


def _ridge_of_many_rows(sums: Sums, progress: Progress) -> Solution:
    """Solve from the sums of each fold, so that every image is held out once."""
    rows, classes = sums.rows, len(sums.classes)
    folds = []
    for fold in range(FOLDS):
        folds.append(Part.zeros(classes, sums.width))
        folds[-1].add(rows[rows.folds == fold])
    total = sum(folds[1:], start=folds[0])
    rest = sum(folds[2:], start=folds[1])
    strength = best_strength(lambda s: _squared_error(_primal(rest, s), folds[0]), progress)
    held_out = torch.empty(len(rows), classes, dtype=torch.float64)
    for fold, part in enumerate(folds):
        left_out = rows.folds == fold
        weight_pK, bias = _primal(_difference(total, part), strength)
        held_out[left_out] = rows.vectors[left_out].double() @ weight_pK + bias
    weight_pK, bias = _primal(total, strength)
    return Solution("ridge", strength, weight_pK.T, bias, held_out, rows.labels, rows.images)


def _ridge_of_parts(sums: Sums, progress: Progress) -> Solution:
    train, held_out = sums.parts
    strength = best_strength(lambda s: _squared_error(_primal(train, s), held_out), progress)
    rows = sums.rows
    weight_pK, bias = _primal(train, strength)
    scores = rows.vectors.double() @ weight_pK + bias
    weight_pK, bias = _primal(train + held_out, strength)
    return Solution("ridge", strength, weight_pK.T, bias, scores, rows.labels, rows.images)


def _difference(total: Part, part: Part) -> Part:
    return Part(total.counts - part.counts, total.class_sums - part.class_sums, total.gram - part.gram)


class _Total(NamedTuple):
    """The number of images of all classes, and the sum of their vectors."""

    images: Tensor
    sum_p: Tensor

    @classmethod
    def of(cls, part: Part) -> _Total:
        return cls(part.counts.sum(), part.class_sums.sum(dim=0))

    def over(self, processes: Processes) -> _Total:
        return _Total(processes.sum_(self.images), processes.sum_(self.sum_p))

    def plus(self, more: _Total) -> _Total:
        return _Total(self.images + more.images, self.sum_p + more.sum_p)


def _primal(part: Part, strength: float, total: _Total | None = None) -> tuple[Tensor, Tensor]:
    """Return weight ``(p, K)`` and bias ``(K,)`` of ridge regression on the images of some sums."""
    count, sum_p = total or _Total.of(part)
    mean_p, mean_K = sum_p / count, part.counts / count
    gram_pp = part.full_gram().addr_(mean_p, mean_p, alpha=-float(count))
    penalty = strength * float(gram_pp.diagonal().sum() / count)
    gram_pp.diagonal().add_(penalty)
    targets_pK = part.class_sums.T - torch.outer(mean_p, part.counts)
    weight_pK = torch.cholesky_solve(targets_pK, torch.linalg.cholesky(gram_pp))
    return weight_pK, mean_K - mean_p @ weight_pK


def _squared_error(solution: tuple[Tensor, Tensor], part: Part, total: _Total | None = None) -> float:
    """Return Σ‖xW + b − y‖² over the images of some sums, from the sums alone."""
    weight_pK, bias = solution
    count, sum_p = total or _Total.of(part)
    squares = (weight_pK * (part.full_gram() @ weight_pK)).sum() + 2 * (sum_p @ weight_pK) @ bias
    products = (part.class_sums.T * weight_pK).sum() + part.counts @ bias
    return float(squares + count * bias.square().sum() - 2 * products + part.counts.sum())


def solve_divided(sums: Sums, processes: Processes) -> Solution:
    """Return the classifier of this process's classes, for more classes than fit into one process.

    Only Σxxᵀ, Σx and the number of images pass between processes. The class sums and the weights of a class
    stay in one process, so memory for them is divided by the number of processes.

    Args:
        sums: sums over the images of this process's classes. Every class is in one process. The function
            replaces their rows by sums, and their Σxxᵀ by that of all processes.
        processes: all processes; each calls this function.

    Returns:
        Ridge regression, without held-out scores and without a temperature.
    """
    sums.drop_rows()
    train, held_out = sums.parts
    totals = [_Total.of(part).over(processes) for part in (train, held_out)]
    for part in (train, held_out):
        processes.sum_(part.gram)

    def error(strength: float) -> float:
        squares = _squared_error(_primal(train, strength, totals[0]), held_out, totals[1])
        return float(processes.sum_(torch.tensor(squares, dtype=torch.float64)))

    strength = best_strength(error)
    weight_pK, bias = _primal(train + held_out, strength, totals[0].plus(totals[1]))
    none = torch.empty(0, dtype=torch.int64)
    return Solution("ridge", strength, weight_pK.T, bias, torch.empty(0, len(bias)), none, none)


# --- logistic regression


def logistic(sums: Sums, progress: Progress = silent) -> Solution:
    """Return the solution of logistic regression, from the kept vectors.

    The strength is chosen by the loss on the held-out fold.
    """
    if not sums.is_exact:
        raise UsageError("logistic regression needs the vectors of all images; there are only their sums")
    rows, classes = sums.rows, len(sums.classes)
    x_Bp = rows.vectors.double()
    mean_p = x_Bp.mean(dim=0)
    x_Bp -= mean_p
    scale = float(x_Bp.square().sum(dim=1).mean()) ** 0.5
    x_Bp /= scale
    basis_pr = None
    if len(x_Bp) < sums.width:  # as many coordinates as images are enough
        basis_pr = torch.linalg.qr(x_Bp.T)[0]
        x_Bp = x_Bp @ basis_pr
    x_Bp = x_Bp.float()
    held_out = torch.zeros(len(rows), classes, dtype=torch.float64)
    start = x_Bp.new_zeros(x_Bp.shape[1] + 1, classes)

    def left_out(strength: float, fold: int) -> float:
        nonlocal start
        some = rows.folds == fold
        start = _minimize(x_Bp[~some], rows.labels[~some], strength, start)
        scores = x_Bp[some] @ start[:-1] + start[-1]
        held_out[some] = scores.double()
        return float(F.cross_entropy(scores, rows.labels[some]))

    strength = best_strength(lambda s: left_out(s / 100, 0), progress) / 100
    for fold in range(FOLDS):
        left_out(strength, fold)
    solved = _minimize(x_Bp, rows.labels, strength, start).double()
    weight_pK = solved[:-1] if basis_pr is None else basis_pr @ solved[:-1]
    weight_pK = weight_pK / scale
    bias = solved[-1] - mean_p @ weight_pK
    return Solution("logistic", strength, weight_pK.T, bias, held_out, rows.labels, rows.images)


def _minimize(x_Bp: Tensor, labels: Tensor, strength: float, start: Tensor) -> Tensor:
    """Return weight and bias, ``(p + 1, K)``, by L-BFGS from ``start``."""
    solution = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [solution],
        max_iter=LOGISTIC_ITERATIONS,
        tolerance_grad=1e-6,
        tolerance_change=1e-9,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits = torch.addmm(solution[-1], x_Bp, solution[:-1])
        value = F.cross_entropy(logits, labels)
        value = value + strength / (2 * len(x_Bp)) * solution[:-1].square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return solution.detach()


def temperature(scores: Tensor, labels: Tensor) -> float:
    """Return the factor of the scores with the smallest cross-entropy: a search over powers of 2^¼."""
    if not len(labels):
        return 1.0
    factors = 2.0 ** torch.arange(-8, 16.5, 0.25)
    losses = [float(F.cross_entropy(scores * float(factor), labels)) for factor in factors]
    return float(factors[losses.index(min(losses))])
