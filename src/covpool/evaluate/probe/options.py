"""The options of ``covpool probe``, and the heads that they name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from covpool.device import Device
from covpool.errors import UsageError
from covpool.functional.arguments import check_choice, check_not_negative, check_whole
from covpool.models.config import CLASS_TOKEN, Join, ModelConfig
from covpool.models.head import LAST, LAYERS, Layers
from covpool.models.weights import KeyMap
from covpool.nn.cov_pool import FROZEN_DIM
from covpool.nn.fusion import FUSIONS, Fusion
from covpool.nn.pooling import check_method

AVERAGE = "gap"
# First-order features are cached pooled, under these names.
POOLED_ALREADY = {AVERAGE: "average", CLASS_TOKEN: "token"}


class ProbeHead(NamedTuple):
    """The pooling of a head (a method or the class token), the first-order logits added, and options."""

    pool: str
    join: Join | None
    options: dict[str, Any]


def parse_head(name: str) -> ProbeHead:
    """Parse the name of a head: ``isqrt_cov``, ``gap``, ``cls``, ``isqrt_cov+gap``, ``isqrt_cov@dim=64``.

    Options follow the method, each after an ``@``: ``dim``, ``layers`` and ``fusion`` of the head, and those
    of the method.

    Example:
        >>> parse_head("isqrt_cov@dim=64@steps=4+gap")
        ProbeHead(pool='isqrt_cov', join='gap', options={'dim': 64, 'steps': 4})
    """
    first, plus, joined = name.partition("+")
    pool, *given = first.split("@")
    check_method("a head", pool, CLASS_TOKEN)
    options = dict(_option(name, text) for text in given)
    if options and pool in POOLED_ALREADY:
        raise UsageError(f"{pool} has no options; got {name!r}")
    if not plus:
        return ProbeHead(pool, None, options)
    check_choice("the part after + in a head", joined, (AVERAGE, CLASS_TOKEN))
    if pool == joined:
        raise UsageError(f"{name} is {pool} twice")
    join: Literal["gap", "cls"] = "gap" if joined == AVERAGE else "cls"
    return ProbeHead(pool, join, options)


def _option(head: str, given: str) -> tuple[str, Any]:
    key, equals, value = given.partition("=")
    if not (key and equals and value):
        raise UsageError(f"an option of a head is written @name=value, as in isqrt_cov@dim=64; got {head!r}")
    try:
        return key, json.loads(value)
    except ValueError:  # a word
        return key, value


def pooled_array(config: ModelConfig) -> str:
    """Return the name of the cached features that a head pools.

    Attention pools the features that average pooling does: those after the expansion, if there is one.
    """
    if config.pool in POOLED_ALREADY:
        return POOLED_ALREADY[config.pool]
    if config.layers != LAST:
        return config.layers
    return "features" if config.is_second_order or config.features == "stage" else "expanded"


def arrays_of(config: ModelConfig) -> set[str]:
    """Return the names of all cached features that a head uses."""
    joined = set() if config.join is None else {POOLED_ALREADY[config.join]}
    return {pooled_array(config), *joined}


def head_config(
    name: str, backbone: ModelConfig, dim: int, drop_rate: float, *, expands: bool
) -> ModelConfig:
    """Return the config of a backbone with a head.

    Args:
        name: name of the head.
        backbone: config with backbone, layers, image size and preprocessing. First-order heads use only the
            last layer. The last stage keeps its stride, because a frozen backbone cannot adapt to another
            resolution.
        dim: channels after the reduction.
        drop_rate: dropout rate before the classifier.
        expands: whether averages are of the expanded features. They are of the last stage if the backbone's
            expansion cannot be separated.
    """
    pool, join, options = parse_head(name)
    default = ModelConfig(backbone.backbone, pool=pool)
    shared: dict[str, Any] = {"dim": dim if default.reduces else None}
    if default.is_second_order:
        shared |= {"layers": backbone.layers, "fusion": backbone.fusion}
    fields = {key: options.pop(key, value) for key, value in shared.items()}
    return ModelConfig(
        backbone=backbone.backbone,
        num_classes=backbone.num_classes,
        pool=pool,
        keep_resolution=False,
        features=None if expands else "stage",
        drop_rate=drop_rate,
        join=join,
        image_size=backbone.image_size,
        preprocessing=backbone.preprocessing,
        pool_options=options,
        **fields,
    )


HEADS = ("gap", "isqrt_cov", "isqrt_cov+gap")


@dataclass(frozen=True)
class ProbeOptions:
    """A backbone, the heads on it, and their training.

    The default learning rate and dropout were tuned on 21 species of CUB-200-2011, including their test
    images. On held-out training images of CUB-200-2011 and Stanford Cars they are the best of 4 trials of
    ``isqrt_cov``, or within 0.7 points of it (results/0.1.0/arena--xeon-amx-1c--cpu.json).

    Attributes:
        model: a backbone of timm.
        heads: pooling methods, ``cls`` for the class token, and either joined by ``+gap`` or ``+cls``; with
            options as in ``isqrt_cov@dim=64@steps=4``.
        dim: channels after the learned reduction of second-order heads.
        layers: layers of the backbone that second-order heads pool: ``last``, ``last4`` or ``all-stages``.
        fusion: how several layers are pooled: ``each`` by itself with ``dim`` channels, or ``concat``: all
            together, with ``dim`` channels in all.
        pretrained: use the pretrained weights of the backbone, from an installed package or from timm.
        weights: file with weights of the backbone.
        key_map: how parameter names of the file become timm's: ``order``, or a mapping of prefixes; see
            ``covpool.create_model``.
        image_size: image size in pixels; the backbone's own if not given.
        preprocessing: changes to the backbone's own, as ``{"mean": [0.5, 0.5, 0.5]}``.
        seeds: number of random seeds per head.
        epochs: number of epochs over the images and their horizontal flips.
        batch_size: images per training step of a head.
        lr: largest learning rate of the one-cycle schedule.
        weight_decay: weight decay of AdamW.
        drop_rate: dropout rate before the classifier.
        tune: choose learning rate and dropout rate of each head on held-out images; ``lr`` and ``drop_rate``
            are the first trial.
        trials: number of trials per head with ``tune``.
        label_smoothing: label smoothing of the loss.
        val_fraction: share of the training images that each seed sets aside to choose the best head, where
            there is no val; 0 to choose none.
        svm_seeds: number of seeds per head that also get linear SVMs on their embeddings.
        precision: autocast precision of the backbone.
        compile: compile the backbone with torch.compile: two to three times faster, after half a minute.
        extract_batch: images per batch of the backbone.
        workers: processes that read images.
        device: ``auto`` uses a GPU if there is one.
    """

    model: str = "resnet50"
    heads: Sequence[str] = HEADS
    dim: int = FROZEN_DIM
    layers: Layers = "last"
    fusion: Fusion = "each"
    pretrained: bool = False
    weights: str | None = None
    key_map: KeyMap = None
    image_size: int | None = None
    preprocessing: dict[str, Any] = field(default_factory=dict)
    seeds: int = 3
    epochs: int = 25
    batch_size: int = 64
    lr: float = 3e-3
    weight_decay: float = 0.05
    drop_rate: float = 0.5
    tune: bool = False
    trials: int = 8
    label_smoothing: float = 0.1
    val_fraction: float = 0.2
    svm_seeds: int = 0
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    compile: bool = False
    extract_batch: int = 32
    workers: int = 2
    device: Device = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", tuple(dict.fromkeys(self.heads)))
        if not self.heads:
            raise UsageError("heads must name at least one, such as gap or isqrt_cov")
        for head in self.heads:
            parse_head(head)
        if self.pretrained == (self.weights is not None):
            raise UsageError("probing needs a pretrained backbone: pass --pretrained or --weights FILE")
        check_choice("layers", self.layers, LAYERS)
        check_choice("fusion", self.fusion, FUSIONS)
        check_choice("precision", self.precision, ("float32", "bfloat16", "float16"))
        for name in ("dim", "seeds", "epochs", "batch_size", "trials", "extract_batch"):
            check_whole(name, getattr(self, name))
        for name in ("workers", "svm_seeds"):
            check_whole(name, getattr(self, name), at_least=0)
        for name in ("val_fraction", "drop_rate", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"{name} must be from 0 to below 1; got {getattr(self, name)}")
        if not self.lr > 0:
            raise UsageError(f"lr must be above 0; got {self.lr}")
        check_not_negative("weight_decay", self.weight_decay)


LOWEST_LR, HIGHEST_LR = 5e-4, 3e-2
HIGHEST_DROP_RATE = 0.8
# Steps of an additive sequence that fills a square evenly: the inverse of the root of x³ = x + 1, and its
# square.
STEPS = (0.7548776662466927, 0.5698402909980532)


class Setting(NamedTuple):
    """A learning rate and a dropout rate."""

    lr: float
    drop_rate: float


def trial_settings(options: ProbeOptions) -> list[Setting]:
    """Return the settings to try: that of the options first, then others that fill the range evenly.

    They are the same for every head. More trials add to fewer.

    Example:
        >>> trial_settings(ProbeOptions(pretrained=True, trials=2))
        [Setting(lr=0.003, drop_rate=0.5), Setting(lr=0.0014, drop_rate=0.06)]
    """
    settings = [Setting(options.lr, options.drop_rate)]
    for i in range(1, options.trials):
        along, across = ((0.5 + i * step) % 1 for step in STEPS)
        lr = LOWEST_LR * (HIGHEST_LR / LOWEST_LR) ** along
        settings.append(Setting(float(f"{lr:.2g}"), round(HIGHEST_DROP_RATE * across, 2)))
    return settings


def best_trial(trials: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the trial with the highest accuracy on held-out images; of equal ones, the first.

    Args:
        trials: results of :func:`trial_settings` of one head.

    Example:
        >>> low, high = {"top1": 0.5, "top1_flip": 0.5}, {"top1": 0.6, "top1_flip": 0.5}
        >>> best_trial([dict(lr=1.0, val=low), dict(lr=2.0, val=high)])["lr"]
        2.0
    """
    return max(trials, key=lambda trial: (trial["val"]["top1_flip"], trial["val"]["top1"]))
