"""One call of ``isqrt_cov``, its float64 reference from the paper's equations, and the tolerances."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from covpool.functional import isqrt_cov
from tests.functional import paper
from tests.functional.samples import chosen

VALUE_TOLERANCE = 1e-4  # relative to the largest |C| of the image, against float64 on the same rounded input
GRADIENT_TOLERANCE = 1e-3
SIDES = ["channels", "positions"]
NORMALIZATIONS = ["trace", "frobenius"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@dataclass(frozen=True)
class Pooling:
    """The options of one call of ``isqrt_cov``."""

    steps: paper.Steps = 5
    normalization: str = "trace"
    compensation: str = "matched"
    side: str = "auto"
    backward: str = "saved"
    autocast: bool = False

    def value_and_gradients(
        self, x: Tensor, weights: Tensor | None, upstream: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Return C and the gradients with respect to the features and any floating-point weights."""
        leaves = [x.detach().clone().requires_grad_()]
        if weights is not None and weights.is_floating_point():
            weights = weights.detach().clone().requires_grad_()
            leaves.append(weights)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            c = isqrt_cov(
                leaves[0],
                **chosen(self.steps),
                normalization=self.normalization,
                compensation=self.compensation,
                weights=weights,
                side=self.side,
                backward=self.backward,
            )
            grads = torch.autograd.grad(c, leaves, upstream.to(c.dtype))
        return c.detach(), list(grads)

    def reference(self, x: Tensor, weights: Tensor | None, upstream: Tensor) -> tuple[Tensor, Tensor]:
        """Return C and the gradient of the features by the paper's equations, in float64, per image."""
        compute_dtype = torch.promote_types(x.dtype, torch.float32)
        flat = paper.flat_channels(x.to(compute_dtype), weights, compute_dtype)
        values, grads = [], []
        for i in range(len(x)):
            c, grad = self._reference_of_image(
                x[i].double(), flat[i], None if weights is None else weights[i].double(), upstream[i].double()
            )
            values.append(c)
            grads.append(grad)
        return torch.stack(values), torch.stack(grads)

    def _reference_of_image(
        self, x: Tensor, flat: Tensor, weights: Tensor | None, upstream: Tensor
    ) -> tuple[Tensor, Tensor]:
        channels = x.shape[0]
        if flat.all():
            return torch.zeros(channels, channels).double(), torch.zeros_like(x)
        leaf = x.clone().requires_grad_()
        # Subtract the first position of each live channel: X Ī Xᵀ cancels, and the reference must not.
        live = (leaf - x[:, :1]).masked_fill(flat, 0.0)
        c = paper.isqrt_cov(live, self.steps, self.normalization, self.compensation, weights)
        (grad,) = torch.autograd.grad(c, leaf, upstream)
        return c.detach(), grad


def assert_near(actual: Tensor, expected: Tensor, tolerance: float, sizes: list[float] | None = None) -> None:
    """Check that each image is within ``tolerance`` times its size.

    The size is the largest expected entry of the image, unless ``sizes`` is given. A size of zero requires
    exact zeros.
    """
    if sizes is None:
        sizes = [reference.abs().max().item() for reference in expected]
    for image, reference, size in zip(actual.double(), expected, sizes, strict=True):
        error = (image - reference).abs().max().item()
        assert error <= tolerance * size, f"off by {error:.3g} where the size is {size:.3g}"


def gradient_sizes(x: Tensor, weights: Tensor | None, c: Tensor, grad: Tensor) -> list[float]:
    """Return the size of the terms that make up the gradient of each image. They may cancel in the sum.

    The terms are of size |C|/spread. For example, with one channel and no compensation, C does not depend on
    x, and the terms cancel to a gradient of zero. Only live channels count for the spread, because a flat
    channel contributes to no term. Three rounding units of 60000 would look like a much larger spread, and
    the test would require more digits than the terms have.
    """
    keep = torch.ones_like(x, dtype=torch.bool) if weights is None else (weights > 0)[:, None].expand_as(x)
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    flat = paper.flat_channels(x.to(compute_dtype), weights, compute_dtype)
    sizes = []
    for image, kept, silent, c_image, grad_image in zip(x.double(), keep, flat, c, grad, strict=True):
        seen = image[~silent[:, 0]][:, kept[0]]
        spread = (seen.amax(-1) - seen.amin(-1)).max().item() if seen.numel() else 0.0
        size = grad_image.abs().max().item()
        sizes.append(max(size, c_image.abs().max().item() / spread) if spread else size)
    return sizes


def assert_sound(pooling: Pooling, x: Tensor, weights: Tensor | None = None) -> None:
    """Check all guarantees for a finite input."""
    torch.manual_seed(1)
    upstream = torch.randn(x.shape[0], x.shape[1], x.shape[1])
    c, (grad, *of_weights) = pooling.value_and_gradients(x, weights, upstream)
    assert c.dtype == torch.promote_types(x.dtype, torch.float32)
    assert grad.dtype == x.dtype
    assert c.isfinite().all()
    assert all(grad.isfinite().all() for grad in of_weights)
    expected, expected_grad = pooling.reference(x, weights, upstream)
    assert_near(c, expected, VALUE_TOLERANCE)
    if x.dtype in (torch.float32, torch.float64):
        assert grad.isfinite().all()
        assert_near(
            grad, expected_grad, GRADIENT_TOLERANCE, gradient_sizes(x, weights, expected, expected_grad)
        )
    else:
        # The gradient is computed in float32 and converted to the input dtype. It may be infinite only where
        # it exceeds the range of that dtype.
        reachable = expected_grad.abs() < torch.finfo(x.dtype).max / 2
        assert grad[reachable].isfinite().all()
