"""AbMILP: attention of multiple instance learning, from a small network on each position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from covpool.arguments import check_whole
from covpool.errors import UsageTypeError
from covpool.functional.attention import attended, attention
from covpool.functional.covariance import without_outliers
from covpool.functional.numerics import at_least_float32, autocast_off
from covpool.nn.pooling.method import Method


@dataclass(frozen=True)
class AbmilpOptions:
    """The network that scores a position.

    Attributes:
        hidden: units of its hidden layer.
        gated: multiply the hidden units by a learned gate.
    """

    hidden: int = 128
    gated: bool = False

    def __post_init__(self) -> None:
        check_whole("hidden", self.hidden)
        if not isinstance(self.gated, bool):
            raise UsageTypeError(f"gated must be true or false; got {self.gated!r}")


class Abmilp(Method):
    r"""Attention-based pooling of multiple instance learning (AbMILP): d values.

    M. Ilse, J. Tomczak, M. Welling, "Attention-based Deep Multiple Instance Learning", ICML 2018. The scores
    are those of a network with one hidden layer, and the features themselves are averaged:

    .. math::
        a_p = \operatorname{softmax}_p \big(w^T \tanh(V x_p)\big), \qquad y = \sum_p a_p x_p

    With ``gated=True``, :math:`\tanh(V x_p) \odot \operatorname{sigm}(U x_p)` takes the place of the tanh.

    Cost: one product of hidden×d by d×n, two when gated.
    """

    summary: ClassVar[str] = "attention by a hidden layer on each position (AbMILP)"
    order: ClassVar[int] = 1
    Options: ClassVar[type[AbmilpOptions]] = AbmilpOptions
    options: AbmilpOptions

    def __init__(self, channels: int, **options: Any) -> None:
        super().__init__(channels, **options)
        hidden = self.options.hidden
        self.hidden = nn.Linear(channels, hidden, bias=False)
        self.gate = nn.Linear(channels, hidden, bias=False) if self.options.gated else None
        self.score = nn.Linear(hidden, 1, bias=False)

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with optional weights ``(B, n)``."""
        x_BCn = without_outliers(at_least_float32(x), weights)
        with autocast_off(x_BCn):
            units_Bhn = torch.matmul(self.hidden.weight.to(x_BCn.dtype), x_BCn).tanh()
            if self.gate is not None:
                units_Bhn = units_Bhn * torch.matmul(self.gate.weight.to(x_BCn.dtype), x_BCn).sigmoid()
            scores_B1n = torch.matmul(self.score.weight.to(x_BCn.dtype), units_Bhn)
            return attended(x_BCn, attention(scores_B1n, weights), None, self.channels)

    def reset_parameters(self) -> None:
        """Draw new weights."""
        for module in (self.hidden, self.gate, self.score):
            if module is not None:
                module.reset_parameters()
