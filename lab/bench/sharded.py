"""Benchmark the divided classifier against a dense one under DistributedDataParallel.

    python -m lab sharded            # measures, and writes JSON and tables under results/
    python -m lab figures sharded    # writes the tables and the figure of docs/scale_out.md

It measures three things, on random features and with SGD with momentum:

- the bytes that a process holds and sends in a step, against the formulas of ``covpool.models.plan``;
- seconds per step on two processes, dense and sharded in turns;
- the loss of a classifier that does not fit into memory as a copy per process.

The bytes sent are those that a process wrote to sockets, by ``/proc/self/io``. A process has one thread.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers import it, which takes seconds; here it happens once, before the fork
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

from covpool.drawing import LIGHT, dress, new_figure, png
from covpool.nn.divided import DividedLinear
from covpool.storage.files import replace_file
from lab.record import (
    RESULTS,
    ROOT,
    committed_file,
    new_record,
    read_record,
    record_file,
    with_block,
    write_record,
)

SEED = 0
KINDS = ("dense", "sharded")
CLASSES = (1_000, 10_000, 100_000)
# A low-rank head has 512 features. A covariance has 2,080 with 64 channels, and 8,256 with 128.
TRAFFIC = {"classes": CLASSES, "processes": (1, 2, 4), "features": 512, "images": 64}
TIMES = {"classes": CLASSES, "processes": 2, "features": 2_080, "images": 64, "rounds": 3}
LARGEST = {"classes": 75_000, "processes": 4, "features": 8_256, "images": 32, "steps": 4}
PAGE = ROOT / "docs" / "scale_out.md"
FIGURE = PAGE.parent / "images" / "sharded.png"
# Classes, features, GPUs and images per step of classifiers that are planned but not run.
PLANNED = ((1_000_000, 8_256, 64, 4_096), (1_000_000, 512, 64, 4_096), (10_000, 32_896, 8, 1_024))
# FLOP/s of an A100 in bfloat16 (data sheet) and bytes/s of a network, as elsewhere on the page.
PEAK, NETWORK = 312e12, 10e9


class Head:
    """A classifier, its optimizer, and the one batch that it trains on."""

    def __init__(self, kind: str, classes: int, features: int, images: int) -> None:
        self.world = dist.get_world_size()
        torch.manual_seed(SEED)
        x, labels = torch.randn(images, features), torch.randint(classes, (images,))
        self.images = images
        self.x, self.labels = (part.tensor_split(self.world)[dist.get_rank()].clone() for part in (x, labels))
        self.x.requires_grad_()
        self.sharded = DividedLinear(features, classes) if kind == "sharded" else None
        self.dense: nn.Module | None = None
        if self.sharded is None:
            self.dense = nn.Linear(features, classes)
            if self.world > 1:
                self.dense = DistributedDataParallel(self.dense, gradient_as_bucket_view=True)
        head = self.sharded or self.dense
        assert head is not None
        self.optimizer = torch.optim.SGD(head.parameters(), lr=1.0 / features, momentum=0.9)

    def step(self) -> float:
        """Train a step, and return the mean loss of the batch."""
        if self.sharded is not None:
            losses = self.sharded.loss(self.x, self.labels[:, None]).losses
            loss = losses.sum() / self.images
            loss.backward()
            mean = float(loss.detach())
        else:
            assert self.dense is not None
            loss = F.cross_entropy(self.dense(self.x), self.labels, reduction="sum") / self.images
            (loss * self.world).backward()
            mean = float(loss.detach()) * self.world  # mean over the images of this process
        self.optimizer.step()
        self.x.grad = None
        return mean

    def clear(self) -> None:
        """Free the gradients."""
        self.optimizer.zero_grad()

    def held(self) -> int:
        """Return the bytes of weights, gradients and optimizer state."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        state = [t for p in parameters for t in self.optimizer.state[p].values() if isinstance(t, Tensor)]
        return sum(t.nbytes for t in [*parameters, *(p.grad for p in parameters), *state])


def sent_bytes() -> int:
    """Return the bytes that this process has written so far, to sockets and files."""
    text = Path("/proc/self/io").read_text()
    return int(text.split("wchar:")[1].split()[0])


def measure_traffic(classes: int, features: int, images: int) -> dict[str, dict[str, int]]:
    """Return the bytes that a process holds and sends in a step, the maximum over all processes."""
    traffic = {}
    for kind in KINDS:
        head = Head(kind, classes, features, images)
        head.step()  # DDP rebuilds its buckets after the first step
        head.clear()
        dist.barrier()
        before = sent_bytes()
        head.step()
        values = torch.tensor([head.held(), sent_bytes() - before])
        dist.all_reduce(values, dist.ReduceOp.MAX)
        held, sent = values.tolist()
        traffic[kind] = {"held": held, "sent": sent}
    return traffic


