"""Predictions from made-up logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from covpool.data.loader import Batch
from covpool.inference.forward import Forward
from covpool.processes import Processes
from covpool.training.metrics import Predictions, predict


def made_logits(n: int, classes: int, seed: int = 0, skill: float = 2.0) -> tuple[Tensor, Tensor]:
    """Return logits and labels; the classes have different sizes, and some are easier than others."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.arange(1, classes + 1).double()
    labels = torch.multinomial(sizes, n, replacement=True, generator=generator)
    logits = 2 * torch.randn(n, classes, generator=generator)
    ease = skill * (1 + labels % 3) / 2
    logits[torch.arange(n), labels] += ease
    return logits, labels


def predictions_of(logits: Tensor, labels: Tensor) -> Predictions:
    """Return predictions, made by the same code as for the logits of a network."""
    batch = Batch(logits, labels, torch.arange(len(labels)), ())
    alone = Processes(0, 1, torch.device("cpu"))
    found = predict(Forward(nn.Identity(), device=alone.device).run([batch]), alone)
    assert found is not None
    return found[0]
