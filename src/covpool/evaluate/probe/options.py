"""The options of ``covpool probe``. Importing them is quick: it does not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from covpool.arguments import (
    FROZEN_DIM,
    FUSIONS,
    LAYERS,
    Device,
    Fusion,
    KeyMap,
    Layers,
    check_choice,
    check_not_negative,
    check_whole,
)
from covpool.errors import UsageError

AVERAGE = "gap"
HEADS = ("gap", "isqrt_cov", "isqrt_cov+gap")


class Setting(NamedTuple):
    """A learning rate and a dropout rate."""

    lr: float
    drop_rate: float


# By kind of head, the best settings on held-out images of the contest (lab/contest.md); a test compares them.
DEFAULTS = {
    "average": Setting(1e-2, 0.0),
    "attentive": Setting(1e-3, 0.0),
    "covariance": Setting(3e-3, 0.0),
}


@dataclass(frozen=True)
class ProbeOptions:
    """A backbone, the heads on it, and their training.

    The default learning rate and dropout depend on the kind of head. They were the best on held-out training
    images (lab/contest.md).

    Attributes:
        model: a backbone of timm.
        heads: names of pooling methods, or ``cls`` for the class token. ``+gap`` or ``+cls`` after a name
            adds the logits of average pooling or of the class token. Options of the method stand before it,
            as in ``isqrt_cov@dim=64@steps=4+gap``.
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
        lr: largest learning rate of the one-cycle schedule; by default the best for the kind of head.
        weight_decay: weight decay of AdamW.
        drop_rate: dropout rate before the classifier; by default the best for the kind of head.
        tune: choose learning rate and dropout rate of each head on held-out images; the first trial has
            ``lr`` and ``drop_rate``.
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
    lr: float | None = None
    weight_decay: float = 0.05
    drop_rate: float | None = None
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
        if self.pretrained == (self.weights is not None):
            raise UsageError("probing needs a pretrained backbone: pass --pretrained or --weights FILE")
        check_choice("layers", self.layers, LAYERS)
        check_choice("fusion", self.fusion, FUSIONS)
        check_choice("precision", self.precision, ("float32", "bfloat16", "float16"))
        for name in ("dim", "seeds", "epochs", "batch_size", "trials", "extract_batch"):
            check_whole(name, getattr(self, name))
        if self.image_size is not None:
            check_whole("image_size", self.image_size)
        for name in ("workers", "svm_seeds"):
            check_whole(name, getattr(self, name), at_least=0)
        for name in ("val_fraction", "drop_rate", "label_smoothing"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise UsageError(f"{name} must be from 0 to below 1; got {value}")
        if self.lr is not None and not self.lr > 0:
            raise UsageError(f"lr must be above 0; got {self.lr}")
        check_not_negative("weight_decay", self.weight_decay)
        # Last, and here: these import torch.
        from covpool.models.config import parse_head
        from covpool.models.surgery import check_backbone

        check_backbone(self.model)
        for head in self.heads:
            parse_head(head)

    def setting(self, head: str) -> Setting:
        """Return the learning rate and the dropout rate of a head."""
        default = DEFAULTS[kind_of(head)]
        return Setting(
            default.lr if self.lr is None else self.lr,
            default.drop_rate if self.drop_rate is None else self.drop_rate,
        )


def kind_of(head: str) -> str:
    """Return the kind of a head, a key of ``DEFAULTS``. Learned first-order pooling counts as attentive.

    Example:
        >>> kind_of("gap"), kind_of("simpool"), kind_of("isqrt_cov+gap")
        ('average', 'attentive', 'covariance')
    """
    from covpool.models.config import POOLED_ALREADY, parse_head  # here: they import torch
    from covpool.nn.pooling import METHODS

    pool = parse_head(head).pool
    if pool in POOLED_ALREADY:
        return "average"
    return "covariance" if METHODS[pool].order > 1 else "attentive"


LOWEST_LR, HIGHEST_LR = 5e-4, 3e-2
HIGHEST_DROP_RATE = 0.8
# Steps of an additive sequence that fills a square evenly: the inverse of the root of x³ = x + 1, and its
# square.
STEPS = (0.7548776662466927, 0.5698402909980532)


def trial_settings(options: ProbeOptions, head: str) -> list[Setting]:
    """Return the settings to try: that of the options first, then others that fill the range evenly.

    The others are the same for every head. More trials add to fewer.

    Example:
        >>> trial_settings(ProbeOptions(pretrained=True, trials=2), "isqrt_cov")
        [Setting(lr=0.003, drop_rate=0.0), Setting(lr=0.0014, drop_rate=0.06)]
    """
    settings = [options.setting(head)]
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
