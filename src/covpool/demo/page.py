"""Draw the page of the demo: images, accuracy, eigenvalues, and evidence maps."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image
from torch import Tensor

from covpool.demo.training import CLASSES, POOLINGS, SIDE, Network, Textures
from covpool.drawing import Theme, dress, new_figure
from covpool.explain.evidence import factors, symmetric
from covpool.explain.evidence_figures import overlay
from covpool.models.card import versions
from covpool.nn.pooling import Method
from covpool.provenance.machine import machine_name
from covpool.terminal import duration
from covpool.training.report.figures import picture
from covpool.training.report.pages import environment
from covpool.training.report.rendering import render
from covpool.training.report.thumbnails import jpeg_uri

# Images shown of each class, and the factor by which they are enlarged.
SHOWN, ENLARGED = 4, 3
NAMES = {"gap": "average pooling (gap)", "isqrt_cov": "covariance pooling (isqrt_cov)"}


def demo_page(record: dict[str, Any], network: Network, test: Textures) -> bytes:
    """Return the page.

    Args:
        record: the results.
        network: the network with covariance pooling, for the maps.
        test: the test images of that network.
    """
    found = {**record, "machine": machine_name(record["machine"]), "versions": versions()}
    return render(
        "demo.html.jinja",
        record=record,
        names=NAMES,
        samples=[
            (name, [_uri(image) for image in test.images[test.labels == label][:SHOWN]])
            for label, name in enumerate(CLASSES)
        ],
        curves=picture(lambda theme: _draw_accuracy(record, theme), "test accuracy after each epoch"),
        spectra=picture(
            lambda theme: _draw_spectra(record["spectra"], theme), "eigenvalues before and after the root"
        ),
        looks=[_look(network, test, label) for label in range(len(CLASSES))],
        commands=[("do the same with your images", "covpool fit FOLDER")],
        facts=[
            ("Classes", f"{len(CLASSES)}"),
            ("Images per class", "{} training, {} test".format(*record["arguments"]["per_class"])),
            ("Image size", f"{SIDE} px"),
            ("Seeds", str(record["arguments"]["seeds"])),
            ("Epochs", str(record["arguments"]["epochs"])),
            ("Time in training", duration(record["seconds"])),
            *environment({**found, "seed": ""}),
        ],
    )


def evidence(network: Network, image: Tensor, label: int) -> tuple[Tensor, float]:
    """Return how much each position and the bias add to a logit, minus the mean logit: ``(h, w)`` and 1."""
    method = network.pool.pooling
    assert isinstance(method, Method)
    with torch.no_grad():
        features = network.filters(image[None] - 0.5)
        weight, bias = network.classifier.weight, network.classifier.bias
        weights = symmetric(weight[label : label + 1] - weight.mean(0))[0]
        positions = factors(method, features.flatten(2)).positions(weights)[0]
        return positions.reshape(features.shape[2:]), float(bias[label] - bias.mean())


def _look(network: Network, test: Textures, label: int) -> dict[str, str]:
    """Return an image of a class next to its map."""
    image = test.images[test.labels == label][-1]
    positions, _ = evidence(network, image, label)
    map_ = overlay(_enlarged(image), positions)
    return {"name": CLASSES[label], "picture": _uri(image), "map": jpeg_uri(map_)}


def _enlarged(image: Tensor) -> Image.Image:
    pixels = (image * 255).round().byte().permute(1, 2, 0).numpy()
    return Image.fromarray(pixels).resize((ENLARGED * SIDE,) * 2, Image.Resampling.BICUBIC)


def _uri(image: Tensor) -> str:
    return jpeg_uri(_enlarged(image))


def _draw_accuracy(record: dict[str, Any], theme: Theme) -> Figure:
    figure = new_figure(theme, 5.6, 3.8)
    axes = figure.subplots()
    dress(axes, theme)
    for name, color in zip(POOLINGS, reversed(theme.series), strict=True):
        lines = 100 * np.array([run["accuracy"][name] for run in record["runs"]])
        epochs = np.arange(1, lines.shape[1] + 1)
        axes.plot(epochs, lines.T, color=color, linewidth=0.8, alpha=0.45)
        axes.plot(epochs, lines.mean(0), color=color, linewidth=2.2, marker="o", ms=3.5, label=NAMES[name])
    axes.axhline(
        100 * record["chance"], color=theme.faint, linewidth=1, linestyle=(0, (1, 2)), label="chance"
    )
    axes.set_ylim(0, 103)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_title("Top-1 accuracy on test images (%)", loc="left", fontsize=11, color=theme.ink)
    axes.set_xlabel("epochs", fontsize=9, color=theme.faint)
    axes.legend(frameon=False, fontsize=9, labelcolor=theme.ink, loc="center right")
    return figure


def _draw_spectra(spectra: dict[str, list[float]], theme: Theme) -> Figure:
    figure = new_figure(theme, 5.6, 3.8)
    axes = figure.subplots()
    dress(axes, theme)
    labels = {"cov": "covariance", "isqrt_cov": "its square root (isqrt_cov)"}
    for (name, label), color in zip(labels.items(), reversed(theme.series), strict=True):
        values = spectra[name]
        axes.semilogy(
            range(1, len(values) + 1), values, color=color, linewidth=2, marker="o", ms=3.5, label=label
        )
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_title("Eigenvalues, relative to the largest", loc="left", fontsize=11, color=theme.ink)
    axes.set_xlabel("number of the eigenvalue", fontsize=9, color=theme.faint)
    axes.legend(frameon=False, fontsize=9, labelcolor=theme.ink)
    return figure
