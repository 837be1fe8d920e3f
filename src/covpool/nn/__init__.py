"""Modules around the mathematics: one pooling layer, one interface, a file a method."""

from covpool.nn.cov_pool import CovPool, Reduction, methods
from covpool.nn.structured import NewtonSchulz, PostCompensation, PreNormalization

__all__ = [
    "CovPool",
    "NewtonSchulz",
    "PostCompensation",
    "PreNormalization",
    "Reduction",
    "methods",
]
