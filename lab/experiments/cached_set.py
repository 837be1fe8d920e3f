"""The cached features of a set on a frozen backbone, and heads in closed form on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from covpool.closed_form.heads import principal_directions
from covpool.closed_form.solve import Solution, solve
from covpool.closed_form.sums import Rows, Sums
from covpool.evaluate.probe import ProbeOptions
from covpool.evaluate.probe.probing import Probing
from covpool.functional import isqrt_cov, triu_vec
from covpool.inference import Precision
from covpool.terminal import NamedProgress

Ids = NDArray[np.int64]


class CachedSet:
    """Features of the training and test images, computed once into a folder.

    Args:
        data: images with train and test by class.
        runs: folder of the features.
        model: a backbone of timm.
        weights: file with its weights; the pretrained ones if not given.
        size: image size in pixels.
        heads: heads that will read the features.
        precision: autocast precision of the backbone.
        compile: compile the backbone.
    """

    def __init__(
        self,
        data: Path,
        runs: Path,
        model: str,
        size: int,
        heads: Sequence[str] = ("gap", "isqrt_cov"),
        weights: Path | None = None,
        *,
        precision: Precision = "float32",
        compile: bool = False,
    ) -> None:
        self.options = ProbeOptions(
            model,
            heads=heads,
            image_size=size,
            workers=1,
            pretrained=weights is None,
            weights=None if weights is None else str(weights),
            precision=precision,
            compile=compile,
        )
        with NamedProgress() as progress:
            self.probing = Probing(
                data,
                self.options,
                runs / f"{data.name}-{model}-{size}-features",
                runs / "cache",
                100.0,
                "auto",
                progress.log,
                progress,
                torch.device("cpu"),
            )
            self.cached = self.probing._features()[0]
        self.classes = tuple(self.probing.train_images.classes)
        self.labels = {split: torch.from_numpy(cached.labels) for split, cached in self.cached.items()}

    def all_of(self, split: str) -> Ids:
        """Return the numbers of the readable images of a split."""
        return self.cached[split].usable

    def maps(self, split: str, ids: Ids) -> Tensor:
        """Return the features ``(B, C, n)`` of some images."""
        return torch.from_numpy(np.asarray(self.cached[split].arrays["features"][ids, 0])).float().flatten(2)

    def averages(self, split: str, ids: Ids) -> Tensor:
        """Return the averages ``(B, C)``."""
        return torch.from_numpy(np.asarray(self.cached[split].arrays["average"][ids, 0])).float()

    def basis(self, ids: Ids, dim: int) -> Tensor:
        """Return the basis of some training images."""
        return principal_directions((self.maps("train", part) for part in parts_of(ids)), dim)

    def covariances(self, split: str, ids: Ids, basis: Tensor) -> Tensor:
        """Return the vectors of isqrt_cov ``(B, p)``."""
        return torch.cat([triu_vec(isqrt_cov(basis @ self.maps(split, part))) for part in parts_of(ids)])

    def pooled(self, pool: nn.Module, split: str, ids: Ids) -> Tensor:
        """Return the vectors ``(B, p)`` of a layer."""
        with torch.inference_mode():
            return torch.cat([pool(self.maps(split, part)) for part in parts_of(ids)])

    def solved(self, vectors: Tensor, ids: Ids) -> Solution:
        """Solve a classifier of all classes from some training images."""
        sums = Sums("", self.classes, vectors.shape[1])
        sums.add(Rows(vectors, self.labels["train"][ids], torch.from_numpy(ids)))
        return solve(sums)

    def right(self, solution: Solution, split: str, ids: Ids, vectors: Tensor) -> NDArray[np.bool_]:
        """Return which images a solution classifies correctly."""
        scores = vectors.double() @ solution.weight.T + solution.bias
        hits: NDArray[np.bool_] = (scores.argmax(dim=1) == self.labels[split][ids]).numpy()
        return hits


def parts_of(ids: Ids) -> list[Ids]:
    """Split the numbers of images into batches."""
    return np.split(ids, range(64, len(ids), 64))
