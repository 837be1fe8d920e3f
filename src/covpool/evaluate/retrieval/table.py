"""The results of a search, for a terminal."""

from __future__ import annotations

from covpool.data.counts import counted
from covpool.evaluate.results import Results


def results_table(results: Results) -> str:
    """A line for each metric, in percent."""
    data, gallery, metrics = results["data"], results["gallery"], results["metrics"]
    among = (
        "the others" if gallery is None else f"{counted(gallery['images'], 'image')} of {gallery['split']}"
    )
    told = f"{counted(results['queries'], 'image')} of {data['split']} searched for their class among {among}"
    if without := results["queries_without_match"]:
        told += f"; {without:,} more have none to find"
    shares = {f"recall at {k}": share for k, share in metrics["recall"].items()}
    shares |= {"mAP": metrics["map"], "mAP at R": metrics["map_at_r"]}
    lines = [f"{name:<14} {100 * share:6.1f}" for name, share in shares.items() if share is not None]
    return "\n".join([told, "", f"{'':<14} {'%':>6}", *lines])
