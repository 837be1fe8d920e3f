"""A traced graph as a ``.pt2`` of torch.export."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch

from covpool.durable.replacing import write_file
from covpool.export.graph import Traced
from covpool.export.running import Runner, torch_runner


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
