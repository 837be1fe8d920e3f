"""Diagnose the covariances of a bundle: spectra, rank, warnings."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from covpool.arguments import check_whole
from covpool.data.decode import decode
from covpool.data.transforms import Preprocessing, evaluation_transform
from covpool.drawing import LIGHT, dress, new_figure, png
from covpool.errors import BadImageError, UsageError
from covpool.explain.evidence import watched_pooling
from covpool.explain.explaining import some_images
from covpool.functional import covariance, triu_unvec
from covpool.functional.newton_schulz import newton_schulz
from covpool.functional.numerics import norm_of, reciprocal_or_zero
from covpool.models.bundle import load_model
from covpool.models.card import plain_json
from covpool.models.model import PooledClassifier
from covpool.nn import CovPool
from covpool.nn.pooling.isqrt_cov import IsqrtCov, PolarExpress
from covpool.nn.pooling.lyapunov import MpaLya, MtpLya
from covpool.nn.pooling.method import Cov
from covpool.nn.pooling.spectral import MpnCov
from covpool.nn.pooling.svd import SvdPade, SvdTaylor
from covpool.storage.files import replace_file
from covpool.terminal import counted

Figures = dict[str, float | None]
# Methods whose output is the triangle of a power of the covariance; other outputs have no eigenvalues.
ROOTS = (Cov, IsqrtCov, MpaLya, MpnCov, MtpLya, PolarExpress, SvdPade, SvdTaylor)
# A channel is constant if its variance, relative to the largest variance of a channel, is below this.
CONSTANT = 1e-8
# Thresholds of the warnings. A low rank gives no warning: fewer positions than channels are usual.
MANY_CONSTANT, FEW_DIRECTIONS, FAR_FROM_A_ROOT, HARDLY_ANY = 0.1, 2.0, 0.5, 1e-7


@dataclass(frozen=True)
class Diagnosis:
    """Properties of the covariances. Those of single images are medians over the images.

    Attributes:
        images: number of images.
        method: pooling method.
        channels: number of channels d.
        positions: number of spatial positions n.
        constant: fraction of channels that are constant in every image.
        condition: condition number of the covariance, over its nonzero eigenvalues.
        effective_rank: effective rank of the covariance, the exponential of the entropy of its eigenvalues.
        rank: number of nonzero eigenvalues of the covariance.
        condition_after: condition number of the pooled matrix; ``None`` if it is not a matrix power.
        effective_rank_after: effective rank of the pooled matrix, or ``None`` in the same case.
        spectrum: eigenvalues of the covariance divided by their sum, largest first.
        spectrum_after: eigenvalues of the pooled matrix divided by their sum.
        residuals: relative error ‖Y² - A‖ / ‖A‖ of the root Y of the covariance A, divided by its norm, after
            each step of ``isqrt_cov``; empty for other methods.
        gradient_rms: root mean square of the loss gradient at the input of the pooling, for the network's own
            predictions as labels.
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
    """Diagnose the covariance pooling of a network.

    Args:
        model: a model with covariance pooling and a classifier.
        images: each ``(3, H, W)``, preprocessed.
        progress: called with the number of images done.

    Raises:
        UsageError: if the model has no covariance or no classifier, or there are no images.
    """
    if not isinstance(model.pool, CovPool) or model.pool.pooling.order != 2:
        raise UsageError(f"the pooling is {model.config.pool}: diagnosis needs covariance pooling")
    if not model.num_classes:
        raise UsageError("the model has no classifier: the diagnosis needs one for its gradient")
    looks = []
    for done, image in enumerate(images, 1):
        looks.append(_look(model.eval(), image.to(next(model.parameters()).device)))
        progress(done)
    if not looks:
        raise UsageError("no image is readable: run covpool check to see why")
    alive = torch.stack([look["alive"] for look in looks]).any(0)
    after = [look["after"] for look in looks if look["after"] is not None]
    first = looks[0]
    return Diagnosis(
        images=len(looks),
        method=model.pool.pool,
        channels=len(alive),
        positions=first["positions"],
        constant=1 - float(alive.float().mean()),
        condition=_median(look["before"]["condition"] for look in looks),
        effective_rank=_median(look["before"]["effective_rank"] for look in looks),
        rank=round(_median(look["rank"] for look in looks)),
        condition_after=_median_or_none([look["condition"] for look in after]),
        effective_rank_after=_median_or_none([look["effective_rank"] for look in after]),
        spectrum=_curve([look["spectrum"] for look in looks]),
        spectrum_after=_curve([look["spectrum_after"] for look in looks if look["after"] is not None]),
        residuals=tuple(map(statistics.median, zip(*(look["residuals"] for look in looks), strict=True))),
        gradient_rms=_median(look["gradient_rms"] for look in looks),
    )


