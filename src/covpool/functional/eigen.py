r"""Functions of positive semi-definite matrices through their eigenvalues, by ``torch.linalg.eigh``.

With :math:`A = U \Lambda U^T`, value and gradient of :math:`f(A) = U f(\Lambda) U^T` are

.. math::
    f(A), \qquad
    \frac{\partial l}{\partial A} = U \Big(K \circ U^T \tfrac{G + G^T}{2} U\Big) U^T, \qquad
    K_{ij} = \frac{f(\lambda_i) - f(\lambda_j)}{\lambda_i - \lambda_j}, \quad K_{ii} = f'(\lambda_i)

(Daleckii and Krein). torch's own gradient goes through that of the eigenvectors, which divides by
:math:`\lambda_i - \lambda_j` and is infinite where two eigenvalues are equal; the divided differences of
f are not, and each is computed here without a difference of equal numbers.

Zero eigenvalues: those within the rounding of the decomposition, :math:`(8 + \sqrt m) \epsilon
\lambda_{max}`, count as zero. Where both λ are zero, :math:`K_{ij}` is zero. For a root, whose derivative
there is infinite, this is right for features: with :math:`A = M M^T`, nothing moves :math:`U_0^T A U_0` to
first order, since :math:`U_0^T M = 0`. So the gradient of the features is that of the function as long as
their rank is kept.

Shapes: matrices ``(B, m, m)``, eigenvalues ``(B, m)``. Cost: the decomposition, one product forward and four
backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from covpool.arguments import check_positive
from covpool.device import NO_EIGH
from covpool.functional.numerics import at_least_float32, autocast_off, check_square, once_differentiable


def matrix_power(a: Tensor, power: float = 0.5) -> Tensor:
    r"""The power of positive semi-definite matrices, :math:`U \Lambda^\alpha U^T`.

    A function of symmetric matrices: its gradient is symmetric. It can be differentiated once.

    Args:
        a: ``(..., m, m)``, positive semi-definite. Zero eigenvalues stay zero.
        power: α > 0; ½ is the square root.

    Returns:
        ``(..., m, m)``, in float32 for half-precision input.

    Example:
        >>> matrix_power(torch.diag(torch.tensor([4.0, 0.0])), 0.5)
        tensor([[2., 0.],
                [0., 0.]])
    """
    check_positive("power", power)
    return function_of_matrix(a, Power(power))


def matrix_log(a: Tensor, *, eps: float) -> Tensor:
    r"""The logarithm of a positive semi-definite matrix plus εI, :math:`U \log(\Lambda + \epsilon) U^T`.

    Args:
        a: ``(..., m, m)``, positive semi-definite. Zero eigenvalues become log ε.
        eps: ε > 0.

    Example:
        >>> matrix_log(torch.zeros(2, 2), eps=1.0)
        tensor([[0., 0.],
                [0., 0.]])
    """
    check_positive("eps", eps)
    return function_of_matrix(a, LogOfShifted(eps))


class Spectrum(NamedTuple):
    """Eigenvalues ``(B, m)``, ascending, and the eigenvectors in the columns of ``(B, m, m)``."""

    values: Tensor
    vectors: Tensor

    def assemble(self, values: Tensor) -> Tensor:
        """The matrix of these eigenvectors with other eigenvalues."""
        return torch.bmm(self.vectors * values.unsqueeze(-2), self.vectors.mT)

    def hadamard(self, coefficients: Tensor, grad: Tensor) -> Tensor:
        """``U (K ∘ UᵀGU) Uᵀ`` of a symmetric G."""
        turned = torch.bmm(torch.bmm(self.vectors.mT, grad), self.vectors)
        return torch.bmm(torch.bmm(self.vectors, coefficients * turned), self.vectors.mT)


def spectrum(a: Tensor, cut: bool = True) -> Spectrum:
    """Decompose positive semi-definite matrices, and set eigenvalues to zero that are rounding errors.

    Without ``cut``, only negative eigenvalues are set to zero, for functions that are smooth at zero.

    LAPACK raises for the whole batch if one matrix holds NaN or Inf: here such a matrix gets NaN eigenvalues,
    and the others are unaffected. LAPACK may also return NaN if products of tiny entries underflow; entries
    far below the rounding error of the others are set to zero.
    """
    size = a.abs()
    largest = size.amax((-2, -1), keepdim=True)
    sound = largest < torch.inf  # false for NaN, which amax hands on
    negligible = size <= torch.finfo(a.dtype).eps ** 2 * largest
    values, vectors = _eigh(a.masked_fill(negligible | ~sound, 0.0))
    sound = sound.squeeze(-1)
    tolerance = rank_tolerance(a) * values[:, -1:] if cut else 0.0
    values = values.masked_fill(values <= tolerance, 0.0)
    return Spectrum(values.masked_fill(~sound, torch.nan), vectors)


def _eigh(a: Tensor) -> tuple[Tensor, Tensor]:
    """In a long training LAPACK may fail to converge on a sound matrix; in float64 it then does converge.

    Devices without this decomposition use that of the CPU.
    """
    if a.device.type in NO_EIGH:
        values, vectors = _eigh(a.cpu())
        return values.to(a.device), vectors.to(a.device)
    try:
        values, vectors = torch.linalg.eigh(a)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # documented, not in its stubs
        values, vectors = (part.to(a.dtype) for part in torch.linalg.eigh(a.double()))
    return values, vectors


def rank_tolerance(a: Tensor) -> float:
    """Below this part of the largest, an eigenvalue is rounding.

    Zeros of covariances come out within four units of it, of 64 channels as of 1024. The usual bound of m
    units would take a fifth of the eigenvalues of 320 channels at 196 positions, spread evenly over the
    condition number that photographs have, in float32.
    """
    return float((8 + a.shape[-1] ** 0.5) * torch.finfo(a.dtype).eps)


class ScalarFunction:
    """A function of eigenvalues and its divided differences.

    ``smooth_at_zero`` says that it has a derivative there, so that an eigenvalue of rounding does no harm.
    """

    smooth_at_zero: ClassVar[bool] = False

    def value(self, eigenvalues: Tensor) -> Tensor:
        """``f(λ)``, ``(B, m)``."""
        raise NotImplementedError

    def divided_differences(self, eigenvalues: Tensor) -> Tensor:
        """``K``, ``(B, m, m)``, zero where both eigenvalues are zero and f has no derivative there."""
        raise NotImplementedError


@dataclass(frozen=True)
class Power(ScalarFunction):
    """``λ^α``, zero at zero."""

    power: float

    def value(self, eigenvalues: Tensor) -> Tensor:
        """Each to its power."""
        return eigenvalues.sqrt() if self.power == 0.5 else eigenvalues.pow(self.power)

    def divided_differences(self, eigenvalues: Tensor) -> Tensor:
        """By the larger of each pair: ``λ_i^(α−1) (1 − r^α)/(1 − r)`` with ``r = λ_j/λ_i``."""
        if self.power == 0.5:
            roots = eigenvalues.sqrt()
            return reciprocal_of_sums(roots)
        larger, gap = _pairs(eigenvalues)
        quotient = -torch.expm1(self.power * torch.log1p(-gap)) / gap
        quotient = torch.where(gap == 0, self.power, quotient)
        return torch.where(larger == 0, 0.0, larger.pow(self.power - 1) * quotient)


@dataclass(frozen=True)
class LogOfShifted(ScalarFunction):
    """``log(λ + ε)``."""

    eps: float
    smooth_at_zero: ClassVar[bool] = True

    def value(self, eigenvalues: Tensor) -> Tensor:
        """Of each."""
        return (eigenvalues + self.eps).log()

    def divided_differences(self, eigenvalues: Tensor) -> Tensor:
        """By the larger of each pair: ``−log(1 − g)/(g λ_i)`` with ``g = 1 − λ_j/λ_i``."""
        shifted = eigenvalues + self.eps
        larger, gap = _pairs(shifted)
        logarithms = shifted.log()
        far = (logarithms.unsqueeze(-1) - logarithms.unsqueeze(-2)).abs()  # there g may round to 1
        difference = torch.where(gap < 0.5, -torch.log1p(-gap.clamp(max=0.5)), far)
        return torch.where(gap == 0, 1.0, difference / gap) / larger


def reciprocal_of_sums(roots: Tensor) -> Tensor:
    """``1/(s_i + s_j)``, and zero where both are zero: the divided differences of a root."""
    sums = roots.unsqueeze(-1) + roots.unsqueeze(-2)
    return sums.masked_fill(sums == 0, torch.inf).reciprocal()


def _pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the larger of each pair, and ``1 − smaller/larger``, which is exact for close values."""
    rows, columns = values.unsqueeze(-1), values.unsqueeze(-2)
    larger = torch.maximum(rows, columns)
    return larger, (rows - columns).abs() / torch.where(larger == 0, 1.0, larger)


