r"""Compute exact evidence maps: how much each spatial position of an image adds to the logit of a class.

A pooled matrix that is a function of the covariance factors over positions, :math:`C = M K M^T`, with a
column of M for each position: :math:`f(\Sigma) = M\,g(M^TM)\,M^T` for centered features M. K weights each
pair of positions. With :math:`L = M K`,

.. math::  \langle W, C \rangle = \sum_p m_p^T W \, l_p ,

a sum over positions. L can be computed from either side of the features, n×n or C×C, as in
:mod:`covpool.functional.isqrt_cov`: :math:`M\,Z(M^TM) = Z(MM^T)\,M`.

Letters: B images, C channels, n positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from covpool.arguments import CLASS_TOKEN
from covpool.errors import UsageError
from covpool.functional.covariance import center, triu_unvec, triu_vec
from covpool.functional.eigen import spectrum
from covpool.functional.isqrt_cov import cheaper_side, positions_kernel
from covpool.functional.newton_schulz import newton_schulz
from covpool.functional.numerics import Compensation, norm_of, reciprocal_or_zero
from covpool.models.config import Head
from covpool.models.model import PooledClassifier
from covpool.nn.fusion import EachLayer
from covpool.nn.pooling.isqrt_cov import IsqrtCov
from covpool.nn.pooling.method import Cov, Gap, Method
from covpool.nn.pooling.spectral import MpnCov, post_normalized

Side = Literal["auto", "channels", "positions"]
EXACT = (Cov, IsqrtCov, MpnCov)


@dataclass(frozen=True, eq=False)
class Factors:
    """The factors of a batch.

    Attributes:
        m: M, ``(B, C, n)``.
        l: L = M K, ``(B, C, n)``.
        k: K, ``(B, n, n)``; ``None`` if L was computed from the channels.
    """

    m: Tensor
    l: Tensor  # noqa: E741
    k: Tensor | None

    def matrix(self) -> Tensor:
        """Return C, ``(B, C, C)``."""
        c = torch.bmm(self.l, self.m.mT)
        return (c + c.mT) / 2

    def positions(self, w: Tensor) -> Tensor:
        """Return the contribution of each position to ⟨W, C⟩, for symmetric W ``(C, C)``: ``(B, n)``."""
        return ((w @ self.m) * self.l).sum(1)

    def pairs(self, w: Tensor) -> Tensor:
        """Return the contribution of each pair, ``(B, n, n)``; its rows sum to :meth:`positions`."""
        if self.k is None:
            raise UsageError('pairs of positions need K: compute the factors with side="positions"')
        return torch.bmm(self.m.mT, w @ self.m) * self.k


def factors(method: Method, x: Tensor, side: Side = "auto") -> Factors:
    """Return the factors of a method in ``EXACT``.

    Args:
        method: the pooling method.
        x: its input, ``(B, C, n)``.
        side: ``"positions"`` with K, ``"channels"`` without K, ``"auto"`` for the cheaper one.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    m, s = center(x, None)
    if isinstance(method, IsqrtCov):
        return _iterated(m, s, method, side)
    if isinstance(method, Cov):
        variance = s * s
        return Factors(m, m * variance, variance * torch.eye(x.shape[2], dtype=x.dtype, device=x.device))
    assert isinstance(method, MpnCov)
    return _decomposed(m * s, method)


def _iterated(m: Tensor, s: Tensor, method: IsqrtCov, side: Side) -> Factors:
    options = method.options
    if side == "auto":
        side = cheaper_side(m.shape[1], m.shape[2], len(options.coefficients))
    compensation: Compensation = "matched" if options.compensation == "matched" else "none"
    if side == "positions":
        kernel = positions_kernel(m, s, options.coefficients, options.normalization, compensation)
        return Factors(m, torch.bmm(m, kernel), kernel)
    gram = torch.bmm(m, m.mT)
    t = norm_of(gram, options.normalization)
    inverse, _ = newton_schulz(gram * reciprocal_or_zero(t), options.coefficients, inverse=True)
    factor = (t.sqrt() * s if compensation == "matched" else torch.ones_like(t)) * reciprocal_or_zero(t)
    return Factors(m, torch.bmm(inverse, m) * factor, None)


