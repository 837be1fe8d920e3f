"""The spectra of photographs, through every layer."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covpool.data.decode import decode
from covpool.data.sources import open_images
from covpool.data.transforms import Preprocessing, evaluation_transform
from covpool.explain.diagnosis import medians, rounded, summed_up, without_rounding
from covpool.functional import covariance
from covpool.models import PooledClassifier, create_model
from covpool.reproduce.spectra.curves import CURVES, values_out

SIZES = (224, 448)  # pixels: 7×7 and 14×14 positions of 320 channels
BINS_PER_DECADE = 6
# It was trained on (x - 127) / 128 of values from 0 to 255.
PREPROCESSING = {"mean": [127 / 255] * 3, "std": [128 / 255] * 3}


def lite0(weights: Path, size: int) -> PooledClassifier:
    """EfficientNet-Lite0 as it was trained; of its features those of the last stage, 320 channels."""
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
    """Features ``(1, C, n)`` of the first test image of every class."""
    model = lite0(weights, size)
    transform = evaluation_transform(Preprocessing.of(model.pretrained_cfg))
    images = open_images(data, "test")
    labels = [images.label(i) for i in range(len(images))]
    for label in sorted(set(labels)):
        picture = transform(decode(images.read(labels.index(label))))
        yield model.forward_features(picture.unsqueeze(0)).flatten(2).double()


@torch.no_grad()
def real(maps: Iterable[Tensor], size: int) -> dict[str, Any]:
    """Values in and out of all images together, in the unit of each image's trace."""
    spectra, outs, traces, shape = [], [], [], torch.Size()
    for x in maps:
        eigenvalues, vectors = torch.linalg.eigh(covariance(x)[0])
        trace = float(eigenvalues.sum())
        spectra.append(without_rounding(eigenvalues) / trace)
        outs.append({c.label: values_out(c, x, vectors) / trace ** (c.degree or 0) for c in CURVES})
        traces.append(trace)
        shape = x.shape
    together, labels = torch.cat(spectra), [curve.label for curve in CURVES]
    out = {label: torch.cat([one[label] for one in outs]) for label in labels}
    return {
        "image_size": size,
        "images": len(spectra),
        "channels": shape[1],
        "positions": shape[2],
        "zeros": statistics.median(int((values == 0).sum()) for values in spectra),
        "trace": rounded(statistics.median(traces)),
        "bins": bins(together, out),
        "below_half_the_root": {c.label: damped(together, out[c.label]) for c in CURVES if c.degree},
        "figures": {label: medians([summed_up(one[label]) for one in outs]) for label in labels},
    }


def bins(eigenvalues: Tensor, out: dict[str, Tensor]) -> dict[str, Any]:
    """Of each part of a decade, how many eigenvalues there are, and the medians in and out."""
    zero = eigenvalues == 0
    places = (eigenvalues.log10() * BINS_PER_DECADE).floor()
    chosen = [places == place for place in places[~zero].unique()]
    return {
        "count": [int(one.sum()) for one in chosen],
        "in": [_median(eigenvalues[one]) for one in chosen],
        "out": {label: [_median(values[one]) for one in chosen] for label, values in out.items()},
        "zero": {label: _median(values[zero]) for label, values in out.items()},
    }


def damped(eigenvalues: Tensor, values: Tensor) -> dict[str, float]:
    """Which part of the nonzero eigenvalues, and of their sum, comes out at less than half the root."""
    low = (values < 0.5 * eigenvalues.sqrt()) & (eigenvalues > 0)
    return {
        "eigenvalues": rounded(float(low.sum() / (eigenvalues > 0).sum())),
        "trace": rounded(float(eigenvalues[low].sum() / eigenvalues.sum())),
    }


def _median(values: Tensor) -> float:
    return rounded(float(values.median()))
