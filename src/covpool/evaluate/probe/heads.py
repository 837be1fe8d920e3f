"""Heads by name: what is pooled, and what is joined to it."""

from __future__ import annotations

from typing import Literal, NamedTuple

from covpool.functional.arguments import check_choice
from covpool.models.config import CLASS_TOKEN, Join, ModelConfig
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
        raise ValueError(f"{name} is {pool} twice")
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
