"""Trace a model with torch.export, and convert the traced graph to ONNX."""

from __future__ import annotations

import ast
import contextlib
import io
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from covpool.data.transforms import Preprocessing, normalize_transform
from covpool.models.model import PooledClassifier
from covpool.models.surgery import takes_image_size

log = logging.getLogger(__name__)

Array = NDArray[Any]
# A function from images, as the exported graph receives them, to logits.
Runner = Callable[[Array], Array]

INPUT, OUTPUT = "images", "logits"
# Batch size of the traced example: torch.export treats a size of 1 as a constant.
BATCH = 2
# The names of timm's layers with TensorFlow padding end with this.
PADDED_BY_SIZE = "Same"
# The ONNX exporter stores the module path of each node under this key.
SCOPES = "pkg.torch.onnx.name_scopes"
BACKBONE = ("model.backbone", "model.expansion")


class ExportGraph(nn.Module):
    """From pixels to logits.

    Args:
        model: the model, in evaluation mode.
        preprocessing: its mean and standard deviation are applied before the model; ``None`` for a graph
            that receives normalized images.

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
        """Return the logits of images."""
        if self.takes_pixels:
            images = images.permute(0, 3, 1, 2).float() * self.scale + self.shift
        logits: Tensor = self.model(images)
        return logits


@dataclass(frozen=True, eq=False)
class Traced:
    """A graph traced by torch.export.

    Attributes:
        program: the graph, without file names of the machine that traced it.
        free: the names of the dynamic dimensions, by axis of the input.
    """

    program: ExportedProgram
    free: dict[int, str]

    @property
    def has_free_size(self) -> bool:
        """Whether height and width of the images are dynamic."""
        return len(self.free) > 1


def trace(graph: ExportGraph, image_size: int, *, free_size: bool) -> Traced:
    """Trace a graph with a dynamic batch size, and dynamic image size where requested and possible."""
    sides = (1, 2) if graph.takes_pixels else (2, 3)
    if free_size:
        try:
            return _trace(graph, image_size, {0: "batch", sides[0]: "height", sides[1]: "width"})
        except Exception as error:  # torch.export has no error class for a size that it cannot leave open
            log.info("the image size is fixed at %d pixels: %s", image_size, error)
    return _trace(graph, image_size, {0: "batch"})


def may_have_free_size(model: PooledClassifier) -> bool:
    """Return whether the backbone is a convolutional network that works alike for every image size.

    Transformers have a fixed number of positions. TensorFlow padding is computed from the image size; its
    formulas grow from layer to layer, and torch.export takes minutes for them.
    """
    parts = [part for whole in model.backbone_parts() for part in whole.modules()]
    padded = any(type(part).__name__.endswith(PADDED_BY_SIZE) for part in parts)
    return not (padded or takes_image_size(model.backbone))


def example(graph: ExportGraph, batch: int, height: int, width: int) -> Tensor:
    """Return random images as the graph receives them."""
    generator = torch.Generator().manual_seed(0)
    if graph.takes_pixels:
        return torch.randint(0, 256, (batch, height, width, 3), dtype=torch.uint8, generator=generator)
    return torch.randn(batch, 3, height, width, generator=generator)


def graph_input(pixels_B3HW: Tensor, preprocessing: Preprocessing, *, takes_pixels: bool) -> Array:
    """Return a batch as an exported graph receives it: pixels, or normalized."""
    if takes_pixels:
        return np.ascontiguousarray(pixels_B3HW.permute(0, 2, 3, 1).numpy())
    return np.asarray(normalized(pixels_B3HW, preprocessing).numpy())


def normalized(pixels_B3HW: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Normalize a batch with the transform of training and evaluation, which the graph must reproduce."""
    images: Tensor = normalize_transform(preprocessing)(pixels_B3HW)
    return images.contiguous(memory_format=torch.channels_last)


def torch_runner(module: nn.Module | Callable[..., Any]) -> Runner:
    """Return a function that runs a torch module on arrays, on the CPU."""

    def run(images: Array) -> Array:
        with torch.inference_mode():
            logits = module(torch.from_numpy(np.ascontiguousarray(images)))
        return np.asarray(logits.numpy())

    return run


def to_onnx(traced: Traced) -> ModelProto:
    """Convert a traced graph to ONNX; each node keeps the path of its module."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # torch's exporter warns about torch's own code
        program = torch.onnx.export(
            traced.program,
            dynamo=True,
            verbose=False,
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes={INPUT: traced.free},
        )
    assert program is not None
    return program.model_proto


def backbone_nodes(model: ModelProto) -> set[str]:
    """Return the names of the nodes of the backbone and of its expansion."""
    return {node.name for node in model.graph.node if _is_backbone(node)}


def onnx_session(model: Path | bytes) -> onnxruntime.InferenceSession:
    """Open ONNX Runtime on the CPU, with torch's number of threads."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors only
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _is_backbone(node: NodeProto) -> bool:
    scopes = next((entry.value for entry in node.metadata_props if entry.key == SCOPES), "[]")
    return any(scope.startswith(BACKBONE) for scope in ast.literal_eval(scopes))


def _trace(graph: ExportGraph, image_size: int, free: dict[int, str]) -> Traced:
    images = example(graph, BATCH, image_size, image_size)
    shapes = {INPUT: {axis: Dim.DYNAMIC for axis in free}}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.export warns about torch's own code
        program = torch.export.export(graph, (images,), dynamic_shapes=shapes)
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)
    return Traced(program, free)
