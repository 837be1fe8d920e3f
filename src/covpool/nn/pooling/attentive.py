"""The attentive probe: one learned query, cross-attention with several heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from covpool.arguments import check_whole
from covpool.functional.attention import attended, attention, by_query, scores, slices
from covpool.functional.covariance import without_outliers
from covpool.functional.numerics import at_least_float32, autocast_off
from covpool.nn.pooling.method import Method

# The start of a learned query: small, so that training starts near average pooling.
QUERY_STD = 0.02


@dataclass(frozen=True)
class AttentiveOptions:
    """The heads of the attention.

    Attributes:
        heads: number of attention heads. The channels are divided among them; the last may have fewer, and
            there are never more heads than channels.
    """

    heads: int = 8

    def __post_init__(self) -> None:
        check_whole("heads", self.heads)


class Attentive(Method):
    r"""The attentive probe: cross-attention of one learned query with the features, d values.

    A. El-Nouby, M. Klein, S. Zhai, M. A. Bautista, V. Shankar, A. Toshev, J. Susskind, A. Joulin, "Scalable
    Pre-training of Large Autoregressive Image Models", ICML 2024 (AIM). V-JEPA (A. Bardes et al., TMLR 2024)
    adds a residual block. With a query q, a key projection K and a value projection V, and
    :math:`q_h, K_h, V_h` their d/H rows of head h,

    .. math::
        a_{hp} = \operatorname{softmax}_p \Big(\frac{q_h^T K_h x_p}{\sqrt{d/H}}\Big), \qquad
        y = \Big[\sum_p a_{1p} V_1 x_p; \dots; \sum_p a_{Hp} V_H x_p\Big]

    The query times the key projection is one vector :math:`K_h^T q_h` per head, and the features are averaged
    before the value projection. So no position is projected: the result is that of the equations, the cost
    2·H·d·n + 2·d² products instead of 2·d²·n.

    There are no biases: a bias of the keys cancels in the softmax, and one of the values is a bias of the
    classifier. AIM's BatchNorm of the features is not included.
    """

    summary: ClassVar[str] = "one learned query with multi-head cross-attention (AIM, V-JEPA)"
    order: ClassVar[int] = 1
    Options: ClassVar[type[AttentiveOptions]] = AttentiveOptions
    options: AttentiveOptions

    def __init__(self, channels: int, **options: Any) -> None:
        super().__init__(channels, **options)
        self.query = nn.Parameter(torch.empty(channels))
        self.key = nn.Linear(channels, channels, bias=False)
        self.value = nn.Linear(channels, channels, bias=False)
        nn.init.normal_(self.query, std=QUERY_STD)

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with optional weights ``(B, n)``."""
        x_BCn = without_outliers(at_least_float32(x), weights)
        heads, each = slices(self.channels, self.options.heads)
        parameters = (self.query, self.key.weight, self.value.weight)
        query_C, key_CC, value_CC = (parameter.to(x_BCn.dtype) for parameter in parameters)
        with autocast_off(x_BCn):
            query_H1J = by_query(query_C, heads, each).unsqueeze(1)
            query_HC = torch.bmm(query_H1J, by_query(key_CC, heads, each)).squeeze(1) * each**-0.5
            attention_BHn = attention(scores(query_HC, x_BCn), weights)
            return attended(x_BCn, attention_BHn, value_CC, each)

    def reset_parameters(self) -> None:
        """Draw a new query and new projections."""
        nn.init.normal_(self.query, std=QUERY_STD)
        self.key.reset_parameters()
        self.value.reset_parameters()
