"""Efficient Probing: many queries in the space of the features, each with its slice of channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from covpool.arguments import check_whole
from covpool.errors import UsageTypeError
from covpool.functional.attention import attended, attention, scores, slices
from covpool.functional.covariance import without_outliers
from covpool.functional.numerics import at_least_float32, autocast_off
from covpool.nn.pooling.attentive import QUERY_STD
from covpool.nn.pooling.method import Method


@dataclass(frozen=True)
class EfficientProbingOptions:
    """The queries, and the projection of the values.

    Attributes:
        queries: largest number of queries. The channels are divided among them; the last query may have
            fewer, and there are never more queries than channels.
        value: project the features before they are averaged.
        batchnorm: apply BatchNorm without learned scale and shift to the vector, as the paper does.
    """

    queries: int = 32
    value: bool = True
    batchnorm: bool = False

    def __post_init__(self) -> None:
        check_whole("queries", self.queries)
        for name in ("value", "batchnorm"):
            if not isinstance(given := getattr(self, name), bool):
                raise UsageTypeError(f"{name} must be true or false; got {given!r}")


class EfficientProbing(Method):
    r"""Efficient Probing: M learned queries attend to the features directly, d values.

    B. Psomas, D. Christopoulos, E. Baltzi, I. Kakogeorgiou, T. Aravanis, N. Komodakis, K. Karantzalos,
    Y. Avrithis, G. Tolias, "Attention, Please! Revisiting Attentive Probing Through the Lens of Efficiency",
    ICLR 2026. With queries :math:`q_1 \dots q_M` in the space of the features, a value projection V, and
    :math:`V_m` its d/M rows of query m,

    .. math::
        a_{mp} = \operatorname{softmax}_p \Big(\frac{q_m^T x_p}{\sqrt d}\Big), \qquad
        y = \Big[\sum_p a_{1p} V_1 x_p; \dots; \sum_p a_{Mp} V_M x_p\Big]

    With ``value=False`` the values are the features: :math:`V = I`. The features are averaged before the
    projection, so the cost is 2·M·d·n + d² products instead of M·d·n + d²·n.

    The paper has a BatchNorm before the linear layer; ``batchnorm=True`` adds it.
    """

    summary: ClassVar[str] = "many queries, each attending for its slice of channels (Efficient Probing)"
    order: ClassVar[int] = 1
    Options: ClassVar[type[EfficientProbingOptions]] = EfficientProbingOptions
    options: EfficientProbingOptions

    def __init__(self, channels: int, **options: Any) -> None:
        super().__init__(channels, **options)
        queries, self.each = slices(channels, self.options.queries)
        self.query = nn.Parameter(torch.empty(queries, channels))
        self.value = nn.Linear(channels, channels, bias=False) if self.options.value else None
        self.norm = nn.BatchNorm1d(channels, eps=1e-6, affine=False) if self.options.batchnorm else None
        nn.init.normal_(self.query, std=QUERY_STD)

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with optional weights ``(B, n)``."""
        x_BCn = without_outliers(at_least_float32(x), weights)
        query_MC = self.query.to(x_BCn.dtype) * self.channels**-0.5
        value_CC = None if self.value is None else self.value.weight.to(x_BCn.dtype)
        with autocast_off(x_BCn):
            attention_BMn = attention(scores(query_MC, x_BCn), weights)
            y_BC = attended(x_BCn, attention_BMn, value_CC, self.each)
        if self.norm is None:
            return y_BC
        # In a layer cast to half precision, BatchNorm needs its own dtype.
        normalized: Tensor = self.norm(y_BC.to(self.query.dtype))
        return normalized.to(y_BC.dtype)

    def reset_parameters(self) -> None:
        """Draw new queries and a new projection, and reset the BatchNorm."""
        nn.init.normal_(self.query, std=QUERY_STD)
        for module in (self.value, self.norm):
            if module is not None:
                module.reset_parameters()
