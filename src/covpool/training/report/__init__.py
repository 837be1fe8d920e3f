"""The report of a run: figures, a table of classes, and an HTML page with both."""

from covpool.training.report.pages import write_comparison, write_report

__all__ = ["write_comparison", "write_report"]
