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

from covpool.data.decode import decode
from covpool.data.transforms import Preprocessing, evaluation_transform
from covpool.drawing import LIGHT, dress, new_figure, png
from covpool.durable import replace_file
from covpool.errors import BadImageError, UsageError
from covpool.explain.evidence import watched_pooling
from covpool.explain.explaining import some_images
from covpool.functional import covariance, triu_unvec
from covpool.functional.arguments import check_whole
from covpool.functional.newton_schulz import newton_schulz
from covpool.functional.normalization import norm_of, reciprocal_or_zero
from covpool.models.bundle import load_model
from covpool.models.model import PooledClassifier
from covpool.models.strict_json import plain_json
from covpool.nn import CovPool
from covpool.nn.pooling.isqrt_cov import IsqrtCov, PolarExpress
from covpool.nn.pooling.lyapunov import MpaLya, MtpLya
from covpool.nn.pooling.method import Cov
from covpool.nn.pooling.spectral import MpnCov
from covpool.nn.pooling.svd import SvdPade, SvdTaylor
from covpool.wording import counted

Figures = dict[str, float | None]


def summed_up(values: Tensor) -> Figures:
    """Condition number over the part that is not zero, and effective rank.

    The effective rank is the exponential of the entropy of the singular values over their sum: d if all are
    equal, 1 if there is but one (O. Roy, M. Vetterli, "The Effective Rank", EUSIPCO 2007). Where values are
    negative they pass through zero somewhere, and a condition number tells nothing.
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
    """Of each figure over all images; none where one image has none."""
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    return {
        key: None if None in column else rounded(statistics.median(value for value in column if value))
        for key, column in columns.items()
    }


def without_rounding(values: Tensor) -> Tensor:
    """Eigenvalues with those that are rounding beside the largest made zero.

    By the usual bound, which leaves room for what a layer makes of the rounding it was given: in double
    precision no eigenvalue of interest is near it.
    """
    tolerance = len(values) * torch.finfo(values.dtype).eps * float(values.max())
    return values.masked_fill(values <= tolerance, 0.0)


def rounded(number: float) -> float:
    """Six digits; what double precision leaves of a zero, beside values of order one, is zero."""
    return 0.0 if abs(number) < 1e-12 else float(f"{number:.6g}")


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
        raise UsageError(f"the pooling is {model.config.pool}: there is no covariance to diagnose")
    if not model.num_classes:
        raise UsageError("the model has no classifier: there is no gradient to look at")
    found = []
    for done, image in enumerate(images, 1):
        found.append(_look(model.eval(), image.to(next(model.parameters()).device)))
        progress(done)
    if not found:
        raise UsageError("there is no image to diagnose by: covpool check tells what is wrong with images")
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


# Beyond these something is said. A low rank by itself is none of it: fewer positions than channels are usual.
MANY_CONSTANT, FEW_DIRECTIONS, FAR_FROM_A_ROOT, HARDLY_ANY = 0.1, 2.0, 0.5, 1e-7


def warnings(found: Diagnosis) -> list[str]:
    """A sentence for each thing that is amiss; none if nothing is."""
    said = []
    if found.constant > MANY_CONSTANT:
        dim = _power_of_two(found.channels * (1 - found.constant))
        advice = (
            f"; try dim={dim}"
            if 8 <= dim < found.channels
            else ": does the network get what it was made for?"
        )
        said.append(f"{found.constant:.0%} of the channels are constant{advice}")
    if found.effective_rank < FEW_DIRECTIONS:
        said.append(
            f"{found.effective_rank:.1f} of {found.channels} directions hold nearly all of the variance: "
            "features are much the same everywhere; is it a plain image, or the wrong preprocessing?"
        )
    if found.residuals and found.residuals[-1] > FAR_FROM_A_ROOT:
        said.append(
            f"after {len(found.residuals)} steps the result is far from a root (residual "
            f"{found.residuals[-1]:.2f}); try more steps"
        )
    if found.gradient_rms < HARDLY_ANY or math.isnan(found.gradient_rms):
        said.append(
            f"the gradient at the pooling is {found.gradient_rms:.0e}: the backbone would hardly learn; is "
            'compensation="none", or is the network sure of every image?'
        )
    return said


def _power_of_two(channels: float) -> int:
    """The largest that is not above."""
    return int(2 ** math.floor(math.log2(max(channels, 1))))


def draw(found: Diagnosis) -> Figure:
    """Two panels; one where the method does not iterate."""
    panels = 2 if found.residuals else 1
    figure = new_figure(LIGHT, 3.8 * panels, 3.2)
    left, *rest = figure.subplots(1, panels, squeeze=False)[0]
    dress(left, LIGHT)
    for values, colour, name in (
        (found.spectrum, LIGHT.series[0], "covariance"),
        (found.spectrum_after, LIGHT.series[1], f"after {found.method}"),
    ):
        positive = [value for value in values if value > 1e-12]
        if positive:
            left.plot(range(1, len(positive) + 1), positive, color=colour, linewidth=1.6, label=name)
    left.set_yscale("log")
    left.set_xlabel("eigenvalue, largest first", fontsize=9)
    left.set_ylabel("share of their sum", fontsize=9)
    left.legend(frameon=False, fontsize=8)
    for right in rest:
        dress(right, LIGHT)
        right.plot(range(1, len(found.residuals) + 1), found.residuals, "o-", color=LIGHT.series[0])
        right.set_yscale("log")
        right.set_xticks(range(1, len(found.residuals) + 1))
        right.set_xlabel("Newton-Schulz steps", fontsize=9)
        right.set_ylabel("‖Y² − A‖ / ‖A‖", fontsize=9)
    figure.suptitle(
        f"{found.channels} channels, {found.positions} positions, {counted(found.images, 'image')}",
        fontsize=10,
    )
    return figure


def diagnose_images(
    bundle: str | Path,
    data: str | Path,
    out: str | Path,
    *,
    limit: int = 64,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Diagnosis:
    """Diagnose a bundle by some images; ``diagnosis.json`` and ``diagnosis.png`` are in ``out``."""
    check_whole("limit", limit)
    model = load_model(bundle).eval()
    transform = evaluation_transform(Preprocessing.of(model.pretrained_cfg))
    files = list(some_images(data, limit))

    def images() -> Iterator[Tensor]:
        for file in files:
            try:
                yield transform(decode(file.content))
            except BadImageError:
                continue

    found = diagnose(model, images(), lambda done: progress(done, len(files)))
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    told = {**asdict(found), "warnings": warnings(found)}
    replace_file(
        out / "diagnosis.json", (json.dumps(plain_json("diagnosis", told), indent=1) + "\n").encode()
    )
    replace_file(out / "diagnosis.png", png(draw(found)))
    return found
