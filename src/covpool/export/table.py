"""The results of an export for a person."""

from __future__ import annotations

from typing import Any

from covpool.data.counts import counted


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
