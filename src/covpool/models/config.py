"""What a model is made of: one dataclass, from the caller's arguments to the file on disk and back."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from covpool.errors import UsageError, UsageTypeError
from covpool.functional.arguments import check_choice, check_whole
from covpool.nn import methods
from covpool.nn.pooling import DEFAULT_METHOD, METHODS

Dim = int | Literal["auto"] | None
Features = Literal["stage", "head"]
HeadKind = Literal["linear", "mlp"]
Join = Literal["cls", "gap"]
Normalize = Literal["l2"]

# In the place of a pooling method: no pooling, but the token that a transformer has for the whole image.
CLASS_TOKEN = "cls"
# Of the paper's AlexNet and VGG.
HIDDEN = (4096, 4096)


@dataclass(frozen=True)
class ModelConfig:
    """The arguments of :func:`covpool.create_model` that shape a network; all of it goes into JSON.

    A built model's ``config`` has the choices that were left open (``None`` and ``"auto"``) filled in.

    Attributes:
        backbone: a name of timm, or ``"alexnet"``.
        num_classes: 0 for no classifier.
        pool: a method of :func:`covpool.nn.methods`, or ``"cls"`` for a transformer's class token.
        dim: channels after the reduction; ``None`` for no reduction; ``"auto"``: 256 where the backbone has
            more than 256, none where it has fewer, nor before a first-order method or one that projects the
            channels itself (``moment_probing``).
        keep_resolution: leave out the last halving of the resolution; ``None``: where the architecture
            allows it, and the method is second-order.
        features: ``"stage"`` for those before the channels' expansion of EfficientNet, MobileNet and
            their like, ``"head"`` for those after it; ``None``: before it for a second-order method.
        head: ``"linear"``, or ``"mlp"`` with ``hidden`` layers.
        rank: of the bottleneck before a linear classifier, ``None`` for none.
        hidden: widths of the hidden layers of ``head="mlp"``.
        hidden_batchnorm: BatchNorm after each hidden layer.
        drop_rate: dropout before the classifier and after hidden layers.
        join: add first-order logits, of the class token or of the average. The average is the first-order
            twin's: after the expansion, where there is one.
        normalize: ``"l2"`` divides what the classifier receives by its norm; with ``join``, each part by its
            own. ``None`` leaves it as it is.
        image_size: the side of the images, ``None`` for the backbone's own.
        pool_options: of the method and of :class:`covpool.nn.CovPool`.
        backbone_options: for timm's ``create_model``.
        preprocessing: what differs from the backbone's own ``mean``, ``std``, ``interpolation``, ``crop_pct``
            and ``crop_mode``.
    """

    backbone: str
    num_classes: int = 1000
    pool: str = DEFAULT_METHOD
    dim: Dim = "auto"
    keep_resolution: bool | None = None
    features: Features | None = None
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
        check_choice("pool", self.pool, (*methods(), CLASS_TOKEN))
        check_choice("features", self.features, (None, "stage", "head"))
        check_choice("head", self.head, ("linear", "mlp"))
        check_choice("join", self.join, (None, "cls", "gap"))
        check_choice("normalize", self.normalize, (None, "l2"))
        check_choice("keep_resolution", self.keep_resolution, (None, True, False))
        if self.rank is not None and self.head == "mlp":
            raise UsageError('rank is a bottleneck before a linear classifier: with head="mlp" use hidden=')
        object.__setattr__(self, "hidden", tuple(self.hidden))  # JSON and command lines bring lists
        # And dtypes go into it by their names.
        options = {
            key: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
            for key, value in self.pool_options.items()
        }
        object.__setattr__(self, "pool_options", options)
        self._check_pool_options()
        self._check_sizes()

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
            raise UsageError('head="mlp" wants widths of its hidden layers, such as hidden=(4096, 4096)')
        if not 0.0 <= self.drop_rate < 1.0:
            raise UsageError(f"drop_rate must be from 0 to below 1; got {self.drop_rate}")

    @property
    def is_second_order(self) -> bool:
        """Whether what is pooled are products of channels."""
        return self.pool != CLASS_TOKEN and METHODS[self.pool].order > 1

    @property
    def reduces(self) -> bool:
        """Whether the channels want fewer before they are pooled, and the method does not see to it."""
        return self.is_second_order and not METHODS[self.pool].reduces

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {**dataclasses.asdict(self), "hidden": list(self.hidden)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """The inverse of :meth:`to_dict`; an unknown name is an error."""
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(values.keys() - known):
            raise UsageError(f"a model has no {', '.join(unknown)}; it has {', '.join(sorted(known))}")
        return cls(**values)