def function_of_matrix(a: Tensor, function: ScalarFunction) -> Tensor:
    """``f(A)`` of positive semi-definite ``(..., m, m)``."""
    check_square("a", a)
    with autocast_off(a):
        a_Bmm = at_least_float32(a).reshape(-1, *a.shape[-2:])
        # What ties the gradient to A, to refuse a second one, without keeping A in memory.
        anchor = a_Bmm[:, 0, 0].clone()
        value_Bmm: Tensor = _FunctionOfMatrix.apply(  # type: ignore[no-untyped-call]
            a_Bmm, anchor, function
        )[0]
        return value_Bmm.reshape(a.shape)


class _FunctionOfMatrix(Function):
    """The spectrum rides along as an output that carries no gradient, so that it can be saved."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, anchor: Tensor, function: ScalarFunction) -> tuple[Tensor, Tensor, Tensor]:
        with autocast_off(a):
            of_a = spectrum(a, cut=not function.smooth_at_zero)
            return of_a.assemble(function.value(of_a.values)), *of_a

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, Tensor, ScalarFunction], output: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        _, anchor, ctx.function = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(anchor, *output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        anchor, *saved = ctx.saved_tensors
        of_a, grad = Spectrum(*saved), grads[0]
        if grad is None:
            return None, None, None
        with autocast_off(grad):
            coefficients = ctx.function.divided_differences(of_a.values)
            gradient = of_a.hadamard(coefficients, (grad + grad.mT) * 0.5)
        return once_differentiable(gradient, anchor, grad), None, None
