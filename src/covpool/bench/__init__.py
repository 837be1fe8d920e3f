"""Timing and memory of the operators against what one would use in their place.

    python -m covpool.bench isqrt_cov
    python -m covpool.bench render results/<version>/isqrt_cov--<machine>--<device>.json

or from Python::

    import covpool.bench

    covpool.bench.render(covpool.bench.run_isqrt_cov("results"))
"""

from covpool.bench.contenders import CONTENDERS
from covpool.bench.isqrt_cov import run_isqrt_cov
from covpool.bench.problem import SIZES, Size
from covpool.bench.report import render, summary_into
from covpool.bench.targets import TARGETS
from covpool.bench.timing import Schedule

__all__ = ["CONTENDERS", "SIZES", "TARGETS", "Schedule", "Size", "render", "run_isqrt_cov", "summary_into"]
