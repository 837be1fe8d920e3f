"""CBP: bilinear pooling to a chosen number of features, by a random sketch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from covpool.arguments import check_choice, check_whole
from covpool.functional.covariance import normalized_weights, second_moment, without_outliers
from covpool.functional.numerics import (
    at_least_float32,
    autocast_off,
    in_units_of_largest,
    l2_normalized,
    signed_root,
)
from covpool.nn.pooling.method import Method

Projection = Literal["tensor_sketch", "random_maclaurin"]
PROJECTIONS = ("tensor_sketch", "random_maclaurin")


@dataclass(frozen=True)
class CbpOptions:
    """Which sketch.

    Attributes:
        projection: ``"tensor_sketch"``, the paper's better one, or ``"random_maclaurin"``.
        features: D, the length of the result.
        seed: of the random numbers of a new layer; one that is loaded has those it was saved with.
    """

    projection: Projection = "tensor_sketch"
    features: int = 8192
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("projection", self.projection, PROJECTIONS)
        check_whole("features", self.features)
        check_whole("seed", self.seed, at_least=0)


class Cbp(Method):
    r"""A sketch of the second moment, the signed root of its entries, and unit length: D numbers.

    Y. Gao, O. Beijbom, N. Zhang, T. Darrell, "Compact Bilinear Pooling", CVPR 2016. With
    :math:`P = \tfrac1n \sum_p x_p x_p^T`, random bins h and h' and signs s and s' of the channels, the
    tensor sketch is

    .. math::
        \varphi_j = \sum_{h_c + h'_{c'} \equiv j \;(\mathrm{mod}\; D)} s_c \, s'_{c'} \, P_{cc'}

    and the random Maclaurin sketch, with two D×d matrices of random signs,
    :math:`\varphi = D^{-1/2} \tfrac1n \sum_p W x_p \circ W' x_p`. For both, the inner product of two
    images' :math:`\varphi` has the mean :math:`\langle P, P'\rangle` over the random numbers and a variance
    of order 1/D. The result is :math:`\operatorname{sign}(\varphi) \sqrt{|\varphi|}` divided by its norm: as
    in B-CNN, no function of eigenvalues. It is the same for every scale of x, and zero where x is zero.

    Cost: the tensor sketch takes one product of d×n by n×d forward, two backward, and d² additions. The
    paper transforms every position's two count sketches by FFT and multiplies; the sum over positions is
    linear in P, and taken first it leaves nothing to transform. It needs no n×D numbers, and bins into which
    nothing falls are exactly zero: a root makes 1e-4 of an FFT's rounding of 1e-8, with a derivative of
    5e3. From some 2000 channels on FFTs would be faster: reduce them first. Random Maclaurin takes two
    products of D×d by d×n forward, two backward, and holds n×D numbers twice.

    The random numbers are buffers, saved with the state; ``reset_parameters`` leaves them.
    """

    summary: ClassVar[str] = "a random sketch of the second moment, as short as wanted (CBP)"
    Options: ClassVar[type[CbpOptions]] = CbpOptions
    options: CbpOptions
    bins: Tensor
    signs: Tensor

    def __init__(self, channels: int, **options: Any) -> None:
        super().__init__(channels, **options)
        features, generator = self.options.features, torch.Generator("cpu").manual_seed(self.options.seed)
        shape: tuple[int, ...] = (2, features, channels)
        if self.options.projection == "tensor_sketch":
            shape = (2, channels)
            self.register_buffer("bins", _drawn(features, shape, generator, torch.int64))
        self.register_buffer("signs", _drawn(2, shape, generator, torch.int8) * 2 - 1)

    @property
    def out_features(self) -> int:
        """As many as were asked for."""
        return self.options.features

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with optional weights ``(B, n)``."""
        x = at_least_float32(x)
        x = in_units_of_largest(without_outliers(x, weights))
        return l2_normalized(signed_root(self.sketch(x, weights)))

    def sketch(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the sketch φ of x ``(B, C, n)`` before the root; it approximates inner products of P."""
        if self.options.projection == "tensor_sketch":
            p_BCC = second_moment(x, weights=weights)
            return tensor_sketch(p_BCC, self.bins, self.signs, self.options.features)
        return random_maclaurin(x, weights, self.signs)


def tensor_sketch(p_BCC: Tensor, bins_2C: Tensor, signs_2C: Tensor, features: int) -> Tensor:
    """The entries of P, each with its sign in its bin, ``(B, features)``."""
    bins_CC = (bins_2C[0].unsqueeze(1) + bins_2C[1]) % features
    signs_CC = signs_2C[0].unsqueeze(1) * signs_2C[1]
    signed_BK = (p_BCC * signs_CC).flatten(1)
    sketch_BD = signed_BK.new_zeros(p_BCC.shape[0], features)
    return sketch_BD.scatter_add(1, bins_CC.flatten().expand_as(signed_BK), signed_BK)


def random_maclaurin(x_BCn: Tensor, weights_Bn: Tensor | None, signs_2DC: Tensor) -> Tensor:
    """Products of two random projections of every position, averaged: ``(B, D)``."""
    if weights_Bn is None:
        weighted_BCn = x_BCn / x_BCn.shape[-1]
    else:
        weighted_BCn = x_BCn * normalized_weights(weights_Bn, x_BCn.dtype).unsqueeze(1)
    signs_2DC = signs_2DC.to(x_BCn.dtype)
    with autocast_off(x_BCn):
        left_BDn = torch.matmul(signs_2DC[0], x_BCn)
        right_BDn = torch.matmul(signs_2DC[1], weighted_BCn)
        return (left_BDn * right_BDn).sum(-1) / math.sqrt(signs_2DC.shape[1])


def _drawn(high: int, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Whole numbers below ``high``, the same on every device; on the meta device their shape alone."""
    device = torch.get_default_device()
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype)
    return torch.randint(high, shape, generator=generator, dtype=dtype, device="cpu").to(device)
