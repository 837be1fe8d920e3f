"""The configuration of a model, as arguments, in memory and in JSON, and the classifier that it describes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covpool.arguments import (
    CLASS_TOKEN,
    FUSIONS,
    LAST,
    LAYERS,
    Fusion,
    Join,
    Layers,
    check_choice,
    check_whole,
)
from covpool.errors import UsageError, UsageTypeError
from covpool.nn.pooling import DEFAULT_METHOD, METHODS, check_method, is_method
from covpool.nn.pooling.isqrt_cov import IsqrtCovOptions

Dim = int | Literal["auto"] | None
Features = Literal["stage", "head"]
HeadKind = Literal["linear", "mlp"]
Normalize = Literal["l2"]

# First-order features are cached pooled, under these names.
POOLED_ALREADY = {"gap": "average", CLASS_TOKEN: "token"}
# Values of timm's ``global_pool`` that have another name here.
TIMM_POOLS = {"avg": "gap", "token": CLASS_TOKEN}
# The hidden layers of the paper's AlexNet and VGG.
HIDDEN = (4096, 4096)


def pool_of(global_pool: str) -> str:
    """Return the pooling method for a value of timm's ``global_pool``; methods of covpool are accepted too.

    Example:
        >>> pool_of("avg"), pool_of("isqrt_cov")
        ('gap', 'isqrt_cov')
    """
    if not is_method(global_pool):  # timm's names come first in the message
        check_choice("global_pool", global_pool, (*TIMM_POOLS, *METHODS, CLASS_TOKEN))
    return TIMM_POOLS.get(global_pool, global_pool)


@dataclass(frozen=True)
class ModelConfig:
    """The arguments of :func:`covpool.create_model` that define a network. All values fit into JSON.

    The ``config`` of a built model has the chosen values in place of ``None`` and ``"auto"``.

    Attributes:
        backbone: a name of timm, or ``"alexnet"``.
        num_classes: 0 for no classifier.
        pool: a method of :func:`covpool.nn.methods`, or ``"cls"`` for a transformer's class token.
        dim: channels after the reduction; ``None`` for no reduction. ``"auto"`` is 256 if the backbone has
            more channels, else ``None``; always ``None`` for a first-order method and for one that projects
            the channels itself (``moment_probing``).
        keep_resolution: skip the last halving of the resolution. ``None``: if the architecture allows it and
            the method is second-order.
        features: features before (``"stage"``) or after (``"head"``) the channel expansion of EfficientNet,
            MobileNet and similar networks. ``None``: before it for a second-order method.
        layers: layers of the backbone that are pooled: the last one, the last four or all.
        fusion: ``"each"`` pools every layer and concatenates the vectors; ``"concat"`` pools all reduced
            channels together, with ``dim`` channels in all.
        head: ``"linear"``, or ``"mlp"`` with ``hidden`` layers.
        rank: rank of a bottleneck before a linear classifier, ``None`` for none.
        hidden: widths of the hidden layers of ``head="mlp"``.
        hidden_batchnorm: BatchNorm after each hidden layer.
        drop_rate: dropout before the classifier and after hidden layers.
        join: add first-order logits, from the class token (``"cls"``) or from average pooling (``"gap"``),
            after the expansion if there is one.
        normalize: ``"l2"`` divides the input of the classifier by its norm; with ``join``, each part by its
            own norm.
        image_size: image size (pixels), ``None`` for the backbone's default.
        pool_options: options of the method and of :class:`covpool.nn.CovPool`.
        backbone_options: options of timm's ``create_model``.
        preprocessing: ``mean``, ``std``, ``interpolation``, ``crop_pct`` and ``crop_mode`` that differ from
            those of the backbone.
    """

    backbone: str
    num_classes: int = 1000
    pool: str = DEFAULT_METHOD
    dim: Dim = "auto"
    keep_resolution: bool | None = None
    features: Features | None = None
    layers: Layers = "last"
    fusion: Fusion = "each"
    head: HeadKind = "linear"
    rank: int | None = None
    hidden: tuple[int, ...] = HIDDEN
    hidden_batchnorm: bool = False
    drop_rate: float = 0.0
    join: Join | None = None
    normalize: Normalize | None = None
    image_size: int | None = None
    pool_options: dict[str, Any] = field(default_factory=dict)
    backbone_options: dict[str, Any] = field(default_factory=dict)
    preprocessing: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.backbone, str):
            raise UsageTypeError(
                f"backbone is the name of a network of timm; got a {type(self.backbone).__name__}"
            )
        check_method("pool", self.pool, CLASS_TOKEN)
        check_choice("features", self.features, (None, "stage", "head"))
        check_choice("layers", self.layers, LAYERS)
        check_choice("fusion", self.fusion, FUSIONS)
        check_choice("head", self.head, ("linear", "mlp"))
        check_choice("join", self.join, (None, "cls", "gap"))
        check_choice("normalize", self.normalize, (None, "l2"))
        check_choice("keep_resolution", self.keep_resolution, (None, True, False))
        if self.rank is not None and self.head == "mlp":
            raise UsageError('rank is a bottleneck before a linear classifier: with head="mlp" use hidden=')
        object.__setattr__(self, "hidden", tuple(self.hidden))  # JSON and command lines bring lists
        # JSON has the names of dtypes.
        options = {
            key: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
            for key, value in self.pool_options.items()
        }
        object.__setattr__(self, "pool_options", options)
        self._check_pool_options()
        self._check_sizes()
        self._check_layers()

    def _check_layers(self) -> None:
        if self.layers == LAST:
            return
        if not self.is_second_order:
            raise UsageError(f"layers={self.layers!r} is for second-order pooling; got pool={self.pool!r}")
        if self.join == CLASS_TOKEN or self.features == "head":
            raise UsageError(
                f'layers={self.layers!r} pools maps before the expansion: use join="gap" or no join, and '
                'features="stage"'
            )

    def _check_pool_options(self) -> None:
        if taken := sorted({"dim", "layout"} & self.pool_options.keys()):
            raise UsageError(
                f"pool_options has {', '.join(taken)}, which the model sees to: give dim= itself"
            )
        if self.pool == CLASS_TOKEN and (self.pool_options or self.dim not in (None, "auto")):
            raise UsageError("the class token is taken as it is: leave dim and pool_options out")

    def _check_sizes(self) -> None:
        check_whole("num_classes", self.num_classes, at_least=0)
        for name in ("rank", "image_size"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name))
        for width in self.hidden:
            check_whole("every width of hidden", width)
        if self.head == "mlp" and not self.hidden:
            raise UsageError('head="mlp" needs the widths of its hidden layers: pass hidden=(4096, 4096)')
        if not 0.0 <= self.drop_rate < 1.0:
            raise UsageError(f"drop_rate must be from 0 to below 1; got {self.drop_rate}")

    @property
    def is_second_order(self) -> bool:
        """Whether the method pools products of channels."""
        return self.pool != CLASS_TOKEN and METHODS[self.pool].order > 1

    @property
    def reduces(self) -> bool:
        """Whether ``dim="auto"`` adds a reduction: second-order methods that do not project the channels."""
        return self.is_second_order and not METHODS[self.pool].reduces

    def with_iteration(self, otherwise: Mapping[str, Any] = MappingProxyType({})) -> ModelConfig:
        """Return the configuration with ``iteration`` and ``steps`` of ``isqrt_cov`` in its pool options.

        A saved model names both, so that a new default of covpool does not change it.

        Args:
            otherwise: pool options to take both from if those of the configuration have neither.
        """
        if self.pool != "isqrt_cov":
            return self
        source = self.pool_options if self.pool_options.keys() & {"iteration", "steps"} else otherwise
        chosen = IsqrtCovOptions(**{key: source[key] for key in ("iteration", "steps") if key in source})
        options = {**self.pool_options, "iteration": chosen.iteration, "steps": chosen.steps}
        return dataclasses.replace(self, pool_options=options)

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration for JSON."""
        return {**dataclasses.asdict(self.with_iteration()), "hidden": list(self.hidden)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """Undo :meth:`to_dict`; an unknown name raises an error."""
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(values.keys() - known):
            raise UsageError(f"a model has no {', '.join(unknown)}; it has {', '.join(sorted(known))}")
        return cls(**values)


class ProbeHead(NamedTuple):
    """The pooling of a head (a method or the class token), the first-order logits added, and options."""

    pool: str
    join: Join | None
    options: dict[str, Any]


NO_OPTION = "an option of a head is written @name=value, as in isqrt_cov@dim=64; got {!r}"


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
    if ":" in pool or "=" in pool:
        raise UsageError(NO_OPTION.format(name))
    check_method("a head", pool, CLASS_TOKEN)
    options = dict(_option(name, text) for text in given)
    if options and pool in POOLED_ALREADY:
        raise UsageError(f"{pool} has no options; got {name!r}")
    if not plus:
        return ProbeHead(pool, None, options)
    check_choice("the part after + in a head", joined, ("gap", CLASS_TOKEN))
    if pool == joined:
        raise UsageError(f"{name} is {pool} twice")
    join: Literal["gap", "cls"] = "gap" if joined == "gap" else "cls"
    return ProbeHead(pool, join, options)


def _option(head: str, given: str) -> tuple[str, Any]:
    key, equals, value = given.partition("=")
    if not (key and equals and value):
        raise UsageError(NO_OPTION.format(head))
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


class Head(nn.Module):
    """Optional hidden layers, optional normalization, dropout, classifier.

    The pooled vector is long, d(d+1)/2 values. At 1,000 classes a dense classifier has as many parameters as
    a backbone. A bottleneck makes more classes possible:

    ============================ =========================================
    ``Head(v, k)``               dense: v·k weights
    ``Head(v, k, rank=r)``       low rank, still linear: r·(v + k)
    ``Head(v, k, hidden=(h,))``  an MLP with ReLU: v·h + h·k
    ============================ =========================================

    Args:
        in_features: v, the length of the pooled vector.
        num_classes: k; 0 for no classifier.
        rank: r, or ``None``.
        hidden: widths of hidden layers; the paper's AlexNet and VGG have (4096, 4096).
        batchnorm: BatchNorm after each hidden layer.
        drop_rate: dropout after each hidden layer, or on the vector if there is none.
        normalize: ``"l2"`` divides the input of the classifier by its norm.

    Shapes:
        ``(B, in_features)`` to ``(B, num_classes)``; ``(B, hidden_size)`` with ``pre_logits=True``.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        rank: int | None = None,
        hidden: Sequence[int] = (),
        batchnorm: bool = False,
        drop_rate: float = 0.0,
        normalize: Literal["l2"] | None = None,
    ) -> None:
        super().__init__()
        self.classifier: nn.Module
        self.in_features = in_features
        if rank is not None:
            # Without ReLU and bias it is a linear map of rank r.
            self.hidden = nn.Sequential(nn.Linear(in_features, rank, bias=False))
        else:
            self.hidden = _hidden_layers(in_features, hidden, batchnorm, drop_rate)
        self.hidden_size = rank or (hidden[-1] if hidden else in_features)
        self.normalize = normalize
        self.drop = nn.Dropout(drop_rate)
        self.reset_classifier(num_classes, like=torch.empty(0))

    def reset_classifier(self, num_classes: int, like: Tensor) -> None:
        """Replace the classifier (0 classes for none), on the device and in the dtype of ``like``."""
        self.classifier = (
            nn.Linear(self.hidden_size, num_classes, device=like.device, dtype=like.dtype)
            if num_classes
            else nn.Identity()
        )

    def forward(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return the logits, or the input of the classifier with ``pre_logits``."""
        first = self.hidden[0] if len(self.hidden) else self.classifier
        if isinstance(first, nn.Linear):
            x = x.to(first.weight.dtype)  # a model cast to half precision still pools in float32
        x = self.hidden(x)
        if self.normalize is not None:
            x = unit(x)
        x = self.drop(x)
        return x if pre_logits else self.classifier(x)


def unit(x: Tensor) -> Tensor:
    """Divide each row by its norm, computed in float32 at least; rows of zeros stay zero."""
    full = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.normalize(full, dim=1).to(x.dtype)


def _hidden_layers(before: int, widths: Sequence[int], batchnorm: bool, drop_rate: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in widths:
        if layers:
            layers.append(nn.Dropout(drop_rate))
        layers.append(nn.Linear(before, width, bias=not batchnorm))
        if batchnorm:
            layers.append(nn.BatchNorm1d(width))
        layers.append(nn.ReLU(inplace=True))
        before = width
    return nn.Sequential(*layers)
