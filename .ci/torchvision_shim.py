"""Lets torchvision be imported where its C extension does not load: a CUDA build beside a CPU-only torch.

Without the extension torchvision lacks only its operators, which nothing here calls. But it gives two of them
an implementation for fake tensors, and that fails unless they are declared. This declares them.

`.ci/run` puts it into its environments, where a .pth file imports it at every start of Python: so it imports
nothing itself, and waits for torchvision.
"""

import sys


class DeclareOperators:
    """A finder that finds nothing, but hears when torchvision comes to the module that needs them."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """Declare those still missing: before that module torchvision has tried its extension."""
        if name == "torchvision._meta_registrations":
            import torch

            for operator in ("nms", "qnms"):
                if not hasattr(torch.ops.torchvision, operator):
                    schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                    torch.library.define(f"torchvision::{operator}", schema)


sys.meta_path.insert(0, DeclareOperators)
