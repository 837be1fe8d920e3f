"""The heads of ``covpool probe`` and ``covpool fit``, and their names."""

from __future__ import annotations

import json
from typing import Any, Literal, NamedTuple

from covpool.arguments import CLASS_TOKEN, LAST, Join, check_choice
from covpool.errors import UsageError
from covpool.evaluate.probe.options import AVERAGE
from covpool.models.config import ModelConfig
from covpool.nn.pooling import check_method

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
