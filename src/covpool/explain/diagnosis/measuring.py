"""The pooling of a network on images: eigenvalues before and after, residuals, constant channels, gradient.

Letters: B images, d channels of the covariance, n positions.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from covpool.explain.at_the_pooling import watched_pooling
from covpool.explain.spectrum import summed_up
from covpool.functional import covariance, triu_unvec
from covpool.functional.newton_schulz import newton_schulz
from covpool.functional.normalization import norm_of, reciprocal_or_zero
from covpool.models.model import PooledClassifier
from covpool.nn import CovPool
from covpool.nn.pooling.cov import Cov
from covpool.nn.pooling.isqrt_cov import IsqrtCov
from covpool.nn.pooling.mpa_lya import MpaLya
from covpool.nn.pooling.mpn_cov import MpnCov
from covpool.nn.pooling.mtp_lya import MtpLya
from covpool.nn.pooling.polar_express import PolarExpress
from covpool.nn.pooling.svd_pade import SvdPade
from covpool.nn.pooling.svd_taylor import SvdTaylor

# Methods whose vector is the triangle of a power of the covariance; of others, eigenvalues tell nothing.
ROOTS = (Cov, IsqrtCov, MpaLya, MpnCov, MtpLya, PolarExpress, SvdPade, SvdTaylor)
# A channel whose variance is below this part of the liveliest one's is constant.
CONSTANT = 1e-8


@dataclass(frozen=True)
class Diagnosis:
    """Medians over images, but for the share of constant channels.

    Attributes:
        images: how many there were.
        method: of the pooling.
        channels: d.
        positions: n.
        constant: the share of channels that are constant in every image.
        condition: of the covariance, over its eigenvalues that are not zero.
        effective_rank: of the covariance.
        rank: eigenvalues of the covariance that are not zero.
        condition_after: of the pooled matrix; ``None`` where it is no power of the covariance.
        effective_rank_after: likewise.
        spectrum: eigenvalues of the covariance over its trace, largest first.
        spectrum_after: those of the pooled matrix over their sum.
        residuals: of ``isqrt_cov``, ‖Y² - A‖ over ‖A‖ after each step; empty for other methods.
        gradient_rms: of the loss at what the method receives, for labels that the network itself gives.
    """

    images: int
    method: str
    channels: int
    positions: int
    constant: float
    condition: float
    effective_rank: float
    rank: int
    condition_after: float | None
    effective_rank_after: float | None
    spectrum: tuple[float, ...]
    spectrum_after: tuple[float, ...]
    residuals: tuple[float, ...]
    gradient_rms: float


def diagnose(
    model: PooledClassifier, images: Iterable[Tensor], progress: Callable[[int], object] = lambda done: None
) -> Diagnosis:
    """Look at the pooling of a network.

    Args:
        model: of second order, with a classifier.
        images: each ``(3, H, W)``, preprocessed.
        progress: told how many are done.

    Raises:
        ValueError: if there is no covariance to look at.
    """
    if not isinstance(model.pool, CovPool) or model.pool.pooling.order != 2:
        raise ValueError(f"the pooling is {model.config.pool}: there is no covariance to diagnose")
    if not model.num_classes:
        raise ValueError("the model has no classifier: there is no gradient to look at")
    found = []
    for done, image in enumerate(images, 1):
        found.append(_look(model.eval(), image.to(next(model.parameters()).device)))
        progress(done)
    if not found:
        raise ValueError("there is no image to diagnose by: covpool check tells what is wrong with images")
    alive = torch.stack([one["alive"] for one in found]).any(0)
    after = [one["after"] for one in found if one["after"] is not None]
    first = found[0]
    return Diagnosis(
        images=len(found),
        method=model.pool.method,
        channels=len(alive),
        positions=first["positions"],
        constant=1 - float(alive.float().mean()),
        condition=_median(one["before"]["condition"] for one in found),
        effective_rank=_median(one["before"]["effective_rank"] for one in found),
        rank=round(_median(one["rank"] for one in found)),
        condition_after=_median_or_none([one["condition"] for one in after]),
        effective_rank_after=_median_or_none([one["effective_rank"] for one in after]),
        spectrum=_curve([one["spectrum"] for one in found]),
        spectrum_after=_curve([one["spectrum_after"] for one in found if one["after"] is not None]),
        residuals=tuple(map(statistics.median, zip(*(one["residuals"] for one in found), strict=True))),
        gradient_rms=_median(one["gradient_rms"] for one in found),
    )


def _look(model: PooledClassifier, image: Tensor) -> dict[str, Any]:
    x_dn, pooled, gradient = _at_the_pooling(model, image)
    a_dd = covariance(x_dn.double())
    values = torch.linalg.eigvalsh(a_dd).flip(0).clamp_min(0)
    variances = a_dd.diagonal()
    rank = int((values > len(values) * torch.finfo(values.dtype).eps * values.max()).sum())
    matrix = triu_unvec(pooled.double()) if isinstance(model.pool.pooling, ROOTS) else None
    after = None if matrix is None else _largest(torch.linalg.eigvalsh(matrix), rank)
    return {
        "positions": x_dn.shape[1],
        "alive": variances > CONSTANT * variances.max(),
        "before": summed_up(values),
        "rank": rank,
        "after": None if after is None else summed_up(after),
        "spectrum": values / values.sum().clamp_min(torch.finfo(values.dtype).tiny),
        "spectrum_after": None if after is None else _padded(after / after.sum(), len(values)),
        "residuals": _residuals(a_dd, model.pool.pooling),
        "gradient_rms": float(gradient.pow(2).mean().sqrt()),
    }


def _at_the_pooling(model: PooledClassifier, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the method receives ``(d, n)``, what it gives, and the gradient of the loss at the former."""
    with torch.enable_grad(), watched_pooling(model) as seen:
        features = model.forward_features(image[None]).detach().requires_grad_()
        logits = model.forward_head(features)
        loss = nn.functional.cross_entropy(logits, logits.argmax(1))
        (gradient,) = torch.autograd.grad(loss, seen.received)
    return seen.received[0].detach(), seen.given[0].detach(), gradient[0]


def _largest(values: Tensor, rank: int) -> Tensor:
    """As many as the covariance has: what a layer in float32 makes of its zeros is rounding."""
    return values.sort(descending=True).values[: max(rank, 1)]


def _padded(values: Tensor, length: int) -> Tensor:
    return nn.functional.pad(values, (0, length - len(values)))


def _residuals(a_dd: Tensor, method: object) -> list[float]:
    if not isinstance(method, IsqrtCov):
        return []
    a = a_dd[None]
    a = a * reciprocal_or_zero(norm_of(a, method.options.normalization))
    size = a.norm().clamp_min(torch.finfo(a.dtype).tiny)
    roots = (newton_schulz(a, steps)[0] for steps in range(1, method.options.steps + 1))
    return [float((torch.bmm(y, y) - a).norm() / size) for y in roots]


def _median(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return float(statistics.median(known)) if known else float("nan")


def _median_or_none(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(statistics.median(known)) if known and len(known) == len(values) else None


def _curve(spectra: list[Tensor]) -> tuple[float, ...]:
    return tuple(torch.stack(spectra).median(0).values.tolist()) if spectra else ()
