"""A frozen backbone, its features computed once, and heads trained on them in minutes."""

from covpool.evaluate.probe.options import ProbeOptions
from covpool.evaluate.probe.probing import Probed, probe

__all__ = ["ProbeOptions", "Probed", "probe"]
