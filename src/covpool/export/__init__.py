"""Trained networks for other engines: ONNX and torch.export, with a report on how far they agree."""

from covpool.errors import ExportRefusedError
from covpool.export.exporting import ExportReport, export_model
from covpool.export.options import ExportOptions
from covpool.export.results import read_metadata

__all__ = ["ExportOptions", "ExportRefusedError", "ExportReport", "export_model", "read_metadata"]
