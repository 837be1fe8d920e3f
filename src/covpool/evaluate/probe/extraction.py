"""The features of a set by a frozen backbone: those on disk, or computed now and kept there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from covpool.data.image_set import ImageSet, Subset
from covpool.data.loader import EvaluationLoader
from covpool.data.transforms import Preprocessing, evaluation_transform
from covpool.device import autocast
from covpool.durable import held
from covpool.errors import UsageError
from covpool.evaluate.probe.options import ProbeOptions
from covpool.inference.store import (
    CachedFeatures,
    CacheFolder,
    Content,
    Filling,
    Progress,
    Shapes,
    check_lasting,
    read_content,
)
from covpool.models.config import ModelConfig
from covpool.models.model import PooledClassifier

# Of the files; another number, and those of before are not found.
FORMAT = 3
# Images after which it is written down how far it is.
SAVED_EVERY = 2048
LARGEST_HALF = float(np.finfo(np.float16).max)

Forward = Callable[[Tensor], dict[str, Tensor]]


def frozen_config(config: ModelConfig) -> ModelConfig:
    """What gives the features of a backbone, from the config of a second-order network on it.

    The average is joined, so that it is computed as the first-order twin has it. The last stage stays as it
    was trained.
    """
    return replace(
        config, num_classes=0, pool="cov", dim=None, join="gap", keep_resolution=False, drop_rate=0.0
    )


class Extractor:
    """A frozen backbone, and where the features it gives are kept.

    Args:
        model: of :func:`frozen_config`.
        options: precision, batch size, workers and the like.
        cache: the folder of all features.
        with_maps: keep the features themselves; without, only their average and the class token.
        device: to compute on.
    """

    def __init__(
        self,
        model: PooledClassifier,
        options: ProbeOptions,
        cache: Path,
        with_maps: bool,
        device: torch.device,
    ) -> None:
        self.model = model.eval().to(device)
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # convolutions are faster so
        self.options, self.cache, self.with_maps, self.device = options, cache, with_maps, device
        self.preprocessing = Preprocessing.of(model.pretrained_cfg)
        self.shapes = self._shapes()
        # Every batch has the same size, so it is compiled once.
        self._forward: Forward = (
            torch.compile(self._outputs, options={"freezing": True}) if options.compile else self._outputs
        )
        self._network = _digest_of(model)
        self._contents: dict[Path, Content] = {}

    def folder(self, images: ImageSet, progress: Progress) -> CacheFolder:
        """Where the features of a set are, or would be."""
        content = read_content(images, progress)
        key = {
            "format": FORMAT,
            "images": content.digest,
            "network": self._network,
            "preprocessing": asdict(self.preprocessing),
            "precision": self.options.precision,
        }
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
        self._contents[self.cache / name] = content
        return CacheFolder(self.cache / name, len(images), self.shapes)

    def extract(self, images: ImageSet, folder: CacheFolder, progress: Progress) -> CachedFeatures:
        """What is there already, and the rest."""
        labels = np.asarray(images.labels, dtype=np.int64)
        if folder.state()["done"] < len(images):
            with held(folder.path):
                self._extract(images, folder, progress)
        found = folder.opened(labels)
        if not len(found.usable):
            raise UsageError("none of the images of a split can be used: 'covpool check' tells why")
        return found

    def _extract(self, images: ImageSet, folder: CacheFolder, progress: Progress) -> None:
        folder.begin()
        filling = Filling(folder)
        first, size = filling.first, self.options.extract_batch
        loader = EvaluationLoader(
            Subset(images, np.arange(first, len(images))),
            evaluation_transform(self.preprocessing),
            batch_size=size,
            workers=self.options.workers,
        )
        seen = first
        bad: list[int] = []
        for place, batch in enumerate(loader):
            ids, before = batch.ids.numpy() + first, seen
            if len(ids):
                filling.put(ids, self._computed(batch.images))
            seen = min(seen + size, len(images))
            missing = sorted(set(range(before, seen)) - set(ids.tolist()))
            check_lasting(images, missing, self._contents[folder.path])
            bad += missing
            progress(seen, len(images))
            if (place + 1) * size % SAVED_EVERY < size:
                filling.save(seen, bad)
        filling.save(seen, bad)

    def _computed(self, images: Tensor) -> dict[str, NDArray[np.float16]]:
        """Of a batch, ``(views, B, ...)``."""
        count, wanted = len(images), self.options.extract_batch
        padding = images.new_zeros(wanted - count, *images.shape[1:])
        batch = torch.cat([images, padding]).to(self.device, memory_format=torch.channels_last)
        outputs = [self._run(view) for view in (batch, batch.flip(-1))]
        if not all(value[:count].isfinite().all() for view in outputs for value in view.values()):
            raise UsageError(
                f"in {self.options.precision} the backbone gives numbers that are not finite: "
                "try --precision float32"
            )
        return {name: np.stack([_half(view[name][:count]) for view in outputs]) for name in outputs[0]}

    def _run(self, batch: Tensor) -> dict[str, Tensor]:
        with torch.no_grad(), autocast(self.device, self.options.precision):
            return self._forward(batch)

    def _outputs(self, batch: Tensor) -> dict[str, Tensor]:
        model = self.model
        features = model.forward_features(batch)
        average = model.forward_first_order(features)
        assert average is not None
        found = {"average": average}
        if self.with_maps:
            found["features"] = features
        if model.format.has_class_token:
            found["token"] = model.format.class_token(features)
        return found

    def _shapes(self) -> Shapes:
        size = self.preprocessing.size
        with torch.no_grad():
            one = self._outputs(torch.zeros(1, 3, size, size, device=self.device))
        features = tuple(one["features"].shape[1:]) if self.with_maps else None
        return Shapes(features, one["average"].shape[1], one["token"].shape[1] if "token" in one else None)


def _half(values: Tensor) -> NDArray[np.float16]:
    """What float16 cannot hold is taken for the largest that it can: a head cannot learn from infinities."""
    half: NDArray[np.float16] = (
        values.float().clamp(-LARGEST_HALF, LARGEST_HALF).half().contiguous().cpu().numpy()
    )
    return half


def _digest_of(model: PooledClassifier) -> str:
    """Of all weights that have a part in the features."""
    digest = hashlib.sha256(repr(model.config.backbone).encode())
    for part in model.backbone_parts():
        for name, tensor in sorted(part.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()
