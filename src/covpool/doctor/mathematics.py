"""The operator on a device: its value, its gradient, and how fast products are."""

from __future__ import annotations

import time
import warnings

import torch
from torch import Tensor

from covpool.functional import covariance, isqrt_cov

# Relative, of the value in float64 and in float32; eigh and the iteration agree to their rounding.
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-4}
# So many that the iteration has come to its end.
STEPS = 30
# Of the products that are timed, and how often: large enough that a GPU multiplies more than it waits.
SIDE, ROUNDS = {"cpu": 384, "cuda": 4096}, 5


def value(device: str) -> str:
    """``isqrt_cov`` is the square root that eigenvalues give."""
    x = _features().to(device)
    expected = _root_by_eigenvalues(covariance(x))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # TF32 is a choice, no fault
    try:
        errors = [_error(x, expected, dtype, limit) for dtype, limit in LIMITS.items()]
    finally:
        torch.set_float32_matmul_precision(before)
    return f"{errors[0]:.0e} from eigh in float64, {errors[1]:.0e} in float32"


def gradient(device: str) -> str:
    """Its gradient is that of finite differences."""
    x = _features()[:1, :3, :5].to(device).requires_grad_()
    torch.autograd.gradcheck(isqrt_cov, (x,))
    return "as finite differences have it"


def compiled(device: str) -> str:
    """torch.compile makes a kernel; it needs a C++ compiler, or a GPU's."""
    from torch._inductor import config

    x = torch.ones(8, device=device)
    made = torch.compile(lambda y: (y + 1).sqrt() * 2)
    # An earlier answer would hide that the compiler is gone; torch warns that it looks for none.
    with config.patch(force_disable_caches=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = made(x)
    if not torch.allclose(found, (x + 1).sqrt() * 2):
        raise ArithmeticError("what it compiles gives another result")
    return "it works"


def half_precision(device: str) -> str:
    """How long products take in bfloat16, beside float32."""
    ratio = _seconds(device, torch.bfloat16) / _seconds(device, torch.float32)
    advice = "--precision bfloat16 is worth trying" if ratio < 0.8 else "float32 is the one to take"
    return f"products in bfloat16 take {ratio:.2f} of the time of float32: {advice}"


def _error(x: Tensor, expected: Tensor, dtype: torch.dtype, limit: float) -> float:
    found = isqrt_cov(x.to(dtype), steps=STEPS).double()
    error = float((found - expected).norm() / expected.norm())
    if not error < limit:
        raise ArithmeticError(f"{error:.1e} from eigh in {str(dtype).removeprefix('torch.')}")
    return error


def _features() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 12, 49, dtype=torch.float64, generator=generator)


def _root_by_eigenvalues(a: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(a)
    root: Tensor = (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)) @ vectors.mT
    return root


def _seconds(device: str, dtype: torch.dtype) -> float:
    """Of a product, the least of several."""
    side = SIDE[device]
    a = torch.ones(8, side, side, dtype=dtype, device=device)
    taken = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        (a @ a).sum().item()  # which waits for a GPU
        taken.append(time.perf_counter() - began)
    return min(taken)
