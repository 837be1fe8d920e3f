"""Measure time and memory of the pooling methods on this machine, next to the paper's figures.

    covpool bench

or from Python::

    import covpool.bench

    print(covpool.bench.report(covpool.bench.read_results(covpool.bench.run_methods("results"))))
"""

from covpool.bench.layers import SIZES, Size
from covpool.bench.methods import read_results, run_methods
from covpool.bench.table import report
from covpool.bench.timing import Schedule

__all__ = ["SIZES", "Schedule", "Size", "read_results", "report", "run_methods"]
