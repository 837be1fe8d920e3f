"""Extract features with a frozen backbone, and train heads and SVMs on them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

from covpool.arguments import LAST, SEVERAL
from covpool.data.image_set import ImageSet
from covpool.data.look import Content, Progress, read_content
from covpool.data.order import number, permutation
from covpool.data.transforms import Preprocessing
from covpool.errors import UsageError
from covpool.evaluate.probe.options import ProbeOptions
from covpool.evaluate.svm.classifier import unit_parts
from covpool.evaluate.svm.solvers import (
    LinearScores,
    Problem,
    bytes_in_memory,
    solve_in_memory,
    solve_streaming,
)
from covpool.inference.forward import Outputs, Pass, prepare
from covpool.inference.store import VIEWS, CachedFeatures, FeatureStore
from covpool.models.config import POOLED_ALREADY, ModelConfig, arrays_of, pooled_array
from covpool.models.create import parameter_groups
from covpool.models.model import PooledClassifier
from covpool.nn.fusion import last_layers, layer_maps, stacked
from covpool.processes import Processes
from covpool.storage.files import Digest, digest
from covpool.storage.folders import held

# Part of the key of features. Raise it when the contents of the files change.
FORMAT = 3


def frozen_config(config: ModelConfig) -> ModelConfig:
    """Return the config of the network that computes features, from that of a second-order network.

    Global average pooling is joined, so that it is computed as in the average-pooling baseline. The last
    stage stays as it was trained.
    """
    return replace(
        config,
        num_classes=0,
        pool="cov",
        dim=None,
        layers=LAST,
        join="gap",
        keep_resolution=False,
        drop_rate=0.0,
    )


class Extractor:
    """A frozen backbone and the folder of its features.

    Args:
        model: a model of :func:`frozen_config`.
        options: precision, batch size, workers and others.
        cache: the folder of all features.
        arrays: names of the features to store. Their average and the class token are always stored.
        device: computes the features.
    """

    def __init__(
        self,
        model: PooledClassifier,
        options: ProbeOptions,
        cache: Path,
        arrays: Collection[str],
        device: torch.device,
    ) -> None:
        self.model = prepare(model, device)
        self.options, self.cache, self.arrays, self.device = options, cache, arrays, device
        self.preprocessing = Preprocessing.of(model.pretrained_cfg)
        size = self.preprocessing.size
        with torch.no_grad():
            outputs = self._outputs(torch.zeros(1, 3, size, size, device=device))
        self.shapes = {name: tuple(values.shape[1:]) for name, values in outputs.items()}
        # Every batch has the same size, so it is compiled once.
        self._forward: Callable[[Tensor], Outputs] = (
            torch.compile(self._outputs, options={"freezing": True}) if options.compile else self._outputs
        )
        self._network = _digest_of(model)
        self._contents: dict[Path, Content] = {}

    def store(self, images: ImageSet, progress: Progress) -> FeatureStore:
        """Return the store of a set, which may be empty."""
        content = read_content(images, progress)
        key = {
            "format": FORMAT,
            "images": content.digest,
            "network": self._network,
            "preprocessing": asdict(self.preprocessing),
            "precision": self.options.precision,
        }
        name = digest(json.dumps(key, sort_keys=True))[:32]
        self._contents[self.cache / name] = content
        return FeatureStore(self.cache / name, key, len(images), self.shapes)

    def extract(self, images: ImageSet, store: FeatureStore, progress: Progress) -> CachedFeatures:
        """Return the features of a set; compute those that are missing or were changed."""
        options, alone = self.options, Processes(0, 1, self.device)
        passing = Pass(options.extract_batch, options.workers, options.precision)
        store.check()
        if store.state().done < len(images):
            with held(store.folder):
                store.fill(
                    images,
                    self._contents[store.folder],
                    lambda part: passing.run(self.model, part, alone, self._forward, views="flip", pad=True),
                    progress,
                )
        cached = store.opened(np.asarray(images.labels, dtype=np.int64))
        if not len(cached.usable):
            raise UsageError("none of the images of a split is readable: run 'covpool check'")
        return cached

    def _outputs(self, batch: Tensor) -> Outputs:
        model, layers = self.model, [name for name in SEVERAL if name in self.arrays]
        if layers:
            features, maps = layer_maps(model.backbone, batch, layers[-1])
        else:
            features, maps = model.forward_features(batch), []
        average = model.forward_first_order(features)
        assert average is not None
        outputs = {"average": average}
        outputs |= {name: stacked(last_layers(maps, name)) for name in layers}
        if "features" in self.arrays:
            outputs["features"] = features
        if "expanded" in self.arrays and model.expansion is not None:
            outputs["expanded"] = model.expansion(features)
        if model.format.has_class_token:
            outputs["token"] = model.format.class_token(features)
        return outputs


def _digest_of(model: PooledClassifier) -> str:
    """Hash all weights that the features depend on."""
    digest = Digest(repr(model.config.backbone).encode())
    for part in model.backbone_parts():
        for name, tensor in sorted(part.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()


EVALUATED_AT_ONCE = 256


@dataclass(frozen=True)
class Rows:
    """Features of some images, some of them flipped, as inputs of a head."""

    arrays: dict[str, Tensor]
    labels: Tensor


def read_rows(
    cached: CachedFeatures,
    model: PooledClassifier,
    ids: NDArray[np.int64],
    views: NDArray[np.int64],
    device: torch.device,
) -> Rows:
    """Load the features that the model's head needs from disk to the device."""
    arrays = {
        name: torch.from_numpy(np.asarray(cached.arrays[name][ids, views])).to(device).float()
        for name in arrays_of(model.config)
    }
    return Rows(arrays, torch.from_numpy(cached.labels[ids]).to(device))


