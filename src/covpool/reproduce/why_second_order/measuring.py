"""Which species, which channels, and what their mean and covariance tell of test images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covpool.data.decode import decode
from covpool.data.sources import open_images
from covpool.data.transforms import Preprocessing, evaluation_transform
from covpool.functional import covariance
from covpool.reproduce.spectra.real import lite0

# A mean says nothing of the species where it differs by less than half its standard error.
SILENT = 0.5


@dataclass(frozen=True)
class Features:
    """Of a split: ``(images, C, n)``, with the labels and names of the images."""

    maps: Tensor
    labels: Tensor
    names: tuple[str, ...]
    classes: tuple[str, ...]

    def of(self, label: int) -> Features:
        """Those of a class."""
        chosen = self.labels == label
        names = tuple(name for name, is_chosen in zip(self.names, chosen.tolist(), strict=True) if is_chosen)
        return Features(self.maps[chosen], self.labels[chosen], names, self.classes)


@torch.no_grad()
def features(data: Path, split: str, weights: Path, size: int) -> Features:
    """The last stage of EfficientNet-Lite0, of every image."""
    model = lite0(weights, size)
    transform = evaluation_transform(Preprocessing.of(model.pretrained_cfg))
    images = open_images(data, split)
    numbers = range(len(images))
    maps = [model.forward_features(transform(decode(images.read(i)))[None]) for i in numbers]
    labels = torch.tensor([images.label(i) for i in numbers])
    return Features(torch.cat(maps).flatten(2), labels, tuple(map(images.name, numbers)), images.classes)


def measure(train: Features, test: Features) -> dict[str, Any]:
    """Species and channels by the training images, all else by the test images."""
    pair = nearest_species(train.maps.mean(-1), train.labels)
    channels = telling_channels(*(train.of(label).maps for label in pair))
    chosen_by = [_species(train, label, channels) for label in pair]
    species = [_species(test, label, channels) for label in pair]
    whats = [f"mean of channel {channel}" for channel in channels] + ["their covariance"]
    return {
        "classes": len(train.classes),
        "species": species,
        "channels": list(channels),
        "numbers": [_number(what, chosen_by, species, i) for i, what in enumerate(whats)],
    }


def nearest_species(means: Tensor, labels: Tensor) -> tuple[int, int]:
    """The two whose mean features differ least, in units of each channel's variance within a species."""
    groups = [means[labels == label] for label in range(int(labels.max()) + 1)]
    centres = torch.stack([group.mean(0) for group in groups])
    spread = torch.stack([group.var(0) for group in groups]).mean(0).clamp_min(1e-12)
    distances = ((centres[:, None] - centres) ** 2 / spread).mean(-1)
    distances.fill_diagonal_(torch.inf)
    first, second = divmod(int(distances.argmin()), len(groups))
    return first, second


def telling_channels(first: Tensor, second: Tensor) -> tuple[int, int]:
    """Two channels whose means say nothing of the species, and whose covariance says most."""
    silent = _t(first.mean(-1), second.mean(-1)).abs() < SILENT
    told = _t(covariance(first), covariance(second)).abs()
    told = torch.where(silent[:, None] & silent, told, 0.0).triu(1)
    one, other = divmod(int(told.argmax()), len(told))
    return one, other


def share_right(first: Tensor, second: Tensor, *, first_is_higher: bool) -> float:
    """Of all pairs of an image of each, how many a number tells apart: the area under the ROC curve."""
    higher = float((first[:, None] > second).double().mean())
    return higher if first_is_higher else 1 - higher


def _species(split: Features, label: int, channels: tuple[int, int]) -> dict[str, Any]:
    """Of each image the two means and the covariance, and the two channels at its places."""
    seen = split.of(label)
    chosen = seen.maps[:, list(channels)]
    numbers = torch.cat([chosen.mean(-1), covariance(chosen)[:, :1, 1]], dim=1)
    return {
        "name": seen.classes[label].partition(".")[2].replace("_", " "),
        "images": [
            {"name": name, "numbers": _rounded(row), "places": _rounded(places)}
            for name, row, places in zip(seen.names, numbers, chosen, strict=True)
        ],
    }


def _number(what: str, train: list[dict[str, Any]], test: list[dict[str, Any]], i: int) -> dict[str, Any]:
    """Which species has the higher number is learned from the training images."""
    learned, values = (
        [torch.tensor([image["numbers"][i] for image in one["images"]]) for one in split]
        for split in (train, test)
    )
    right = share_right(*values, first_is_higher=bool(learned[0].mean() > learned[1].mean()))
    return {
        "what": what,
        "species": [_rounded(torch.stack([v.mean(), v.std()])) for v in values],
        "right": right,
    }


def _t(first: Tensor, second: Tensor) -> Tensor:
    """Welch's t: the difference of two means over its standard error."""
    error = first.var(0) / len(first) + second.var(0) / len(second)
    return (first.mean(0) - second.mean(0)) / error.sqrt().clamp_min(1e-12)


def _rounded(values: Tensor) -> Any:
    return [_rounded(row) for row in values] if values.ndim > 1 else [round(float(v), 3) for v in values]
