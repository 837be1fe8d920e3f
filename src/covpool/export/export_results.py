"""The metadata, the results file and the printed table of an export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import onnxscript

from covpool import __version__
from covpool.evaluate.results import FILE, Results, describe_images, prepare_folder
from covpool.export.graph import INPUT, OUTPUT, Traced
from covpool.export.job import Job
from covpool.export.parity import Latency, Parity
from covpool.export.targets import TARGETS
from covpool.models.card import plain_json, versions
from covpool.provenance import check_schema, new_results
from covpool.storage.files import json_bytes, write_file
from covpool.terminal import counted

# The metadata of the files, in JSON.
METADATA = "model.json"
PACKAGE, PROTOCOL = "covpool.export", "export"
# The packages whose code the results depend on.
PACKAGES = ("functional", "nn", "models", "data", "inference", "export")


def describe(job: Job, traced: Traced) -> dict[str, Any]:
    """Return the metadata that a user of the files needs.

    ``preprocessing`` applies to an upright RGB image: resize its shorter side to ``resize`` (both sides if
    ``crop_mode`` is squash) and crop the center to ``size``. If ``in_graph`` is false, also divide by 255,
    subtract ``mean`` and divide by ``std``.
    """
    card, preprocessing, takes_pixels = job.card, job.preprocessing, job.options.takes_pixels
    size = [None, None] if traced.has_free_size else [preprocessing.size] * 2
    described = {
        "classes": card.classes,
        "preprocessing": asdict(preprocessing)
        | {"resize": preprocessing.resized_side, "in_graph": takes_pixels},
        "input": {
            "name": INPUT,
            "type": "uint8" if takes_pixels else "float32",
            "shape": [None, *size, 3] if takes_pixels else [None, 3, *size],
        },
        "output": {"name": OUTPUT, "type": "float32", "shape": [None, card.config.num_classes]},
        "config": card.config.to_dict(),
        "recipe": card.recipe,
        "bundle": {"sha256": card.sha256, "versions": card.versions},
        "covpool": __version__,
    }
    return dict(plain_json("metadata", described))


def prepare_export(out: Path) -> None:
    """Raise unless ``out`` does not exist or is an earlier export, which will be replaced."""
    if out.exists():
        prepare_folder(out, PROTOCOL)


def write_export_results(
    job: Job,
    traced: Traced,
    folder: Path,
    parity: Mapping[str, Parity],
    latency: Mapping[str, Latency],
    objections: Sequence[str],
) -> Results:
    """Write the results file, checked against its schema, and return its content."""
    arguments = {"bundle": job.bundle, "data": job.data, **asdict(job.options)}
    results = new_results(PACKAGES, arguments, "cpu", 0)
    results["versions"] |= versions() | {
        package.__name__: package.__version__ for package in (onnx, onnxruntime, onnxscript)
    }
    results = {
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
        "files": [_file(name, folder, measured) for name, measured in parity.items()],
        "latency": {name: asdict(measured) for name, measured in latency.items()},
        "objections": list(objections),
    }
    plain = plain_json("results", results)
    check_schema(plain, PACKAGE, PROTOCOL)
    write_file(folder / FILE, json_bytes(plain))
    return results


def _file(name: str, folder: Path, parity: Parity) -> dict[str, Any]:
    target = TARGETS[name]
    return {
        "format": name,
        "file": target.file,
        "precision": target.precision,
        "bytes": (folder / target.file).stat().st_size,
        **asdict(parity),
        "top1": parity.top1,
        "tolerance": asdict(target.tolerance),
    }


def results_table(results: dict[str, Any]) -> str:
    """Return a table of agreement, file sizes and latencies."""
    data, latency, calibration = results["data"], results["latency"], results["calibration_images"]
    lines = [
        f"{counted(results['files'][0]['images'], 'image')} of the {data['split']} split, "
        f"{counted(data['classes'], 'class')}"
        + ("" if calibration is None else f"; int8 calibrated on {counted(calibration, 'training image')}"),
        "",
        f"{'':<20}{'same class':>12}{'largest difference':>20}{'MB':>8}{'p50, ms':>10}{'p99, ms':>10}",
    ]
    times = {name: f"{ms['p50']:>10.1f}{ms['p99']:>10.1f}" for name, ms in latency.items()}
    for file in results["files"]:
        difference = "not a number"
        if file["absolute"] is not None:
            difference = f"{file['absolute']:.1e} ({100 * file['relative']:.1g} %)"
        lines.append(
            f"{file['file']:<20}{100 * file['top1']:>10.2f} %{difference:>20}{file['bytes'] / 1e6:>8.1f}"
            + times.pop(file["format"])
        )
    bundle_size = f"{results['bundle_bytes'] / 1e6:>8.1f}"
    lines += [f"{name:<20}{'':>32}{bundle_size}{columns}" for name, columns in times.items()]
    size, threads = results["bundle"]["image_size"], results["machine"]["threads"]
    sizes = f"any size (trained at {size} pixels)" if results["free_size"] else f"{size} pixels"
    return "\n".join(
        [
            *lines,
            "",
            f"the files accept any number of images, of {sizes}",
            "difference: of a logit, and in percent of the largest logit; "
            f"p50 and p99: one image per call, {counted(threads, 'thread')}",
            *(f"kept despite: {text}" for text in results["objections"]),
        ]
    )
