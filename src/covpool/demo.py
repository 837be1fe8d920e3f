"""Solve one small network with average and with covariance pooling on generated images, and write a page."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image
from torch import Tensor, nn

from covpool.closed_form.solve import solve
from covpool.closed_form.sums import Rows, Sums
from covpool.drawing import Theme, dress, new_figure
from covpool.explain.evidence import factors, symmetric
from covpool.explain.evidence_figures import overlay
from covpool.functional.covariance import triu_unvec
from covpool.functional.eigen import spectrum
from covpool.models.card import versions
from covpool.nn import CovPool
from covpool.nn.pooling import Method
from covpool.provenance import machine_name, new_results
from covpool.storage.files import replace_file
from covpool.terminal import duration
from covpool.training.report import environment
from covpool.training.report.figures import picture
from covpool.training.report.rendering import jpeg_uri, render

POOLINGS = ("gap", "isqrt_cov")
# Directions of the stripes, in degrees, and the signs with which they add to red, green and blue.
ANGLES = {"horizontal": 90, "diagonal down": 135, "vertical": 0, "diagonal up": 45}
COLORS = {"yellow and blue": (1, 1, -1), "magenta and green": (1, -1, 1)}
CLASSES = tuple(f"{angle}, {color}" for angle in ANGLES for color in COLORS)
CHANCE = 1 / len(CLASSES)

SIDE = 64  # pixels
TRAIN, TEST = (2, 5, 10, 20, 50), 60  # images per class
CHANNELS, KERNEL, STRIDE = 24, 7, 4
# Pixel values are in [0, 1]: contrast of the texture, and the largest shift of the mean color.
CONTRAST, TINT = 0.13, 0.12
# Cycles per pixel of the stripes, and the relative widths of their band in frequency and direction.
FREQUENCY, BAND, SPREAD = 0.14, 0.25, 0.25
PACKAGES = ("functional", "nn", "closed_form", "explain", "demo")
PAGE, RESULTS = "report.html", "results.json"


@dataclass(frozen=True)
class Textures:
    """Images ``(N, 3, SIDE, SIDE)`` in [0, 1], and their labels ``(N,)``, class by class."""

    images: Tensor
    labels: Tensor


def make_images(per_class: int, seed: int) -> Textures:
    """Make images of every class.

    Example:
        >>> textures = make_images(2, seed=0)
        >>> textures.images.shape, textures.labels[:4].tolist()
        (torch.Size([16, 3, 64, 64]), [0, 0, 1, 1])
    """
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(len(CLASSES)).repeat_interleave(per_class)
    n = len(labels)
    angles = torch.tensor(list(ANGLES.values()), dtype=torch.float32).deg2rad()[labels // len(COLORS)]
    signs = torch.tensor(list(COLORS.values()), dtype=torch.float32)[labels % len(COLORS)]
    stripes = _noise(n, 1, random, angles) * signs[:, :, None, None]
    pixels = torch.lerp(_noise(n, 3, random, None), stripes, _discs(n, random))
    # The same mean and contrast in each channel of each image, then the same mean colors in every class.
    pixels = pixels - pixels.mean((2, 3), keepdim=True)
    pixels = pixels / pixels.square().mean((2, 3), keepdim=True).sqrt()
    tints = TINT * (2 * torch.rand(per_class, 3, 1, 1, generator=random) - 1)
    images = (0.5 + tints.repeat(len(CLASSES), 1, 1, 1) + CONTRAST * pixels).clamp(0, 1)
    return Textures((images * 255).round() / 255, labels)


def _noise(n: int, channels: int, random: torch.Generator, angles: Tensor | None) -> Tensor:
    """Return noise in a band of frequencies, ``(n, channels, SIDE, SIDE)``; with angles, stripes."""
    y, x = torch.fft.fftfreq(SIDE)[:, None], torch.fft.rfftfreq(SIDE)
    radius = (x * x + y * y).sqrt().clamp_min(1e-6)
    band = torch.exp(-0.5 * ((radius / FREQUENCY).log() / BAND).square())[None]
    if angles is not None:
        off = torch.atan2(y, x) - angles[:, None, None]
        off = off - math.pi * (off / math.pi).round()  # a direction and its opposite are the same
        band = band * torch.exp(-0.5 * (off / SPREAD).square())
    white = torch.fft.rfft2(torch.randn(n, channels, SIDE, SIDE, generator=random))
    noise: Tensor = torch.fft.irfft2(white * band[:, None], s=(SIDE, SIDE))
    return noise / noise.square().mean((2, 3), keepdim=True).sqrt()


def _discs(n: int, random: torch.Generator) -> Tensor:
    """Return masks with soft edges, ``(n, 1, SIDE, SIDE)``: where the texture is."""
    radius = 0.28 * SIDE
    centers = radius + (SIDE - 2 * radius) * torch.rand(n, 2, 1, 1, generator=random)
    place = torch.arange(SIDE, dtype=torch.float32)
    y, x = place[:, None] - centers[:, 0], place - centers[:, 1]
    return torch.sigmoid((radius - (x * x + y * y).sqrt()) / 1.5)[:, None]


class Network(nn.Module):
    """Random filters, the pooling, and a linear classifier; nothing else differs between poolings."""

    def __init__(self, pooling: str, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            self.filters = nn.Conv2d(3, CHANNELS, KERNEL, stride=STRIDE, bias=False)
            self.pool = CovPool(CHANNELS, pooling, dim=None)
            self.classifier = nn.Linear(self.pool.out_features, len(CLASSES))
        self.requires_grad_(False)

    def vectors(self, images: Tensor) -> Tensor:
        """Images ``(B, 3, H, W)`` to pooled vectors ``(B, p)``."""
        pooled: Tensor = self.pool(self.filters(images - 0.5))
        return pooled

    def forward(self, images: Tensor) -> Tensor:
        """Images ``(B, 3, H, W)`` to logits."""
        logits: Tensor = self.classifier(self.vectors(images))
        return logits


def accuracies(network: Network, train: Textures, test: Textures, counts: Sequence[int]) -> list[float]:
    """Solve the classifier from 2, 5, ... training images per class; return the top-1 accuracy of each.

    The network keeps the last classifier.
    """
    vectors, test_vectors = network.vectors(train.images), network.vectors(test.images)
    per_class = torch.arange(len(train.labels)) % (len(train.labels) // len(CLASSES))
    top1 = []
    for count in counts:
        chosen = per_class < count
        sums = Sums("demo", CLASSES, vectors.shape[1])
        sums.add(Rows(vectors[chosen], train.labels[chosen], chosen.nonzero().flatten()))
        solution = solve(sums, kind="ridge")
        network.classifier.weight.copy_(solution.weight)
        network.classifier.bias.copy_(solution.bias)
        right = network.classifier(test_vectors).argmax(1) == test.labels
        top1.append(float(right.float().mean()))
    return top1


@torch.no_grad()
def spectra(network: Network, images: Tensor) -> dict[str, list[float]]:
    """Return the mean eigenvalues of the covariance and of its root, each relative to the largest."""
    features = network.filters(images - 0.5)
    curves = {}
    for name in ("cov", "isqrt_cov"):
        values = spectrum(triu_unvec(CovPool(CHANNELS, name, dim=None)(features))).values
        values = values.sort(descending=True).values
        curves[name] = (values / values[:, :1]).mean(0).tolist()
    return curves


def run_demo(
    out: str | Path,
    *,
    seeds: int = 3,
    train: Sequence[int] = TRAIN,
    test: int = TEST,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Generate images, solve both networks with several seeds, and write a page and the results.

    Args:
        out: folder of the page.
        seeds: number of draws of images and filters.
        train: numbers of training images per class.
        test: number of test images per class.
        progress: called with the number of networks that are solved, and the total.
    """
    started, total = time.monotonic(), seeds * len(POOLINGS)
    progress(0, total)
    runs: list[dict[str, Any]] = []
    for seed in range(seeds):
        # Seeds of training and test images never meet.
        images, test_images = make_images(max(train), 2 * seed), make_images(test, 2 * seed + 1)
        networks = {pooling: Network(pooling, seed) for pooling in POOLINGS}
        accuracy = {}
        for pooling, network in networks.items():
            accuracy[pooling] = accuracies(network, images, test_images, train)
            progress(len(POOLINGS) * seed + len(accuracy), total)
        runs.append({"seed": seed, "accuracy": accuracy})
    colors = [test_images.images[test_images.labels == k].mean((0, 2, 3)) for k in range(len(CLASSES))]
    means = torch.stack(colors)
    arguments = {"seeds": seeds, "train": list(train), "test": test}
    record = {
        "experiment": "demo",
        **new_results(PACKAGES, arguments, "cpu", 0),
        "classes": list(CLASSES),
        "chance": CHANCE,
        "runs": runs,
        "top1": {name: sum(run["accuracy"][name][-1] for run in runs) / seeds for name in POOLINGS},
        "largest_difference_of_mean_colors": float((means.amax(0) - means.amin(0)).max()),
        "spectra": spectra(networks["isqrt_cov"], test_images.images[::4]),
        "threads": torch.get_num_threads(),
        "seconds": round(time.monotonic() - started, 1),
    }
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / RESULTS, json.dumps(record, indent=2).encode() + b"\n")
    replace_file(folder / PAGE, demo_page(record, networks["isqrt_cov"], test_images))
    return record