def vector_of(model: PooledClassifier, rows: Rows) -> tuple[Tensor, Tensor | None]:
    """Return the pooled vector, and the first-order vector if the head has a joined classifier."""
    join, features = model.config.join, rows.arrays[pooled_array(model.config)]
    vector = features if model.config.pool in POOLED_ALREADY else model.forward_pool(features)
    return vector, None if join is None else rows.arrays[POOLED_ALREADY[join]]


def fit_head(
    model: PooledClassifier,
    cached: CachedFeatures,
    ids: NDArray[np.int64],
    options: ProbeOptions,
    seed: int,
    progress: Callable[[int, int], None],
) -> None:
    """Train all of a model but its backbone, on the images ``ids``.

    The order of the images and dropout depend only on the seed.
    """
    device = next(model.parameters()).device
    model.freeze("backbone")
    batch_size = min(options.batch_size, VIEWS * len(ids))
    steps = options.epochs * (VIEWS * len(ids) // batch_size)
    lr = options.setting(model.config.pool).lr
    groups = parameter_groups(
        model, lr, weight_decay=options.weight_decay, classifier_factor=1.0, decay_norms=False
    )
    optimizer = AdamW(groups, fused=True)
    schedule = OneCycleLR(optimizer, [lr] * len(groups), total_steps=max(steps, 2))
    torch.manual_seed(number("probe", seed))
    model.train()
    for step, (some, views) in enumerate(_batches(ids, batch_size, options.epochs, seed)):
        rows = read_rows(cached, model, some, views, device)
        logits = model.classify(*vector_of(model, rows))
        loss = F.cross_entropy(logits, rows.labels, label_smoothing=options.label_smoothing)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        progress(step + 1, steps)
    model.eval()


def head_outputs(
    model: PooledClassifier, cached: CachedFeatures, ids: NDArray[np.int64], *, pre_logits: bool = False
) -> Iterator[tuple[NDArray[np.int64], Tensor]]:
    """Yield outputs in chunks, because the logits of many classes would not fit into memory.

    Yields:
        Ids of some images, and the logits of the images and their flips, ``(views, images, classes)``; with
        ``pre_logits`` the inputs of the classifiers.
    """
    device = next(model.parameters()).device
    model.eval()
    for start in range(0, len(ids), EVALUATED_AT_ONCE):
        some, scores = ids[start : start + EVALUATED_AT_ONCE], []
        with torch.no_grad():
            for view in range(VIEWS):
                rows = read_rows(cached, model, some, np.full(len(some), view), device)
                scores.append(model.classify(*vector_of(model, rows), pre_logits).cpu())
        yield some, torch.stack(scores)


def _batches(
    ids: NDArray[np.int64], batch_size: int, epochs: int, seed: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield image ids and views, each pair once per epoch; the last incomplete batch is dropped."""
    for epoch in range(epochs):
        order = permutation(VIEWS * len(ids), "probe order", seed, epoch)
        for start in range(0, len(order) - batch_size + 1, batch_size):
            some = order[start : start + batch_size]
            yield ids[some % len(ids)], some // len(ids)


# Rows × columns × classes above which the streaming solver is faster: it solves all classes at once, and at
# the size of CUB-200-2011 takes a sixth of LinearSVC's time.
LARGE = 5e9
MAX_MEMORY = 8e9  # bytes


@dataclass(frozen=True, eq=False)
class _Array:
    """Rows in memory, with the interface of :class:`covpool.evaluate.svm.solvers.Rows`."""

    values: NDArray[np.float32]

    @property
    def columns(self) -> int:
        return int(self.values.shape[1])

    def read(self, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        return self.values[numbers]


def fit_svms(model: PooledClassifier, train: CachedFeatures, scratch: Path) -> LinearScores:
    """Fit one SVM per class on the training images and their flips; ``scratch`` holds temporary files."""
    vectors = unit_vectors(model, train).flatten(0, 1).numpy()
    labels = np.tile(train.labels[train.usable], VIEWS)
    problem = Problem(_Array(vectors), np.arange(len(vectors)), labels, model.num_classes)
    is_small = bytes_in_memory(*vectors.shape) < MAX_MEMORY and vectors.size * model.num_classes < LARGE
    if is_small:
        return solve_in_memory(problem)
    return solve_streaming(problem, scratch)


def svm_scores(model: PooledClassifier, scores: LinearScores, test: CachedFeatures) -> Tensor:
    """Return the scores of the readable images and their flips, ``(views, images, classes)``."""
    return torch.stack([torch.from_numpy(scores.of(view.numpy())) for view in unit_vectors(model, test)])


def unit_vectors(model: PooledClassifier, cached: CachedFeatures) -> Tensor:
    """Return the embeddings ``(views, images, v)``, scaled to unit length."""
    received = torch.cat(
        [part for _, part in head_outputs(model, cached, cached.usable, pre_logits=True)], dim=1
    )
    return unit_parts(model, received.flatten(0, 1)).unflatten(0, received.shape[:2])  # type: ignore[no-any-return]
