"""Export trained networks to ONNX and torch.export, and report how far the files agree with them."""

from typing import TYPE_CHECKING

from covpool.lazy import lazily

if TYPE_CHECKING:
    from covpool.errors import ExportRefusedError
    from covpool.export.exporting import ExportReport, export_model
    from covpool.export.options import ExportOptions
    from covpool.export.results import read_metadata

__all__ = ["ExportOptions", "ExportRefusedError", "ExportReport", "export_model", "read_metadata"]

__getattr__ = lazily(__name__, "export", __file__)
