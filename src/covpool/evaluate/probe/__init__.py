"""Train heads on a frozen backbone in minutes; its features are computed once."""

from typing import TYPE_CHECKING

from covpool import lazily

if TYPE_CHECKING:
    from covpool.evaluate.probe.options import ProbeOptions
    from covpool.evaluate.probe.probing import Probed, probe

__all__ = ["ProbeOptions", "Probed", "probe"]

__getattr__ = lazily(
    __name__,
    "eval",
    {"covpool.evaluate.probe.options": "ProbeOptions", "covpool.evaluate.probe.probing": "Probed probe"},
)
