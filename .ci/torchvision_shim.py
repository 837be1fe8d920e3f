"""Make torchvision importable if its C extension does not load: a CUDA build with a CPU-only torch.

Without the extension, torchvision lacks only its operators, which nothing here calls. But importing it
registers fake-tensor implementations of two operators, which fails unless they are declared. This module
declares them.

`.ci/run` copies this file into its environments, where a .pth file imports it at every start of Python. So it
imports torch only when torchvision is imported.
"""

import sys


class DeclareOperators:
    """A finder that finds nothing, and acts when torchvision imports the module that needs the operators."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """Declare the operators that are missing after torchvision has tried to load its extension."""
        if name == "torchvision._meta_registrations":
            import torch

            for operator in ("nms", "qnms"):
                if not hasattr(torch.ops.torchvision, operator):
                    schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                    torch.library.define(f"torchvision::{operator}", schema)


sys.meta_path.insert(0, DeclareOperators)