def warnings(diagnosis: Diagnosis) -> list[str]:
    """Return a sentence for each problem."""
    said = []
    if diagnosis.constant > MANY_CONSTANT:
        varying = max(diagnosis.channels * (1 - diagnosis.constant), 1)
        dim = int(2 ** math.floor(math.log2(varying)))
        advice = (
            f"; try dim={dim}"
            if 8 <= dim < diagnosis.channels
            else ": check the preprocessing and the weights"
        )
        said.append(f"{diagnosis.constant:.0%} of the channels are constant{advice}")
    if diagnosis.effective_rank < FEW_DIRECTIONS:
        said.append(
            f"{diagnosis.effective_rank:.1f} of {diagnosis.channels} directions hold nearly all of the "
            "variance: the features hardly differ between positions; check the images and the preprocessing"
        )
    if diagnosis.residuals and diagnosis.residuals[-1] > FAR_FROM_A_ROOT:
        said.append(
            f"after {len(diagnosis.residuals)} steps the result is far from a square root (residual "
            f"{diagnosis.residuals[-1]:.2f}); try more steps"
        )
    if diagnosis.gradient_rms < HARDLY_ANY or math.isnan(diagnosis.gradient_rms):
        said.append(
            f"the gradient at the pooling is {diagnosis.gradient_rms:.0e}: the backbone would hardly learn; "
            'check whether compensation is "none" or the network is certain of every image'
        )
    return said


