"""Trace a model into a graph, and run a graph or a model on arrays."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from covpool.data.transforms import Preprocessing
from covpool.models.model import PooledClassifier
from covpool.models.surgery import takes_image_size

Array = NDArray[Any]
# Images, as the exported graph takes them, to logits.
Runner = Callable[[Array], Array]


def torch_runner(module: nn.Module | Callable[..., Any]) -> Runner:
    """A module of torch on the CPU."""

    def run(images: Array) -> Array:
        with torch.inference_mode():
            logits = module(torch.from_numpy(np.ascontiguousarray(images)))
        return np.asarray(logits.numpy())

    return run


log = logging.getLogger(__name__)

INPUT, OUTPUT = "images", "logits"
# The example that is traced: of one image torch would take the one for a constant.
BATCH = 2
# timm's layers with the padding of TensorFlow end so.
PADDED_BY_SIZE = "Same"


class ExportGraph(nn.Module):
    """From pixels to logits.

    Args:
        model: in evaluation mode.
        preprocessing: whose mean and deviation are put before the model; ``None`` for a model that receives
            scaled and normalised images.

    Shapes:
        ``(B, H, W, 3)`` in uint8, or ``(B, 3, H, W)`` in float32 without preprocessing, to ``(B, classes)``.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, model: PooledClassifier, preprocessing: Preprocessing | None) -> None:
        super().__init__()
        self.model = model
        self.takes_pixels = preprocessing is not None
        if preprocessing is not None:
            mean = torch.tensor(preprocessing.mean, dtype=torch.float64)
            std = torch.tensor(preprocessing.std, dtype=torch.float64)
            self.register_buffer("scale", (1 / (255 * std)).float()[:, None, None])
            self.register_buffer("shift", (-mean / std).float()[:, None, None])
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Images to logits."""
        if self.takes_pixels:
            images = images.permute(0, 3, 1, 2).float() * self.scale + self.shift
        logits: Tensor = self.model(images)
        return logits


@dataclass(frozen=True, eq=False)
class Traced:
    """A graph as torch.export has it.

    Attributes:
        program: the graph, without the names of files on the machine that made it.
        free: the names of the sizes that may differ from the example's, by the axis of the input.
    """

    program: ExportedProgram
    free: dict[int, str]

    @property
    def has_free_size(self) -> bool:
        """Whether height and width of the images are free."""
        return len(self.free) > 1


def trace(graph: ExportGraph, image_size: int, *, free_size: bool) -> Traced:
    """Trace a graph, with any number of images, and of any size if that is wanted and possible."""
    sides = (1, 2) if graph.takes_pixels else (2, 3)
    if free_size:
        try:
            return _trace(graph, image_size, {0: "batch", sides[0]: "height", sides[1]: "width"})
        except Exception as error:  # torch.export has no error of its own for what it cannot leave open
            log.info("images are all of %d pixels: %s", image_size, error)
    return _trace(graph, image_size, {0: "batch"})


def may_have_free_size(model: PooledClassifier) -> bool:
    """Whether the network is a convolution for every size alike.

    Transformers have as many positions as they were built for. Where padding is computed from the size, as
    TensorFlow does, the formulas grow from layer to layer, and torch.export takes minutes for them.
    """
    parts = [part for whole in model.backbone_parts() for part in whole.modules()]
    padded = any(type(part).__name__.endswith(PADDED_BY_SIZE) for part in parts)
    return not (padded or takes_image_size(model.backbone))


def example(graph: ExportGraph, batch: int, height: int, width: int) -> Tensor:
    """Images of noise."""
    generator = torch.Generator().manual_seed(0)
    if graph.takes_pixels:
        return torch.randint(0, 256, (batch, height, width, 3), dtype=torch.uint8, generator=generator)
    return torch.randn(batch, 3, height, width, generator=generator)


def _trace(graph: ExportGraph, image_size: int, free: dict[int, str]) -> Traced:
    images = example(graph, BATCH, image_size, image_size)
    shapes = {INPUT: {axis: Dim.DYNAMIC for axis in free}}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.export warns of code of torch's own
        program = torch.export.export(graph, (images,), dynamic_shapes=shapes)
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)
    return Traced(program, free)
