"""The pooling methods and the table of their names.

To add a method, write a subclass of :class:`~covpool.nn.pooling.method.Method` and add a line to ``METHODS``.
A method outside of covpool is registered by :func:`register_method` or by an entry point.
"""

from __future__ import annotations

import re
from importlib import metadata

from covpool.arguments import check_choice
from covpool.errors import UsageError, UsageTypeError
from covpool.nn.pooling.abmilp import Abmilp
from covpool.nn.pooling.attentive import Attentive
from covpool.nn.pooling.bcnn import Bcnn, ImprovedBcnn
from covpool.nn.pooling.cbp import Cbp
from covpool.nn.pooling.cholesky import Cholesky
from covpool.nn.pooling.correlation import Correlation
from covpool.nn.pooling.dropcov import DropCov
from covpool.nn.pooling.efficient_probing import EfficientProbing
from covpool.nn.pooling.g2denet import G2DeNet
from covpool.nn.pooling.gem import Gem
from covpool.nn.pooling.isice import Isice
from covpool.nn.pooling.isqrt_cov import IsqrtCov, PolarExpress
from covpool.nn.pooling.lyapunov import MpaLya, MtpLya
from covpool.nn.pooling.method import Cov, Gap, Method
from covpool.nn.pooling.moment_probing import MomentProbing
from covpool.nn.pooling.simpool import Simpool
from covpool.nn.pooling.spectral import DeepO2P, MpnCov, PowerTmlr
from covpool.nn.pooling.svd import SvdPade, SvdTaylor

METHODS: dict[str, type[Method]] = {
    "gap": Gap,
    "cov": Cov,
    "isqrt_cov": IsqrtCov,
    "mpn_cov": MpnCov,
    "bcnn": Bcnn,
    "improved_bcnn": ImprovedBcnn,
    "deep_o2p": DeepO2P,
    "g2denet": G2DeNet,
    "cbp": Cbp,
    "mpa_lya": MpaLya,
    "mtp_lya": MtpLya,
    "svd_pade": SvdPade,
    "svd_taylor": SvdTaylor,
    "polar_express": PolarExpress,
    "dropcov": DropCov,
    "moment_probing": MomentProbing,
    "power_tmlr": PowerTmlr,
    "cholesky": Cholesky,
    "correlation": Correlation,
    "isice": Isice,
    "gem": Gem,
    "abmilp": Abmilp,
    "simpool": Simpool,
    "attentive": Attentive,
    "efficient_probing": EfficientProbing,
}

DEFAULT_METHOD = "isqrt_cov"
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


__all__ = ["DEFAULT_METHOD", "METHODS", "Method", "check_method", "is_method", "module_of", "register_method"]
