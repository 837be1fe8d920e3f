"""The metadata, the results file and the table of an export."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import onnxscript

from covpool import __version__
from covpool.data.transforms import Preprocessing
from covpool.durable import write_file
from covpool.errors import UsageError
from covpool.evaluate.results import FILE, Results, describe_images, prepare_folder
from covpool.export.graph import INPUT, OUTPUT, Traced
from covpool.export.options import FORMATS, Job
from covpool.export.parity import TOLERANCES, Latency, Parity
from covpool.models.card import Card, versions
from covpool.models.strict_json import plain_json
from covpool.provenance import results as origin
from covpool.wording import counted

# The same, in JSON, beside the files.
METADATA = "model.json"


def describe(card: Card, traced: Traced, *, takes_pixels: bool) -> dict[str, Any]:
    """All that whoever uses a file has to know.

    ``preprocessing`` has what is to be done with an image that is upright and RGB: resize its shorter side to
    ``resize`` (or both, if ``crop_mode`` is squash), cut out the centre of ``size``, and where ``in_graph``
    is false also divide by 255, subtract ``mean`` and divide by ``std``.
    """
    preprocessing = Preprocessing.of(card.preprocessing)
    size = [None, None] if traced.has_free_size else [preprocessing.size] * 2
    described = {
        "classes": card.classes,
        "preprocessing": {
            **dataclasses.asdict(preprocessing),
            "resize": preprocessing.resized_side,
            "in_graph": takes_pixels,
        },
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


def as_strings(described: dict[str, Any]) -> dict[str, str]:
    """A string of JSON for each key, which is what files take."""
    return {name: json.dumps(value, ensure_ascii=False) for name, value in described.items()}


def read_metadata(path: str | Path) -> dict[str, Any]:
    """What an exported ``.onnx`` or ``.pt2`` says of itself.

    Raises:
        ValueError: if it is not one that covpool has exported.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(2, "No such file", str(path))
    found = _of_torch(path) if path.suffix == ".pt2" else _of_onnx(path)
    if not found.get("covpool"):
        raise UsageError(f"{path} was not exported by covpool: it says nothing of classes")
    return {name: json.loads(text) for name, text in found.items()}


def _of_onnx(path: Path) -> dict[str, str]:
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(path, load_external_data=False)
    except DecodeError as error:
        raise UsageError(f"{path} is no ONNX file") from error
    return {entry.key: entry.value for entry in model.metadata_props}


def _of_torch(path: Path) -> dict[str, str]:
    import torch

    wanted = dict.fromkeys(
        ("classes", "preprocessing", "input", "output", "config", "recipe", "bundle", "covpool"), ""
    )
    try:
        torch.export.load(path, extra_files=wanted)
    except Exception as error:  # of whatever a broken archive leads to
        raise UsageError(f"{path} is no file of torch.export") from error
    return wanted


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


def results_table(results: dict[str, Any]) -> str:
    """Files beside torch: agreement, sizes, and times."""
    data, latency = results["data"], results["latency"]
    lines = [
        f"{counted(results['files'][0]['images'], 'image')} of {data['split']}, "
        f"{counted(data['classes'], 'class')}" + _calibrated(results["calibration_images"]),
        "",
        f"{'':<20}{'same class':>12}{'largest difference':>20}{'MB':>8}{'p50, ms':>10}{'p99, ms':>10}",
    ]
    for file in results["files"]:
        difference = "not a number" if file["absolute"] is None else _difference(file)
        lines.append(
            f"{file['file']:<20}{100 * file['top1']:>10.2f} %{difference:>20}{file['bytes'] / 1e6:>8.1f}"
            + _times(latency[file["format"]])
        )
    names = {file["format"] for file in results["files"]}
    for name in (name for name in latency if name not in names):
        size = f"{results['bundle_bytes'] / 1e6:.1f}"
        lines.append(f"{name:<20}{'':>12}{'':>20}{size:>8}{_times(latency[name])}")
    lines += ["", *_explained(results), *(f"kept all the same: {text}" for text in results["objections"])]
    return "\n".join(lines)


def _difference(file: dict[str, Any]) -> str:
    return f"{file['absolute']:.1e} ({100 * file['relative']:.1g} %)"


def _times(latency: dict[str, Any]) -> str:
    return f"{latency['p50']:>10.1f}{latency['p99']:>10.1f}"


def _calibrated(images: int | None) -> str:
    return "" if images is None else f"; int8 fitted to {images:,} of train"


def _explained(results: dict[str, Any]) -> list[str]:
    size, threads = results["bundle"]["image_size"], results["machine"]["threads"]
    sizes = f"any size ({size} in training)" if results["free_size"] else f"{size} pixels"
    return [
        f"the files take any number of images, of {sizes}",
        "differences are of logits, and in percent of the largest; "
        f"times are of one image on {counted(threads, 'thread')}",
    ]
