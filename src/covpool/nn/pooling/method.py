"""The interface of a pooling method, the table of methods, and the two simplest: gap and cov."""

from __future__ import annotations

import dataclasses
import re
from importlib import metadata
from typing import Any, ClassVar

from torch import Tensor, nn

from covpool.arguments import check_choice
from covpool.errors import UsageError, UsageTypeError
from covpool.functional.covariance import covariance, mean, triu_vec


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """The options of a method that has none."""


class Method(nn.Module):
    """Features ``(B, C, n)`` to one vector per image, ``(B, out_features)``.

    A subclass implements ``forward``. Positions of weight zero must have no effect, even if they contain NaN.
    :class:`covpool.nn.CovPool` handles the layout and the reduction.

    Attributes:
        summary: one line for :func:`covpool.nn.methods`.
        Options: a frozen dataclass that checks its values, with a default for every field.
        out_features: length of the vector; by default d for a first-order method, and otherwise d(d+1)/2, the
            upper triangle of a symmetric matrix.
        order: the order of the pooled moment. A model with a first-order method uses timm's backbone
            unchanged.
        reduces: whether the method projects the channels itself. A model then adds no reduction by default.

    Args:
        channels: d, the number of channels of the features.
        **options: fields of ``Options``.
    """

    summary: ClassVar[str]
    order: ClassVar[int] = 2
    reduces: ClassVar[bool] = False
    Options: ClassVar[type[Any]] = NoOptions
    options: Any

    def __init__(self, channels: int, **options: Any) -> None:
        super().__init__()
        self.channels = channels
        self.options = self.Options(**options)

    @property
    def out_features(self) -> int:
        """Return the length of the vector."""
        return self.channels if self.order == 1 else self.channels * (self.channels + 1) // 2

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with optional weights ``(B, n)``."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Reset the parameters; by default there are none."""

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """Return the names of the options."""
        return tuple(field.name for field in dataclasses.fields(cls.Options))

    def extra_repr(self) -> str:
        """Return every option and the length of the vector."""
        shown = [f"{name}={getattr(self.options, name)!r}" for name in self.option_names()]
        return ", ".join([*shown, f"out_features={self.out_features}"])


class Gap(Method):
    r"""The mean over positions, :math:`\tfrac1n \sum_p x_p`, or :math:`\sum_p w_p x_p` with weights.

    The last layer of most image networks. It needs no reduction: create the layer with ``dim=None``.
    """

    summary: ClassVar[str] = "global average pooling, the first-order baseline"
    order: ClassVar[int] = 1

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Average x ``(B, C, n)``, with optional weights ``(B, n)``, in float32 at least."""
        return mean(x, weights)


class Cov(Method):
    r"""The covariance itself, :math:`\Sigma = X \bar I X^T`, as a vector of d(d+1)/2 values.

    The baseline for the normalizations of the other methods. See :func:`covpool.functional.covariance`. Cost:
    one product of d×n by n×d forward, two backward. All eigenvalues stay as they are.
    """

    summary: ClassVar[str] = "the covariance without normalization (Plain-COV)"

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool x ``(B, C, n)``, with optional weights ``(B, n)``."""
        return triu_vec(covariance(x, weights=weights))


DEFAULT_METHOD = "isqrt_cov"
# The methods by name; those of covpool are in covpool.nn.pooling.
METHODS: dict[str, type[Method]] = {}
# The group of entry points by which installed packages offer methods.
ENTRY_POINTS = "covpool.methods"


def register_method(name: str, method: type[Method]) -> None:
    """Make a pooling method known by its name: to the layer, models, recipes, probing heads and bundles.

    Call it at the end of the module that defines the method. Bundles name that module. covpool does not
    import it: import it before you load such a bundle.

    Args:
        name: lower-case letters, digits and underscores.
        method: a subclass of :class:`covpool.nn.Method`.

    Raises:
        ValueError: if the name has other characters, or belongs to another method.
    """
    if not issubclass(method, Method):
        raise UsageTypeError(f"method must be a subclass of covpool.nn.Method; got {method!r}")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", str(name)):
        raise UsageError(f"name must have lower-case letters, digits and underscores only; got {name!r}")
    if not isinstance(getattr(method, "summary", None), str):
        raise UsageTypeError(f"{method.__name__} needs a summary, one line of text")
    before = METHODS.get(name, method)
    # A notebook defines its class again when its cell runs again.
    if (before.__module__, before.__qualname__) != (method.__module__, method.__qualname__):
        raise UsageError(f"{name!r} is the method of {before.__module__}: choose another name")
    METHODS[name] = method


def is_method(name: object) -> bool:
    """Return whether a method has this name; an unknown one is loaded if an installed package offers it."""
    if name not in METHODS and isinstance(name, str):
        for entry_point in metadata.entry_points(group=ENTRY_POINTS, name=name):
            register_method(name, entry_point.load())
    return name in METHODS


def check_method(argument: str, name: object, *others: str) -> None:
    """Raise unless ``name`` is that of a method, or one of the other choices."""
    if name not in others and not is_method(name):
        check_choice(argument, name, (*METHODS, *others))


def module_of(name: str) -> str:
    """Return the module to import for a registered method; empty for a method of covpool."""
    module = METHODS[name].__module__ if name in METHODS else ""
    return "" if module.partition(".")[0] == "covpool" else module
