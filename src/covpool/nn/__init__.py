"""Modules around the mathematics: one pooling layer, one interface, a file a method."""

from covpool.nn.cov_pool import CovPool, Reduction, methods
from covpool.nn.pooling import Method, register_method
from covpool.nn.structured import NewtonSchulz, PostCompensation, PreNormalization

__all__ = [
    "CovPool",
    "Method",
    "NewtonSchulz",
    "PostCompensation",
    "PreNormalization",
    "Reduction",
    "methods",
    "register_method",
]