def _decomposed(m: Tensor, method: MpnCov) -> Factors:
    """For a power α of the eigenvalues, K has those of MᵀM to the power α - 1, and keeps zeros."""
    decomposition = spectrum(torch.bmm(m.mT, m))
    zero = decomposition.values <= 0
    powers = decomposition.values.masked_fill(zero, 1.0).pow(method.options.power - 1).masked_fill(zero, 0.0)
    kernel = decomposition.assemble(powers)
    c = torch.bmm(torch.bmm(m, kernel), m.mT)
    scaled = post_normalized(c, method.options.post_normalization)
    ratio = (scaled * c).sum((1, 2), keepdim=True) * reciprocal_or_zero((c * c).sum((1, 2), keepdim=True))
    kernel = kernel * ratio
    return Factors(m, torch.bmm(m, kernel), kernel)


Kind = Literal["exact", "gradient"]


@dataclass(frozen=True, eq=False)
class Evidence:
    """The evidence for a class, by spatial position.

    The logit is ``positions.sum() + rest``, plus ``first_order.sum()`` if that is not ``None``. An exact map
    reaches it up to rounding. Of a gradient map, ``rest`` is what remains.

    Attributes:
        label: index of the class.
        logit: logit of the class.
        kind: ``"exact"``, or ``"gradient"``: gradient times features, for methods and heads whose logit is
            not a sum over positions.
        positions: ``(h, w)``, contribution of each position through the pooling.
        first_order: ``(h, w)``, contribution of each position through the average pooling that
            ``join="gap"`` adds; ``None`` without it.
        rest: the part of the logit that belongs to no position: the bias, and the logit of a class token
            (``join="cls"``).
        pairs: ``(n, n)``, contribution of each pair of positions, if requested and the map is exact.
        layers: ``(layers, h, w)``, contribution of each layer and position, if each layer is pooled by itself
            and the map is exact; they sum to ``positions``.
    """

    label: int
    logit: float
    kind: Kind
    positions: Tensor
    first_order: Tensor | None
    rest: float
    pairs: Tensor | None = None
    layers: Tensor | None = None