def measure_times(classes: int, features: int, images: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of steps of both kinds, measured in turns after a warm-up round."""
    heads = {kind: Head(kind, classes, features, images) for kind in KINDS}
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for round_ in range(rounds + 1):
        for kind in KINDS if round_ % 2 else KINDS[::-1]:
            dist.barrier()
            started = time.perf_counter()
            heads[kind].step()
            heads[kind].clear()
            dist.barrier()
            if round_:
                times[kind].append(time.perf_counter() - started)
    return times


def measure_largest(classes: int, features: int, images: int, steps: int) -> dict[str, Any]:
    """Return the losses of a divided classifier, and the largest memory of a process."""
    head, losses, started = Head("sharded", classes, features, images), [], time.perf_counter()
    for _ in range(steps):
        losses.append(head.step())
        held = head.held()
        head.clear()
    status = Path("/proc/self/status").read_text()
    peak = torch.tensor(1024 * int(status.split("VmHWM:")[1].split()[0]))
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return {
        "losses": losses,
        "held": held,
        "peak": int(peak),
        "seconds": (time.perf_counter() - started) / steps,
    }


def together(function: Callable[..., Any], processes: int, **arguments: Any) -> Any:
    """Call a function in ``processes`` gloo processes, and return the result of the first."""
    with tempfile.TemporaryDirectory() as folder:
        given = (processes, folder, function, arguments)
        start_processes(_run, given, nprocs=processes, start_method="fork")
        return json.loads(Path(folder, "result.json").read_text())


def _run(
    rank: int, processes: int, folder: str, function: Callable[..., Any], arguments: dict[str, Any]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=processes)
    result = function(**arguments)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def measure(traffic: dict[str, Any], times: dict[str, Any], largest: dict[str, Any]) -> dict[str, Any]:
    """Run all measurements."""
    arguments = {"traffic": traffic, "times": times, "largest": largest}
    results = new_record("sharded", ("nn", "models", "lab/bench"), arguments, seed=SEED)
    rows, timed = [], []
    for processes in traffic["processes"]:
        for classes in traffic["classes"]:
            sizes = {"classes": classes, "features": traffic["features"], "images": traffic["images"]}
            measured = together(measure_traffic, processes, **sizes)
            rows += [{"processes": processes, **sizes, "kind": kind, **row} for kind, row in measured.items()]
            print(rows[-2:], flush=True)
    for classes in times["classes"]:
        sizes = {"classes": classes, "features": times["features"], "images": times["images"]}
        seconds = together(measure_times, times["processes"], **sizes, rounds=times["rounds"])
        timed.append({"processes": times["processes"], **sizes, "seconds": seconds})
        print(timed[-1], flush=True)
    sizes_of_largest = {name: value for name, value in largest.items() if name != "processes"}
    results["load"] = os.getloadavg()[0]
    results |= {"traffic": rows, "times": timed}
    results["largest"] = {**largest, **together(measure_largest, largest["processes"], **sizes_of_largest)}
    print(results["largest"], flush=True)
    results["memory"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return results


def formulas(row: dict[str, Any]) -> dict[str, int]:
    """Return the bytes that the formulas give for a row of the measured traffic."""
    from covpool.models.plan import sent_by_copies, sent_by_parts

    classes, features, processes = row["classes"], row["features"], row["processes"]
    share = classes if row["kind"] == "dense" else -(-classes // processes)
    held = 3 * 4 * share * (features + 1)
    if row["kind"] == "dense":
        return {"held": held, "sent": sent_by_copies(4 * classes * (features + 1), processes)}
    return {"held": held, "sent": sent_by_parts(row["images"], features, 4, processes)}


def tables(results: dict[str, Any]) -> str:
    """Return the tables of the page."""
    lines = [
        "| classes | processes | classifier | held per process | sent per process and step | formula |",
        "|---|---|---|---|---|---|",
    ]
    for row in results["traffic"]:
        held, sent = row["held"] / 1e6, row["sent"] / 1e6
        of_held, of_sent = (formulas(row)[name] / 1e6 for name in ("held", "sent"))
        lines.append(
            f"| {row['classes']:,} | {row['processes']} | {row['kind']} | {held:,.1f} MB | {sent:,.2f} MB | "
            f"{of_held:,.1f} MB, {of_sent:,.2f} MB |"
        )
    first = results["traffic"][0]
    lines += [
        "",
        f"{first['features']} features, {first['images']} images per step, float32, SGD with momentum.",
        "",
    ]
    timed, largest = results["times"][0], results["largest"]
    lines += [
        f"Seconds per step of {timed['processes']} processes with one thread each, {timed['features']:,} "
        f"features, {timed['images']} images per step, medians of {len(timed['seconds']['dense'])} rounds. "
        "The last column is the median of the ratios of each round, with the smallest and the largest. It "
        "can differ from the quotient of the times.",
        "",
        "| classes | dense | sharded | dense / sharded |",
        "|---|---|---|---|",
    ]
    for row in results["times"]:
        dense, sharded = (statistics.median(row["seconds"][kind]) for kind in KINDS)
        ratios = [a / b for a, b in zip(*(row["seconds"][kind] for kind in KINDS), strict=True)]
        lines.append(
            f"| {row['classes']:,} | {dense:.3f} | {sharded:.3f} | {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}) |"
        )
    copies = largest["processes"] * 12 * largest["classes"] * (largest["features"] + 1)
    first, *_, last = largest["losses"]
    lines += [
        "",
        f"A classifier of {largest['classes']:,} classes × {largest['features']:,} features trains on "
        f"{largest['processes']} processes of this machine. Each holds {largest['held'] / 1e9:.2f} GB of its "
        f"weights, gradient and momentum, and uses at most {largest['peak'] / 1e9:.2f} GB in total. "
        f"In {len(largest['losses'])} steps the loss falls from {first:.2f} to {last:.2f}. "
        f"Dense copies would take {copies / 1e9:.1f} GB, and the machine "
        f"has {results['memory'] / 1e9:.1f} GB.",
    ]
    return "\n".join(lines)


def arithmetic() -> str:
    """Return the table of classifiers that were not run: bytes, and the least time of a step."""
    from covpool.models.plan import sent_by_copies, sent_by_parts

    lines = [
        "| classifier | GPUs | images per step | per GPU, with gradient and momentum | logits per GPU | "
        "sent per step | time at least | dense: per GPU, sent per step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for classes, features, gpus, images in PLANNED:
        share = -(-classes // gpus)
        state, whole = (12 * count * (features + 1) for count in (share, classes))
        sent = sent_by_parts(images, features, 2, gpus)
        copies = sent_by_copies(4 * classes * (features + 1), gpus)
        flops = 6 * images * share * features
        compute, network = flops / PEAK * 1e3, sent / NETWORK * 1e3
        lines.append(
            f"| {classes:,} × {features:,} | {gpus} | {images:,} | {state / 1e9:.2f} GB | "
            f"{4 * images * share / 1e6:,.0f} MB | {sent / 1e6:,.0f} MB | "
            f"{compute:.1f} + {network:.1f} ms | {whole / 1e9:,.1f} GB, {copies / 1e9:,.1f} GB |"
        )
    return "\n".join(lines)


def draw(results: dict[str, Any]) -> Figure:
    """Draw the bytes that a process holds and sends, against the number of classes."""
    figure = new_figure(LIGHT, 9.0, 3.2)
    for axes, name, title in zip(
        figure.subplots(1, 2),
        ("held", "sent"),
        ("held by a process", "sent by a process per step"),
        strict=True,
    ):
        dress(axes, LIGHT)
        for kind, color in zip(KINDS, reversed(LIGHT.series), strict=True):
            for processes, style in ((2, "--"), (4, "-")):
                rows = [
                    row for row in results["traffic"] if (row["kind"], row["processes"]) == (kind, processes)
                ]
                axes.plot(
                    [row["classes"] for row in rows],
                    [row[name] / 1e6 for row in rows],
                    f"o{style}",
                    color=color,
                    label=f"{kind}, {processes} processes",
                )
        axes.set(xscale="log", yscale="log", xlabel="classes", ylabel="MB")
        axes.set_title(title, loc="left", fontsize=10, color=LIGHT.ink)
    axes.legend(frameon=False, fontsize=8)
    return figure


def page(text: str, results: dict[str, Any]) -> str:
    """Return the page with new tables between its marks."""
    return with_block(with_block(text, "sharded", tables(results)), "planned", arithmetic())


def main(out: Path = RESULTS) -> None:
    """Measure bytes and seconds of a classifier that is divided among processes, against a dense one.

    Args:
        out: results folder.
    """
    results = measure(TRAFFIC, TIMES, LARGEST)
    path = record_file(results, out)
    write_record(path, results, f"# Divided classifier\n\n{tables(results)}")
    print(path)


def write_pages(file: Path | None = None) -> list[Path]:
    """Write the tables and the figure of docs/scale_out.md.

    Args:
        file: results of ``python -m lab sharded``; the committed ones if not given.
    """
    results = read_record(file or committed_file("sharded"))
    replace_file(PAGE, page(PAGE.read_text(encoding="utf-8"), results).encode())
    replace_file(FIGURE, png(draw(results), dpi=120))
    return [PAGE, FIGURE]
