"""Heads without training: a basis of the channels by PCA, a fixed pooling method, and a linear classifier.

A frozen model computes the features of an image once, and from them the vectors of all heads. Its reduction
is the basis, the directions of largest variance first, so a head with fewer channels uses its first rows. A
covariance removes the mean of the channels, so the basis needs no bias.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from covpool.arguments import CLASS_TOKEN
from covpool.closed_form.solve import Solution
from covpool.device import has_float64
from covpool.errors import UsageError
from covpool.evaluate.probe.options import ProbeOptions
from covpool.inference import Embed
from covpool.inference.tasks import Columns
from covpool.inference.tasks import Vectors as Embeddings
from covpool.models.config import POOLED_ALREADY, ModelConfig, head_config, parse_head
from covpool.models.create import build_model
from covpool.models.model import PooledClassifier, make_pool
from covpool.nn import CovPool

# Options of the layer that a head of PCA has.
PCA = {"reduction": "linear"}


def is_fixed(head: str) -> bool:
    """Return whether a head has nothing to learn but its classifier.

    Example:
        >>> is_fixed("isqrt_cov@dim=64"), is_fixed("gap"), is_fixed("attentive")
        (True, True, False)
    """
    pool, join, options = parse_head(head)
    if join is not None or options.get("layers", "last") != "last":
        return False
    if pool in POOLED_ALREADY:
        return True
    config = ModelConfig("resnet50", pool=pool)
    if not (config.is_second_order and config.reduces):
        return False
    with torch.device("meta"):
        method_options = {
            key: value for key, value in options.items() if key not in ("dim", "fusion", "layers")
        }
        pooling = CovPool(8, pool, dim=None, **method_options).pooling
    return not list(pooling.parameters())


def fixed_config(head: str, backbone: ModelConfig, dim: int, *, expands: bool) -> ModelConfig:
    """Return the config of a model with a fixed head, as :func:`head_config` does for a trained one."""
    config = head_config(head, backbone, dim, 0.0, expands=expands)
    if config.pool in POOLED_ALREADY:
        return config
    return dataclasses.replace(config, pool_options={**config.pool_options, **PCA})


def frozen_model(backbone: ModelConfig, heads: Sequence[str], options: ProbeOptions) -> PooledClassifier:
    """Return a frozen backbone whose reduction is as wide as the widest head; see :func:`set_basis`."""
    wide = max((parse_head(head).options.get("dim", options.dim) for head in heads), default=options.dim)
    config = dataclasses.replace(
        backbone,
        num_classes=0,
        pool="cov",
        dim=wide,
        join="gap",
        keep_resolution=False,
        pool_options=dict(PCA),
    )
    model = build_model(
        config, pretrained=options.pretrained, checkpoint_path=options.weights, key_map=options.key_map
    )
    if wide > model.num_features:
        raise UsageError(
            f"--dim {wide} is larger than the {model.num_features} channels of {backbone.backbone}: "
            f"use --dim {model.num_features} or less"
        )
    return model


def principal_directions(features: Iterable[Tensor], dim: int) -> Tensor:
    """Return the directions of largest variance, ``(dim, C)`` in float32, the largest first."""
    count, total, products = 0, None, None
    for batch in features:
        batch = batch if has_float64(batch.device) else batch.cpu()
        x_CN = batch.transpose(0, 1).flatten(1).double()
        count += x_CN.shape[1]
        total = x_CN.sum(1) if total is None else total + x_CN.sum(1)
        products = x_CN @ x_CN.T if products is None else products + x_CN @ x_CN.T
    if total is None or products is None:
        raise UsageError("no training image is readable: run 'covpool check'")
    directions = torch.linalg.eigh(products / count - torch.outer(total, total) / count**2).eigenvectors
    directions = directions[:, -dim:].flip(1).T
    # An eigenvector has no sign. Its largest entry becomes positive, so that libraries agree.
    largest = directions.gather(1, directions.abs().argmax(dim=1, keepdim=True))
    basis: Tensor = (directions * largest.sign()).float().contiguous()
    return basis


def basis_of(model: PooledClassifier) -> Tensor:
    """Return the weight of the reduction, ``(dim, C)``."""
    reduction = cast(CovPool, model.pool).reduction
    assert reduction is not None
    return reduction.projection.weight


def set_basis(model: PooledClassifier, basis: Tensor) -> None:
    """Set the reduction of a model to the first directions of a basis."""
    weight = basis_of(model)
    with torch.no_grad():
        weight.copy_(basis[: len(weight)])


@dataclass(frozen=True)
class HeadVectors:
    """The task of bulk inference that computes the pooled vectors of heads, one after the other.

    Attributes:
        heads: names of fixed heads.
        dim: channels of a head that does not name its own.
        flip: not supported.
        precision: precision of the network.
    """

    heads: tuple[str, ...]
    dim: int
    flip: bool = False
    precision: Any = "float32"

    def needs_basis(self, backbone: ModelConfig) -> bool:
        """Return whether a head pools reduced channels."""
        configs = (fixed_config(head, backbone, self.dim, expands=True) for head in self.heads)
        return any(config.pool not in POOLED_ALREADY for config in configs)

    def start(self, model: PooledClassifier) -> PooledHeads:
        """Prepare the heads of a :func:`frozen_model`."""
        return PooledHeads(self, model)


@dataclass(frozen=True)
class ModelVectors:
    """The task of bulk inference that computes the vectors that the classifier of a model receives."""

    flip: bool = False
    precision: Any = "float32"

    def start(self, model: PooledClassifier) -> Embeddings:
        """Prepare the model."""
        return Embeddings(Embed(raw=True), model)


class PooledHeads:
    """Compute the vectors of several heads from one pass of the backbone; see :class:`HeadVectors`."""

    def __init__(self, task: HeadVectors, model: PooledClassifier) -> None:
        self.model = model
        self.pools: dict[str, CovPool | str] = {}
        self.widths: dict[str, int] = {}
        for head in task.heads:
            config = fixed_config(head, model.config, task.dim, expands=True)
            if config.pool in POOLED_ALREADY:
                is_token = config.pool == CLASS_TOKEN
                self.pools[head] = config.pool
                self.widths[head] = model.num_features if is_token else model.expanded_channels
                continue
            pool = make_pool(config, model.format).to(next(model.parameters()))
            assert isinstance(pool, CovPool)
            assert pool.reduction is not None
            weight = pool.reduction.projection.weight
            with torch.no_grad():
                weight.copy_(basis_of(model)[: len(weight)])
            self.pools[head], self.widths[head] = pool.eval(), pool.out_features

    def forward(self, images: Tensor) -> Tensor:
        """Return the vectors of all heads, ``(B, sum of widths)``."""
        return self.pooled(self.model.forward_features(images))

    def pooled(self, features: Tensor) -> Tensor:
        """Return the vectors of all heads from the features of the backbone."""
        model, positions = self.model, self.model.format.positions(features)
        vectors = []
        for pool in self.pools.values():
            if isinstance(pool, CovPool):
                vectors.append(pool(positions))
            elif pool == CLASS_TOKEN:
                vectors.append(model.format.class_token(features))
            else:
                vectors.append(cast(Tensor, model.forward_first_order(features)))
        return torch.cat([vector.float() for vector in vectors], dim=1)

    def columns(self, vectors: Tensor) -> Columns:
        """Return one column with the vectors."""
        return {"vector": vectors.cpu().numpy()}

    def empty(self, count: int) -> Columns:
        """Return vectors of NaN."""
        return {"vector": np.full((count, sum(self.widths.values())), np.nan, dtype=np.float32)}


def solved_model(
    config: ModelConfig, basis: Tensor, solution: Solution, classes: Sequence[str], options: ProbeOptions
) -> PooledClassifier:
    """Return an ordinary model with a basis and a classifier."""
    model = build_model(
        dataclasses.replace(config, num_classes=len(classes)),
        pretrained=options.pretrained,
        checkpoint_path=options.weights,
        key_map=options.key_map,
    )
    if config.pool not in POOLED_ALREADY:
        set_basis(model, basis)
    set_classifier(model, solution, classes)
    return model


def set_classifier(model: PooledClassifier, solution: Solution, classes: Sequence[str]) -> None:
    """Give a model the classes and the classifier of a solution."""
    if model.num_classes != len(classes):
        model.reset_classifier(len(classes))
    with torch.no_grad():
        for parameter, values in zip(
            model.head.classifier.parameters(), (solution.weight, solution.bias), strict=True
        ):
            parameter.copy_(values)
    model.classes = tuple(classes)
    model.eval()