# Images shown of each class, and the factor by which they are enlarged.
SHOWN, ENLARGED = 4, 3
NAMES = {"gap": "average pooling (gap)", "isqrt_cov": "covariance pooling (isqrt_cov)"}


def demo_page(record: dict[str, Any], network: Network, test: Textures) -> bytes:
    """Return the page."""
    summary = {**record, "machine": machine_name(record["machine"]), "versions": versions()}
    arguments = record["arguments"]
    return render(
        "demo.html.jinja",
        record=record,
        names=NAMES,
        samples=[
            (name, [_uri(image) for image in test.images[test.labels == label][:SHOWN]])
            for label, name in enumerate(CLASSES)
        ],
        curves=picture(lambda theme: _draw_accuracy(record, theme), "test accuracy by training images"),
        spectra=picture(
            lambda theme: _draw_spectra(record["spectra"], theme), "eigenvalues before and after the root"
        ),
        looks=[_look(network, test, label) for label in range(len(CLASSES))],
        commands=[("do the same with your images", "covpool fit FOLDER")],
        facts=[
            ("Classes", f"{len(CLASSES)}"),
            ("Images per class", "{} training, {} test".format(max(arguments["train"]), arguments["test"])),
            ("Image size", f"{SIDE} px"),
            ("Seeds", str(arguments["seeds"])),
            ("Time", duration(record["seconds"])),
            *environment({**summary, "seed": ""}),
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
    counts = record["arguments"]["train"]
    for name, color in zip(POOLINGS, reversed(theme.series), strict=True):
        lines = 100 * np.array([run["accuracy"][name] for run in record["runs"]])
        axes.plot(counts, lines.T, color=color, linewidth=0.8, alpha=0.45)
        axes.plot(counts, lines.mean(0), color=color, linewidth=2.2, marker="o", ms=3.5, label=NAMES[name])
    axes.axhline(
        100 * record["chance"], color=theme.faint, linewidth=1, linestyle=(0, (1, 2)), label="chance"
    )
    axes.set_ylim(0, 103)
    axes.set_xscale("log")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set_title("Top-1 accuracy on test images (%)", loc="left", fontsize=11, color=theme.ink)
    axes.set_xlabel("training images per class", fontsize=9, color=theme.faint)
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
