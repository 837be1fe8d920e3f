"""Table 2 and Figure 3: time and memory of the layers, and images a second against the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from covpool.bench import render, run_methods
from covpool.bench.methods.paper import LAYERS, PAPER_SIZE
from covpool.reproduce.claims import Claim, Judgement, judged_ratio, not_run
from covpool.reproduce.experiments.measurement import Measurement, Results

FILE = "methods"


def run(sets: Path | None, runs: Path, out: Path) -> None:
    """``covpool bench methods``."""
    render(run_methods(out))


def _times(text: str, less: str, more: str, paper: float) -> Claim:
    def judge(results: Results) -> Judgement:
        if FILE not in results:
            return Judgement("", "not run here")
        entries = results[FILE]["layers"][PAPER_SIZE]["entries"]
        faster, slower = (entries[label]["value_and_gradient"]["ratio"] for label in (less, more))
        return judged_ratio(faster, slower, paper)

    return Claim(text, f"{paper:.1f} times", judge)


def _memory(label: str, steps: int) -> Claim:
    paper = LAYERS[label].memory
    assert paper is not None

    def judge(results: Results) -> Judgement:
        if FILE not in results:
            return Judgement("", "not run here")
        found = results[FILE]["layers"][PAPER_SIZE]["entries"][label]["bytes_kept_per_image"] / 2**20
        near = abs(found / paper - 1) < 0.1
        return Judgement(f"{found:.2f} MiB", "agrees" if near else "does not agree")

    return Claim(f"What {steps} steps keep for the gradient, an image", f"{paper} MB", judge)


def _growing_gap(results: Results) -> Judgement:
    """Whether isqrt_cov's lead over mpn_cov, on two processes, is larger at the largest batch."""
    if FILE not in results or results[FILE]["training"] is None:
        return Judgement("", "not run here")
    steps = results[FILE]["training"]["steps"]
    first, last = (_lead(step["batch"], step["two"]) for step in (steps[0], steps[-1]))
    ours = " and ".join(
        f"{middle:+.1f} [{low:+.1f}, {high:+.1f}] images a second at a batch of {step['batch']}"
        for (low, middle, high), step in ((first, steps[0]), (last, steps[-1]))
    )
    if last[0] > max(first[2], 0):
        return Judgement(ours, "agrees in sign")
    return Judgement(ours, "does not agree" if last[2] < first[0] else "not resolved here")


def _lead(batch: int, times: dict[str, Any]) -> tuple[float, float, float]:
    """In images a second: the lowest, the middle and the highest that quartiles allow."""
    ours, others = (times[pool]["seconds"] for pool in ("isqrt_cov", "mpn_cov"))
    return (
        batch / ours["q3"] - batch / others["q1"],
        batch / ours["median"] - batch / others["median"],
        batch / ours["q1"] - batch / others["q3"],
    )


SVD, LYAPUNOV = (
    "improved_bcnn forward=svd backward=svd",
    "improved_bcnn forward=newton_schulz backward=lyapunov",
)
EXPERIMENT = Measurement(
    name="table2",
    title="Table 2 and Figure 3: time, memory, and images a second",
    paper="three steps are 3.1 times, five 1.8 times as fast as MPN-COV; on GPUs, where EIG and SVD are slow",
    at_full_size=(
        "On a GPU decompositions wait where products do not: the ratios to MPN-COV, improved B-CNN "
        "and G2DeNet grow, and two devices show the gap of Figure 3."
    ),
    files=(FILE,),
    claims=(
        _times("Three steps are faster than MPN-COV", "isqrt_cov steps=3", "mpn_cov", 3.1),
        _times("Five steps are faster than MPN-COV", "isqrt_cov", "mpn_cov", 1.8),
        _times("They are faster than improved B-CNN by SVD (here `eigh`)", "isqrt_cov", SVD, 13.51 / 1.41),
        _times(
            "They are faster than improved B-CNN by iteration and Lyapunov",
            "isqrt_cov",
            LYAPUNOV,
            13.91 / 1.41,
        ),
        _times("They are faster than G2DeNet (here `eigh`)", "isqrt_cov", "g2denet root=svd", 8.56 / 1.41),
        not_run(
            "Forward, improved B-CNN by iteration is faster than by SVD",
            f"{11.19 / 2.09:.1f} times",
            "decompositions within methods are by `eigh`, which is faster than SVD",
        ),
        _memory("isqrt_cov", 5),
        _memory("isqrt_cov steps=3", 3),
        not_run("Inference alone keeps 0.125 MB an image", "0.125 MB", "nothing is kept for a gradient then"),
        not_run(
            "Matlab's EIG and SVD on a CPU are faster than cuSOLVER's", "over 10 times", "no GPU was at hand"
        ),
        Claim("On two devices the lead over MPN-COV grows with the batch", "grows", _growing_gap),
    ),
    run=run,
)
