"""Write and load each export format: ONNX and torch.export."""

from __future__ import annotations

import ast
import contextlib
import io
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import ModelProto, NodeProto

from covpool.durable import write_file
from covpool.errors import UsageError
from covpool.export.graph import INPUT, OUTPUT, Array, Runner, Traced, torch_runner

# Where the exporter keeps the modules that a node comes from.
SCOPES = "pkg.torch.onnx.name_scopes"
BACKBONE = ("model.backbone", "model.expansion")
# What protobuf can hold.
MAX_BYTES = 2**31 - 1


def to_onnx(traced: Traced) -> ModelProto:
    """The graph in ONNX; each node still knows which module it comes from."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # torch's exporter warns of code of torch's own
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
    """The names of the nodes that are the backbone's, or its expansion's."""
    return {node.name for node in model.graph.node if _is_backbone(node)}


def write_onnx(model: ModelProto, path: Path, metadata: Mapping[str, str]) -> None:
    """Write it with metadata, and without what the nodes know of the machine that made it.

    Raises:
        ValueError: if it is larger than an ONNX file can be.
    """
    written = ModelProto()
    written.CopyFrom(model)
    for node in written.graph.node:
        del node.metadata_props[:]
    onnx.helper.set_model_props(written, dict(metadata))
    if (size := written.ByteSize()) > MAX_BYTES:
        raise UsageError(
            f"{path.name} would have {size / 1e9:.1f} GB, and ONNX ends at 2.1: take --formats torch"
        )
    write_file(path, written.SerializeToString())


def onnx_runner(path: Path) -> Runner:
    """ONNX Runtime on the CPU, with as many threads as torch has."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors alone
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def run(images: Array) -> Array:
        (logits,) = session.run([OUTPUT], {INPUT: np.ascontiguousarray(images)})
        return np.asarray(logits)

    return run


def _is_backbone(node: NodeProto) -> bool:
    found = next((entry.value for entry in node.metadata_props if entry.key == SCOPES), "[]")
    return any(scope.startswith(BACKBONE) for scope in ast.literal_eval(found))


def write_torch(traced: Traced, path: Path, metadata: Mapping[str, str]) -> None:
    """Write it, with metadata as extra files, each of the name of its key."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of weights with the channels last, which it saves all the same
        torch.export.save(traced.program, buffer, extra_files=dict(metadata))
    write_file(path, buffer.getvalue())


def torch_file_runner(path: Path) -> Runner:
    """What is in the file, run by torch on the CPU."""
    return torch_runner(torch.export.load(path).module())