def diagnose_images(
    bundle: str | Path,
    data: str | Path,
    out: str | Path,
    *,
    limit: int = 64,
    device: str = "auto",
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Diagnosis:
    """Diagnose a bundle on some images, and write ``diagnosis.json`` and ``diagnosis.png`` to ``out``."""
    check_whole("limit", limit)
    model = load_model(bundle, device=device).eval()
    transform = evaluation_transform(Preprocessing.of(model.pretrained_cfg))
    files = list(some_images(data, limit))

    def images() -> Iterator[Tensor]:
        for file in files:
            try:
                yield transform(decode(file.content))
            except BadImageError:
                continue

    diagnosis = diagnose(model, images(), lambda done: progress(done, len(files)))
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    content = {**asdict(diagnosis), "warnings": warnings(diagnosis)}
    replace_file(
        out / "diagnosis.json", (json.dumps(plain_json("diagnosis", content), indent=1) + "\n").encode()
    )
    replace_file(out / "diagnosis.png", png(draw(diagnosis)))
    return diagnosis


def draw(diagnosis: Diagnosis) -> Figure:
    """Draw the spectra, and the residuals if the method iterates."""
    panels = 2 if diagnosis.residuals else 1
    figure = new_figure(LIGHT, 3.8 * panels, 3.2)
    left, *rest = figure.subplots(1, panels, squeeze=False)[0]
    dress(left, LIGHT)
    for values, color, name in (
        (diagnosis.spectrum, LIGHT.series[0], "covariance"),
        (diagnosis.spectrum_after, LIGHT.series[1], f"after {diagnosis.method}"),
    ):
        positive = [value for value in values if value > 1e-12]
        if positive:
            left.plot(range(1, len(positive) + 1), positive, color=color, linewidth=1.6, label=name)
    left.set_yscale("log")
    left.set_xlabel("eigenvalue, largest first", fontsize=9)
    left.set_ylabel("fraction of their sum", fontsize=9)
    left.legend(frameon=False, fontsize=8)
    for right in rest:
        dress(right, LIGHT)
        right.plot(range(1, len(diagnosis.residuals) + 1), diagnosis.residuals, "o-", color=LIGHT.series[0])
        right.set_yscale("log")
        right.set_xticks(range(1, len(diagnosis.residuals) + 1))
        right.set_xlabel("Newton-Schulz steps", fontsize=9)
        right.set_ylabel("‖Y² − A‖ / ‖A‖", fontsize=9)
    figure.suptitle(
        f"{diagnosis.channels} channels, {diagnosis.positions} positions, "
        f"{counted(diagnosis.images, 'image')}",
        fontsize=10,
    )
    return figure


def summed_up(values: Tensor) -> Figures:
    """Return the condition number over nonzero eigenvalues, and the effective rank.

    The effective rank is the exponential of the entropy of the normalized singular values: d if all are
    equal, 1 if one is nonzero (O. Roy, M. Vetterli, "The Effective Rank", EUSIPCO 2007). With negative
    eigenvalues the condition number is ``None``.
    """
    sizes = without_rounding(values.abs())
    nonzero = sizes[sizes > 0]
    if not len(nonzero):
        return {"condition": None, "effective_rank": 0.0}
    share = nonzero / nonzero.sum()
    negative = bool((values[sizes > 0] < 0).any())
    return {
        "condition": None if negative else rounded(float(nonzero.max() / nonzero.min())),
        "effective_rank": rounded(math.exp(-float((share * share.log()).sum()))),
    }


def medians(rows: list[Figures]) -> Figures:
    """Return the median of each figure over all images; ``None`` if an image has none."""
    result: Figures = {}
    for key in rows[0]:
        values = [value for row in rows if (value := row[key]) is not None]
        result[key] = rounded(statistics.median(values)) if len(values) == len(rows) else None
    return result


def without_rounding(values: Tensor) -> Tensor:
    """Set eigenvalues to zero that are rounding error of the largest: below d · eps · largest."""
    tolerance = len(values) * torch.finfo(values.dtype).eps * float(values.max())
    return values.masked_fill(values <= tolerance, 0.0)


def rounded(number: float) -> float:
    """Round to six digits, and values below 1e-12 to zero."""
    return 0.0 if abs(number) < 1e-12 else float(f"{number:.6g}")


def _look(model: PooledClassifier, image: Tensor) -> dict[str, Any]:
    x_dn, pooled, gradient = _at_the_pooling(model, image)
    a_dd = covariance(x_dn.double())
    values = torch.linalg.eigvalsh(a_dd).flip(0).clamp_min(0)
    variances = a_dd.diagonal()
    rank = int((values > len(values) * torch.finfo(values.dtype).eps * values.max()).sum())
    matrix = triu_unvec(pooled.double()) if isinstance(model.pool.pooling, ROOTS) else None
    # Beyond the rank, eigenvalues are rounding errors of a float32 layer.
    after = None if matrix is None else torch.linalg.eigvalsh(matrix).flip(0)[: max(rank, 1)]
    return {
        "positions": x_dn.shape[1],
        "alive": variances > CONSTANT * variances.max(),
        "before": summed_up(values),
        "rank": rank,
        "after": None if after is None else summed_up(after),
        "spectrum": values / values.sum().clamp_min(torch.finfo(values.dtype).tiny),
        "spectrum_after": None
        if after is None
        else nn.functional.pad(after / after.sum(), (0, len(values) - len(after))),
        "residuals": _residuals(a_dd, model.pool.pooling),
        "gradient_rms": float(gradient.pow(2).mean().sqrt()),
    }


def _at_the_pooling(model: PooledClassifier, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the input ``(d, n)`` and the output of the pooling, and the loss gradient at its input."""
    with torch.enable_grad(), watched_pooling(model) as seen:
        features = model.forward_features(image[None]).detach().requires_grad_()
        logits = model.forward_head(features)
        loss = nn.functional.cross_entropy(logits, logits.argmax(1))
        (gradient,) = torch.autograd.grad(loss, seen.received)
    return seen.received[0].detach(), seen.given[0].detach(), gradient[0]


def _residuals(a_dd: Tensor, method: object) -> list[float]:
    if not isinstance(method, IsqrtCov):
        return []
    a = a_dd[None]
    a = a * reciprocal_or_zero(norm_of(a, method.options.normalization))
    size = a.norm().clamp_min(torch.finfo(a.dtype).tiny)
    coefficients = method.options.coefficients
    roots = (newton_schulz(a, coefficients[:k])[0] for k in range(1, len(coefficients) + 1))
    return [float((torch.bmm(y, y) - a).norm() / size) for y in roots]


def _median(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return float(statistics.median(known)) if known else float("nan")


def _median_or_none(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(statistics.median(known)) if known and len(known) == len(values) else None


def _curve(spectra: list[Tensor]) -> tuple[float, ...]:
    return tuple(torch.stack(spectra).median(0).values.tolist()) if spectra else ()
