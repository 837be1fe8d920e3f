"""Compare every operator on a device with float64 on the CPU: ``pytest tests/device --device cuda``.

By default the tests run on the CPU, so that they keep working. On an accelerator they take minutes, and end
with a summary to paste into an issue.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from covpool import functional
from covpool.device import autocast, has_float64, timed
from covpool.nn import CovPool, methods

# Relative to the largest entry. TF32 is off in these tests.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 5e-2}
OPTIONS: dict[str, dict[str, Any]] = {"cbp": {"features": 20}, "moment_probing": {"width": 21, "heads": 3}}


def features() -> Tensor:
    """Return two images of 6 channels and 40 positions, with full rank and a moderate condition number."""
    generator = torch.Generator().manual_seed(0)
    mix = torch.eye(6) + 0.3 * torch.rand(6, 6, generator=generator)
    return (mix @ torch.randn(2, 6, 40, generator=generator)).double()


OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "covariance": functional.covariance,
    "covariance_merge": lambda x: functional.covariance_merge(
        [functional.moments(part) for part in x.split(15, dim=-1)]
    ).covariance(),
    "second_moment": functional.second_moment,
    "isqrt_cov, channels": lambda x: functional.isqrt_cov(x, side="channels"),
    "isqrt_cov, positions": lambda x: functional.isqrt_cov(x, side="positions"),
    "isqrt_cov, weights": lambda x: functional.isqrt_cov(x, weights=x[:, 0].detach() > -0.5),
    "matrix_sqrt": lambda x: functional.matrix_sqrt(functional.covariance(x)),
    "inverse_matrix_sqrt": lambda x: functional.inverse_matrix_sqrt(functional.covariance(x)),
    "matrix_power": lambda x: functional.matrix_power(functional.covariance(x)),
    "matrix_log": lambda x: functional.matrix_log(functional.covariance(x), eps=0.1),
    "polar_express_sqrt": lambda x: functional.polar_express_sqrt(functional.covariance(x)),
    "triu": lambda x: functional.triu_unvec(functional.triu_vec(functional.covariance(x))),
}


def value_and_gradient(operator: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.detach().requires_grad_()
    value = operator(leaf)
    upstream = torch.linspace(-1, 1, value.numel(), dtype=torch.float64).reshape(value.shape)
    (value * upstream.to(value)).sum().backward()
    assert leaf.grad is not None
    assert value.device.type == leaf.grad.device.type == x.device.type
    return value.detach().cpu().double(), leaf.grad.cpu().double()


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def dtypes(device: torch.device) -> list[torch.dtype]:
    return [dtype for dtype in (torch.float64, torch.float32) if dtype.itemsize < 8 or has_float64(device)]


def test_every_public_operator_is_here() -> None:
    tested = {name.partition(",")[0] for name in OPERATORS}
    values = {
        "Moments",
        "RootReport",
        "root_report",
        "StreamingCovariance",
        "moments",
        "triu_unvec",
        "triu_vec",
    }
    assert set(functional.__all__) - tested == values


@pytest.mark.parametrize("name", OPERATORS)
def test_value_and_gradient(name: str, device: torch.device, record: Callable[[str, str], None]) -> None:
    expected = value_and_gradient(OPERATORS[name], features())
    for dtype in dtypes(device):
        found = value_and_gradient(OPERATORS[name], features().to(dtype).to(device))
        errors = [error(*pair) for pair in zip(found, expected, strict=True)]
        record(f"{name}, {str(dtype)[6:]}", f"value {errors[0]:.0e}, gradient {errors[1]:.0e}")
        assert max(errors) < TOLERANCE[dtype]


@pytest.mark.parametrize("method", methods())
def test_every_method_of_the_layer(
    method: str, device: torch.device, record: Callable[[str, str], None]
) -> None:
    pool = CovPool(6, method, dim=None, **OPTIONS.get(method, {})).eval()
    x = features().float().reshape(2, 6, 5, 8)
    with torch.no_grad():
        expected = pool(x)
        found = pool.to(device)(x.to(device)).cpu()
    record(f"CovPool, {method}", f"value {error(found, expected):.0e}")
    assert error(found, expected) < 1e-3


def test_autocast(device: torch.device, record: Callable[[str, str], None]) -> None:
    """The products run in float32 or better, even under autocast."""
    pool = CovPool(6, dim=None).to(device)
    x = features().float().reshape(2, 6, 5, 8).to(device)
    with autocast(device, "bfloat16"):
        found = pool(x)
    record("autocast to bfloat16", f"value {error(found, pool(x)):.0e}")
    assert found.dtype == torch.float32
    assert error(found, pool(x)) < 1e-5


def test_compute_dtype(device: torch.device, record: Callable[[str, str], None]) -> None:
    x = features().float().to(device)
    found = functional.isqrt_cov(x, compute_dtype=torch.bfloat16)
    difference = error(found, functional.isqrt_cov(x))
    record("isqrt_cov in bfloat16", f"value {difference:.0e}")
    assert difference < TOLERANCE[torch.bfloat16]


def test_training_lowers_the_loss(device: torch.device) -> None:
    pool = CovPool(6, dim=4)
    model = nn.Sequential(pool, nn.Linear(pool.out_features, 2)).to(device)
    x, labels = features().float().reshape(2, 6, 5, 8).to(device), torch.tensor([0, 1], device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(5):
        loss = nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_time_and_memory(device: torch.device, record: Callable[[str, str], None]) -> None:
    """Run forward and backward passes, at the paper's size on an accelerator and small on the CPU."""
    images, channels, positions = (2, 32, 49) if device.type == "cpu" else (64, 256, 196)
    x = torch.randn(images, channels, positions, device=device, requires_grad=True)

    def step() -> None:
        functional.isqrt_cov(x).sum().backward()

    if device.type != "cpu":
        step()
        torch.accelerator.reset_peak_memory_stats()
    seconds = timed(step, 3, device.type) / 3
    line = f"{1e3 * seconds:.1f} ms for {images} images of {channels}×{positions}"
    if device.type != "cpu":
        peak = torch.accelerator.max_memory_allocated()
        line += f", {peak / 2**20:.0f} MiB at most"
        # The features, their gradient and the saved iterates of 5 steps need far less.
        assert peak < 40 * x.nbytes
    record("isqrt_cov, forward and backward", line)
    assert seconds > 0


def _rank(rank: int, kind: str, store: str) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    place = torch.device(kind) if kind == "cpu" else torch.device(kind, rank)
    backend = dist.get_default_backend_for_device(kind)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2)
    if kind != "cpu":
        torch.accelerator.set_device_index(rank)
    torch.manual_seed(0)
    pool = CovPool(6, dim=None, layout="channels_first")
    model = nn.Sequential(pool, nn.Linear(pool.out_features, 2)).to(place)
    x, upstream = features().float(), torch.linspace(-1, 1, 4).reshape(2, 2)
    (model(x.to(place)) * upstream.to(place)).sum().div(2).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    parallel = DistributedDataParallel(model)
    (parallel(x[rank : rank + 1].to(place)) * upstream[rank : rank + 1].to(place)).sum().backward()
    for parameter, of_all in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert error(parameter.grad.cpu(), of_all.cpu()) < 1e-4
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_have_the_gradient_of_one(device: torch.device, tmp_path: Path) -> None:
    if device.type != "cpu" and torch.accelerator.device_count() < 2:
        pytest.skip("needs two accelerators")
    mp.spawn(_rank, (device.type, str(tmp_path / "store")), nprocs=2)