def evidence_maps(
    model: PooledClassifier,
    image: Tensor,
    classes: Sequence[int],
    *,
    side: Side = "auto",
    pairs: bool = False,
) -> list[Evidence]:
    """Return the evidence maps of one image for some classes.

    Args:
        model: a model with a classifier.
        image: ``(3, H, W)``, preprocessed.
        classes: indices of the classes.
        side: ``"positions"`` computes with n×n matrices of n positions, ``"channels"`` with C×C matrices,
            ``"auto"`` with the smaller ones. The maps agree up to rounding. ``pairs`` needs positions.
        pairs: also return the contribution of each pair of positions, n² values per class.

    Example:
        >>> from covpool import create_model
        >>> model = create_model("test_resnet", dim=8, num_classes=3)
        >>> found, = evidence_maps(model, torch.randn(3, 160, 160), [2])
        >>> found.kind, abs(float(found.positions.sum()) + found.rest - found.logit) < 1e-3
        ('exact', True)
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            features = model.forward_features(image[None])
        return explain_features(model, features, classes, side=side, pairs=pairs)
    finally:
        model.train(was_training)


def explain_features(
    model: PooledClassifier,
    features: Tensor,
    classes: Sequence[int],
    *,
    side: Side = "auto",
    pairs: bool = False,
) -> list[Evidence]:
    """Do :func:`evidence_maps` from the features of one image, computed in evaluation mode."""
    if not model.num_classes:
        raise UsageError("the model has no classifier: add one with covpool train or covpool svm")
    if model.config.pool == CLASS_TOKEN and model.config.join is None:
        raise UsageError(
            "a class token has no position in the image: explain a model that pools its positions"
        )
    if _is_exact(model):
        with torch.no_grad():
            return _exact(model, features, classes, side, pairs)
    return [_by_gradient(model, features, label) for label in classes]


def grid_of(model: PooledClassifier, features: Tensor) -> tuple[int, int]:
    """Return rows and columns of the positions; tokens are assumed to cover a square image."""
    x = model.format.positions(features)
    if x.ndim == 4:
        height, width = x.shape[2:] if model.format.layout == "channels_first" else x.shape[1:3]
        return int(height), int(width)
    side = math.isqrt(x.shape[1])
    if side * side != x.shape[1]:
        return 1, int(x.shape[1])
    return side, side


@dataclass
class Seen:
    """Input and output of the pooling in the last batch.

    Attributes:
        received: features ``(B, d, n)``, after the reduction.
        given: pooled vectors ``(B, D)``.
    """

    received: Tensor = field(init=False)
    given: Tensor = field(init=False)


@contextmanager
def watched_pooling(model: PooledClassifier) -> Iterator[Seen]:
    """Record the input and output of the pooling method within ``with``."""
    seen = Seen()

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        seen.received, seen.given = inputs[0], output

    assert isinstance(model.pool.pooling, Method)
    handle = model.pool.pooling.register_forward_hook(note)
    try:
        yield seen
    finally:
        handle.remove()


@dataclass(frozen=True, eq=False)
class LinearHead:
    """A head as a linear function of the pooled vector of one image.

    Attributes:
        weights: ``(classes, D)``.
        bias: ``(classes,)``.
    """

    weights: Tensor
    bias: Tensor


def linear_head(model: PooledClassifier, raw: Tensor, classes: Tensor) -> LinearHead:
    """Return the linear head of one image with pooled vector ``raw``, ``(D,)``, before a BatchNorm."""
    assert isinstance(model.head.classifier, nn.Linear)
    weights = model.head.classifier.weight[classes].to(raw.dtype)
    bias = model.head.classifier.bias[classes].to(raw.dtype)
    scale, shift = _folded(model.pool.pooling, raw)
    pooled = raw * scale + shift
    for layer in reversed(model.head.hidden):
        assert isinstance(layer, nn.Linear)
        weights = weights @ layer.weight.to(raw.dtype)
    if model.head.normalize is not None:
        received = pooled
        for layer in model.head.hidden:
            received = layer.weight.to(raw.dtype) @ received  # type: ignore[operator]
        weights = weights / received.norm().clamp_min(1e-12)  # the floor of torch.nn.functional.normalize
    return LinearHead(weights * scale, bias + weights @ shift)


def is_linear(head: Head) -> bool:
    """Return whether the logits are linear in the pooled vector, up to its length."""
    return all(isinstance(layer, nn.Linear) for layer in head.hidden) and isinstance(
        head.classifier, nn.Linear
    )


def symmetric(weights: Tensor) -> Tensor:
    """Convert weights ``(classes, d(d+1)/2)`` to symmetric ``(classes, d, d)`` with ⟨W, C⟩ = ⟨w, v⟩."""
    matrix = triu_unvec(weights)
    return (matrix + torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1))) / 2


def _folded(method: object, raw: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and shift of a BatchNorm in evaluation mode, or 1 and 0."""
    if not isinstance(method, IsqrtCov) or method.norm is None:
        return torch.ones_like(raw), torch.zeros_like(raw)
    norm = method.norm
    assert norm.running_var is not None
    assert norm.running_mean is not None
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    return scale.to(raw.dtype), (norm.bias - norm.running_mean * scale).to(raw.dtype)


def _is_exact(model: PooledClassifier) -> bool:
    if model.config.pool == CLASS_TOKEN or not is_linear(model.head):
        return False
    pooling = model.pool.pooling
    if isinstance(pooling, EachLayer):
        return all(isinstance(m, EXACT) and getattr(m, "norm", None) is None for m in pooling.each)
    return isinstance(pooling, (*EXACT, Gap))


