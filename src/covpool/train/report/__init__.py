"""What a run leaves for people to look at: figures, a table of classes, and one page with all of it."""

from covpool.train.report.pages import write_comparison, write_report

__all__ = ["write_comparison", "write_report"]
