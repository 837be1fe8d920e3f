"""The options of a probe, and the heads that they name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from covpool.errors import UsageError
from covpool.functional.arguments import check_choice, check_not_negative, check_whole
from covpool.models.config import CLASS_TOKEN, Join, ModelConfig
from covpool.models.weights import KeyMap
from covpool.nn import methods

AVERAGE = "gap"


class ProbeHead(NamedTuple):
    """What a head pools (a method, or the class token), and the first-order logits that are added."""

    pool: str
    join: Join | None


def parse_head(name: str) -> ProbeHead:
    """``isqrt_cov``, ``gap``, ``cls``, ``isqrt_cov+gap``, ``moment_probing+cls`` and so on.

    Example:
        >>> parse_head("isqrt_cov+gap")
        ProbeHead(pool='isqrt_cov', join='gap')
    """
    pool, plus, joined = name.partition("+")
    check_choice("a head", pool, (*methods(), CLASS_TOKEN))
    if not plus:
        return ProbeHead(pool, None)
    check_choice("what is joined to a head", joined, (AVERAGE, CLASS_TOKEN))
    if pool == joined:
        raise UsageError(f"{name} is {pool} twice")
    join: Literal["gap", "cls"] = "gap" if joined == AVERAGE else "cls"
    return ProbeHead(pool, join)


# What is kept of an image beside its maps is pooled already; by what it is called there.
POOLED_ALREADY = {AVERAGE: "average", CLASS_TOKEN: "token"}


def head_config(
    name: str, backbone: ModelConfig, dim: int, drop_rate: float, *, expands: bool
) -> ModelConfig:
    """The network of a backbone and a head.

    Args:
        name: of the head.
        backbone: its image size and preprocessing count; the last stage stays as it was trained, for what
            is frozen cannot get used to another resolution.
        dim: channels after the reduction.
        drop_rate: before the classifier.
        expands: whether averages are of expanded features. Where the backbone's expansion cannot be told from
            the rest of it, they are those of its stage.
    """
    pool, join = parse_head(name)
    own = ModelConfig(backbone.backbone, pool=pool)
    return ModelConfig(
        backbone=backbone.backbone,
        num_classes=backbone.num_classes,
        pool=pool,
        dim=dim if own.reduces else None,
        keep_resolution=False,
        features=None if expands else "stage",
        drop_rate=drop_rate,
        join=join,
        image_size=backbone.image_size,
        preprocessing=backbone.preprocessing,
    )


HEADS = ("gap", "isqrt_cov", "isqrt_cov+gap")


@dataclass(frozen=True)
class ProbeOptions:
    """A backbone, the heads on it, and how they learn.

    The rates and the like were found on 21 species of CUB-200-2011, their test images included, and are used
    as they are on all other sets of docs/probing.md.

    Attributes:
        model: a backbone of timm.
        heads: a pooling method, ``cls`` for the class token, and either joined by ``+gap`` or ``+cls``.
        dim: channels after the learned reduction of second-order heads.
        pretrained: timm's weights of the backbone, downloaded.
        weights: the backbone's weights, of a file.
        key_map: how the file's names become timm's; see :func:`covpool.create_model`.
        image_size: the side of the images, ``None`` for the backbone's own.
        preprocessing: what differs from the backbone's own.
        seeds: of every head so many are trained, from 0 on.
        epochs: over the images and their mirrors.
        batch_size: of a step.
        lr: the learning rate at its highest: one cycle of AdamW.
        weight_decay: of AdamW.
        drop_rate: dropout before the classifier.
        label_smoothing: the share of every label that is spread over all classes.
        val_fraction: of the training images, set aside by each seed to choose the best head by, where there
            is no val; 0 to choose none.
        svm_seeds: linear SVMs too, on the vectors of so many seeds of every head.
        precision: in which the backbone runs, by autocast.
        compile: the backbone by torch.compile, with its weights as constants: two to three times faster,
            after half a minute.
        extract_batch: images in a step of the backbone.
        workers: processes that read images.
        device: ``auto`` takes a GPU if there is one.
    """

    model: str
    heads: tuple[str, ...] = HEADS
    dim: int = 128
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
    label_smoothing: float = 0.1
    val_fraction: float = 0.2
    svm_seeds: int = 0
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    compile: bool = False
    extract_batch: int = 32
    workers: int = 2
    device: Literal["auto", "cpu", "cuda"] = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", tuple(dict.fromkeys(self.heads)))
        if not self.heads:
            raise UsageError("heads must name at least one, such as gap or isqrt_cov")
        for head in self.heads:
            parse_head(head)
        if self.pretrained == (self.weights is not None):
            raise UsageError(
                "a frozen backbone is worth its weights: give --pretrained, for timm's, or --weights FILE"
            )
        check_choice("precision", self.precision, ("float32", "bfloat16", "float16"))
        for name in ("dim", "seeds", "epochs", "batch_size", "extract_batch"):
            check_whole(name, getattr(self, name))
        for name in ("workers", "svm_seeds"):
            check_whole(name, getattr(self, name), at_least=0)
        for name in ("val_fraction", "drop_rate", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"{name} must be from 0 to below 1; got {getattr(self, name)}")
        if not self.lr > 0:
            raise UsageError(f"lr must be above 0; got {self.lr}")
        check_not_negative("weight_decay", self.weight_decay)
