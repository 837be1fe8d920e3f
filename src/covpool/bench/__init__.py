"""Timing and memory of the operators and the pooling methods, against each other and the paper's figures.

    covpool bench methods
    covpool bench isqrt_cov
    covpool bench render results/<version>/isqrt_cov--<machine>--<device>.json

or from Python::

    import covpool.bench

    covpool.bench.render(covpool.bench.run_isqrt_cov("results"))
"""

from covpool.bench.contenders import CONTENDERS
from covpool.bench.isqrt_cov import run_isqrt_cov
from covpool.bench.methods.suite import run_methods
from covpool.bench.problem import SIZES, Size
from covpool.bench.report import render, summary_into
from covpool.bench.targets import TARGETS
from covpool.bench.timing import Schedule

__all__ = [
    "CONTENDERS",
    "SIZES",
    "TARGETS",
    "Schedule",
    "Size",
    "render",
    "run_isqrt_cov",
    "run_methods",
    "summary_into",
]
