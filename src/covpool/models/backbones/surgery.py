"""Changes to a network whose code is not ours."""

from __future__ import annotations

from collections.abc import Container, Iterable

import torch
from torch import Tensor, nn


def leave_out(network: nn.Module, names: Iterable[str]) -> None:
    """Put the identity in the place of each named module.

    In the place of a sequence it is an empty one: timm's checkpointing goes through the layers of each.
    """
    for name in names:
        parent, _, child = name.rpartition(".")
        is_sequence = isinstance(network.get_submodule(name), nn.Sequential)
        setattr(network.get_submodule(parent), child, nn.Sequential() if is_sequence else nn.Identity())


def unused_parts(network: nn.Module, used: Container[int]) -> list[str]:
    """The outermost modules of ``network`` that have parameters, but none with a part in its features.

    What timm keeps for its own pooling (a norm after it, hidden layers, attention pooling) would stay
    behind as weights that never receive a gradient, and DistributedDataParallel waits for every gradient.

    Args:
        network: the network.
        used: the ids of the parameters that have, see :func:`parameters_behind`.
    """
    modules: list[str] = []
    for name, module in network.named_modules():
        inside_one = any(name.startswith(f"{outer}.") for outer in modules)
        parameters = list(module.parameters())
        if name and not inside_one and parameters and not any(id(p) in used for p in parameters):
            modules.append(name)
    return modules


def norm_before_pooling(network: nn.Module) -> None:
    """Put the LayerNorm that some transformers have after their average (BEiT, EVA) before it.

    Its weights fit there, and a covariance wants features that are normalised as other transformers' are.
    """
    norm, after = getattr(network, "norm", None), getattr(network, "fc_norm", None)
    if isinstance(norm, nn.Identity) and after is not None and any(True for _ in after.parameters()):
        network.norm, network.fc_norm = after, nn.Identity()


def parameters_behind(result: Tensor) -> set[int]:
    """The ids of the leaves from which autograd would reach ``result`` (no gradient is computed)."""
    leaves: set[int] = set()
    seen: set[torch.autograd.graph.Node] = set()
    waiting = [result.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        waiting.extend(following for following, _ in node.next_functions)
    return leaves
