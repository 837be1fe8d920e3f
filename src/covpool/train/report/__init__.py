"""What a run leaves for people to look at: figures, a table of classes, and one page with all of it."""

from covpool.train.report.comparison import write_comparison
from covpool.train.report.one_run import write_report

__all__ = ["write_comparison", "write_report"]