def _exact(
    model: PooledClassifier, features: Tensor, classes: Sequence[int], side: Side, pairs: bool
) -> list[Evidence]:
    chosen = torch.as_tensor(list(classes), device=features.device)
    with watched_pooling(model) as seen:
        logits = model.forward_head(features)[0, chosen]
    grid = grid_of(model, features)
    head, maps, both = _second_order(model, seen.received, chosen, side, pairs)
    first, token = _first_order(model, features, chosen)
    return [
        Evidence(
            label=int(label),
            logit=float(logits[i]),
            kind="exact",
            positions=maps[i].sum(0).reshape(grid).cpu(),
            first_order=None if first is None else first[i].cpu(),
            rest=float(head.bias[i] + token[i]),
            pairs=None if both[i] is None else both[i].cpu(),  # type: ignore[union-attr]
            layers=maps[i].reshape(-1, *grid).cpu() if len(maps[i]) > 1 else None,
        )
        for i, label in enumerate(chosen)
    ]


def _second_order(
    model: PooledClassifier, x: Tensor, classes: Tensor, side: Side, pairs: bool
) -> tuple[LinearHead, list[Tensor], list[Tensor | None]]:
    """Return the linear head, and for each class a map per layer and pairs; an average has no pairs."""
    pooling = model.pool.pooling
    if isinstance(pooling, Gap):
        x_Cn = x[0].float()
        head = linear_head(model, x_Cn.mean(1), classes)
        return head, list((head.weights @ x_Cn / x_Cn.shape[1]).unsqueeze(1)), [None] * len(classes)
    assert isinstance(pooling, Method)
    methods: list[Any] = list(pooling.each) if isinstance(pooling, EachLayer) else [pooling]
    parts = zip(methods, x.split([method.channels for method in methods], dim=1), strict=True)
    each_factors = [factors(method, part, "positions" if pairs else side) for method, part in parts]
    head = linear_head(model, torch.cat([triu_vec(factor.matrix())[0] for factor in each_factors]), classes)
    weights = head.weights.split([method.out_features for method in methods], dim=1)
    each = [list(zip(each_factors, row, strict=True)) for row in zip(*map(symmetric, weights), strict=True)]
    both = [torch.stack([factor.pairs(w)[0] for factor, w in row]).sum(0) if pairs else None for row in each]
    return head, [torch.stack([factor.positions(w)[0] for factor, w in row]) for row in each], both


def _first_order(model: PooledClassifier, features: Tensor, classes: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return the maps of a joined average, ``(classes, h, w)``, and the logits of a class token."""
    nothing = torch.zeros(len(classes), device=features.device)
    if model.first_order is None:
        return None, nothing
    assert isinstance(model.first_order, nn.Linear)
    vector = model.forward_first_order(features)
    assert vector is not None
    weights = model.first_order.weight[classes].float()
    if model.config.normalize is not None:
        weights = weights / vector.float().norm().clamp_min(1e-12)
    if model.config.join == CLASS_TOKEN:
        return None, weights @ vector[0].float()
    last = model.format.last_layer(features)
    expanded = last if model.expansion is None else model.expansion(last)
    x = model.format.positions(expanded)
    if model.format.layout == "channels_last":
        x = x.movedim(-1, 1)
    maps = weights @ x[0].flatten(1).float() / x[0].flatten(1).shape[1]
    return maps.reshape(len(classes), *grid_of(model, features)), nothing


def _by_gradient(model: PooledClassifier, features: Tensor, label: int) -> Evidence:
    """Return gradient times features at the backbone's output, summed over channels."""
    features = features.detach().requires_grad_()
    with torch.enable_grad():
        logit = model.forward_head(features)[0, label]
        (gradient,) = torch.autograd.grad(logit, features)
    product = model.format.positions((gradient * features).detach())
    channel = 1 if model.format.layout == "channels_first" else -1
    positions = product.sum(channel)[0].reshape(grid_of(model, features)).cpu()
    rest = float(logit.detach()) - float(positions.sum())
    return Evidence(int(label), float(logit.detach()), "gradient", positions, None, rest)
