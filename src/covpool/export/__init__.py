"""Export trained networks to ONNX and torch.export, and compare each file with the model."""

from typing import TYPE_CHECKING

from covpool import lazily

if TYPE_CHECKING:
    from covpool.errors import ExportRefusedError
    from covpool.export.exporting import ExportReport, export_model
    from covpool.export.options import ExportOptions
    from covpool.export.targets import read_metadata

__all__ = ["ExportOptions", "ExportRefusedError", "ExportReport", "export_model", "read_metadata"]

__getattr__ = lazily(
    __name__,
    "export",
    {
        "covpool.errors": "ExportRefusedError",
        "covpool.export.options": "ExportOptions",
        "covpool.export.exporting": "ExportReport export_model",
        "covpool.export.targets": "read_metadata",
    },
)
