"""iSQRT-COV: the upper triangle of the square root of the covariance."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from covpool.functional.arguments import check_choice, check_steps
from covpool.functional.isqrt_cov import COMPUTE_DTYPES, SIDES, Side, isqrt_cov
from covpool.functional.matrix_sqrt import BACKWARDS, Backward
from covpool.functional.normalization import COMPENSATIONS, NORMALIZATIONS, Normalization
from covpool.functional.triu import triu_vec
from covpool.nn.pooling.method import Method


class IsqrtCov(Method):
    """Square root of the covariance by Newton-Schulz iteration, as a vector of d(d+1)/2 numbers.

    See :func:`covpool.functional.isqrt_cov`, whose options these are, but for one more compensation,
    the BN of the paper's Table 4:

    Args:
        channels: d.
        compensation: ``"matched"`` (the paper's), ``"none"``, or ``"batchnorm"``: none, and a BatchNorm
            on the vector in its place.
    """

    summary: ClassVar[str] = "matrix square root of the covariance by Newton-Schulz iteration (iSQRT-COV)"

    def __init__(
        self,
        channels: int,
        *,
        steps: int = 5,
        normalization: Normalization = "trace",
        compensation: Literal["matched", "none", "batchnorm"] = "matched",
        side: Side = "auto",
        backward: Backward = "saved",
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(channels)
        check_steps(steps)
        check_choice("normalization", normalization, NORMALIZATIONS)
        check_choice("compensation", compensation, (*COMPENSATIONS, "batchnorm"))
        check_choice("side", side, SIDES)
        check_choice("backward", backward, BACKWARDS)
        check_choice("compute_dtype", compute_dtype, COMPUTE_DTYPES)
        self.steps = steps
        self.normalization: Normalization = normalization
        self.compensation = compensation
        self.side: Side = side
        self.backward: Backward = backward
        self.compute_dtype = compute_dtype
        self.out_features = channels * (channels + 1) // 2
        self.norm = nn.BatchNorm1d(self.out_features) if compensation == "batchnorm" else None

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with weights ``(B, n)`` or none."""
        c_BCC = isqrt_cov(
            x,
            steps=self.steps,
            normalization=self.normalization,
            compensation="matched" if self.compensation == "matched" else "none",
            weights=weights,
            side=self.side,
            backward=self.backward,
            compute_dtype=self.compute_dtype,
        )
        v = triu_vec(c_BCC)
        if self.norm is None:
            return v
        # In a layer that was itself cast to half precision, BatchNorm wants its own dtype.
        normalized: Tensor = self.norm(v.to(self.norm.weight.dtype))
        return normalized.to(v.dtype)

    def reset_parameters(self) -> None:
        """BatchNorm as new, where there is one."""
        if self.norm is not None:
            self.norm.reset_parameters()

    def extra_repr(self) -> str:
        """Every option and the size of the result."""
        told = [f"{name}={getattr(self, name)!r}" for name in self.options()]
        return ", ".join([*told, f"out_features={self.out_features}"])
