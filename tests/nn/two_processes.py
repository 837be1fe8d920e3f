"""The code of two gloo processes: a few training steps under DDP or FSDP2.

Everything is in float64, so that one process on the whole batch and two processes on its halves agree to
rounding.
"""

from __future__ import annotations

import datetime
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from covpool.nn import CovPool
from covpool.nn.pooling import METHODS

BATCH, STEPS, RATE = 6, 3, 0.1
METHOD_OPTIONS: dict[str, dict[str, Any]] = {
    "cbp": {"features": 20},
    "moment_probing": {"width": 21, "heads": 3},
}
# Input shape per image, input channels, options of the layer. BatchNorm is in eval mode, because its training
# statistics are per process, not over the whole batch.
CASES = {
    "map": ((7, 4, 5), 7, {"dim": 4}),
    "map without reduction": ((7, 2, 2), 7, {"dim": None, "backward": "recompute"}),
    "tokens, reduction auto": ((9, 7), 7, {"dim": 4, "layout": "channels_last"}),
    "tokens, reduction linear": ((9, 7), 7, {"dim": 4, "reduction": "linear", "side": "positions"}),
}
# Every method.
CASES |= {
    name: ((7, 4, 5), 7, {"pool": name, "dim": 4, **METHOD_OPTIONS.get(name, {})})
    for name in METHODS
    if name != "isqrt_cov"
}
WRAPPERS = ("ddp", "fsdp2")


def make_model(case: str) -> nn.Module:
    _, channels, options = CASES[case]
    torch.manual_seed(1)
    pool = CovPool(channels, **options)
    model = nn.Sequential(pool, nn.Linear(pool.out_features, 3)).double()
    if pool.reduction is not None and pool.reduction.norm is not None:
        pool.reduction.norm.eval()
    return model


def make_batches(case: str) -> list[tuple[Tensor, Tensor]]:
    shape, _, _ = CASES[case]
    generator = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(BATCH, *shape, generator=generator, dtype=torch.float64),
            torch.randint(3, (BATCH,), generator=generator),
        )
        for _ in range(STEPS)
    ]


def train(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Return the gradients of the first step and the parameters after the last, as full tensors."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    result = {}
    for step, (x, target) in enumerate(batches):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), target).backward()
        if step == 0:
            result = {f"{name}.grad": _whole(p.grad) for name, p in model.named_parameters()}
        optimizer.step()
    return result | {name: _whole(p) for name, p in model.named_parameters()}


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def run(rank: int, folder: str) -> None:
    """Train every case under every wrapper. Rank 0 saves the results in ``folder``."""
    torch.set_num_threads(1)
    # FSDP2 warns that some layers return a view, and the tests turn warnings into errors.
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=120),
    )
    results = {}
    for wrapper in WRAPPERS:
        for case in CASES:
            model = make_model(case)
            if wrapper == "ddp":
                model = DistributedDataParallel(model)
            else:
                mesh = init_device_mesh("cpu", (2,))
                fully_shard(model[0], mesh=mesh)
                fully_shard(model, mesh=mesh)
            halves = [(x.chunk(2)[rank], target.chunk(2)[rank]) for x, target in make_batches(case)]
            got = train(model, halves)
            results[wrapper, case] = {name.removeprefix("module."): value for name, value in got.items()}
    if rank == 0:
        torch.save(results, Path(folder) / "results.pt")
    dist.destroy_process_group()
