"""Measure time and memory of the pooling methods on this machine, next to the paper's figures.

    python -m lab bench

or from Python::

    import lab.bench

    print(lab.bench.report(lab.bench.read_results(lab.bench.run_methods("results"))))
"""

from lab.bench.layers import SIZES, Size
from lab.bench.methods import read_results, run_methods
from lab.bench.table import report
from lab.bench.timing import Schedule

__all__ = ["SIZES", "Schedule", "Size", "read_results", "report", "run_methods"]
