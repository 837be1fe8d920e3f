"""What an export leaves beside its files: ``results.json``, on how they compare with the bundle."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import onnxscript

from covpool.durable.replacing import write_file
from covpool.evaluate.results import FILE, Results, describe_images, prepare_folder
from covpool.export.graph import Traced
from covpool.export.job import Job
from covpool.export.latency import Latency
from covpool.export.options import FORMATS
from covpool.export.parity import Parity
from covpool.export.verdict import TOLERANCES
from covpool.models.bundles.strict_json import plain_json
from covpool.models.bundles.tensors import versions
from covpool.provenance import results as origin

__all__ = ["Results", "export_results", "prepare_export", "write_export_results"]

PACKAGE, PROTOCOL = "covpool.export", "export"
ROOMS = ("functional", "nn", "models", "data", "export")


def prepare_export(out: Path) -> None:
    """Raise unless there is nothing at ``out``, or an earlier export, which is replaced."""
    if out.exists():
        prepare_folder(out, PROTOCOL)


def export_results(
    job: Job,
    traced: Traced,
    folder: Path,
    parity: Mapping[str, Parity],
    latency: Mapping[str, Latency],
    objections: Sequence[str],
) -> Results:
    """All of it, as JSON has it."""
    options = asdict(job.options)
    results = origin.new_results(ROOMS, {"bundle": job.bundle, "data": job.source.path, **options}, "cpu", 0)
    results["versions"] |= versions() | {
        package.__name__: package.__version__ for package in (onnx, onnxruntime, onnxscript)
    }
    return {
        "protocol": PROTOCOL,
        **results,
        "bundle": {
            "sha256": job.card.sha256,
            "model": job.card.config.backbone,
            "pool": job.card.config.pool,
            "dim": job.card.config.dim,
            "image_size": job.preprocessing.size,
        },
        "data": describe_images(job.images, job.split),
        "calibration_images": None if job.calibration is None else len(job.calibration),
        "free_size": traced.has_free_size,
        "bundle_bytes": job.card.bytes,
        "files": [_file(name, folder, found) for name, found in parity.items()],
        "latency": {name: asdict(found) for name, found in latency.items()},
        "objections": list(objections),
    }


def write_export_results(folder: Path, results: Results) -> None:
    """Check them against their schema, and write them."""
    plain = plain_json("results", results)
    origin.check_schema(plain, PACKAGE, PROTOCOL)
    write_file(folder / FILE, (json.dumps(plain, indent=2, ensure_ascii=False) + "\n").encode())


def _file(name: str, folder: Path, parity: Parity) -> dict[str, Any]:
    file, precision = FORMATS[name]
    return {
        "format": name,
        "file": file,
        "precision": precision,
        "bytes": (folder / file).stat().st_size,
        **asdict(parity),
        "top1": parity.top1,
        "tolerance": asdict(TOLERANCES[precision]),
    }
