"""Measure time and memory of the pooling methods on this machine, next to the paper's figures.

    covpool bench methods
    covpool bench render results/<version>/methods--<machine>--<device>.json

or from Python::

    import covpool.bench

    covpool.bench.render(covpool.bench.run_methods("results"))
"""

from covpool.bench.layers import SIZES, Size
from covpool.bench.methods import render, run_methods
from covpool.bench.timing import Schedule

__all__ = ["SIZES", "Schedule", "Size", "render", "run_methods"]
