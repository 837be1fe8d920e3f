"""The results of an evaluation, for a terminal."""

from __future__ import annotations

from covpool.data.counts import counted
from covpool.evaluate.results import Results

NAMES = {
    "top1": "top-1",
    "top5": "top-5",
    "macro_f1": "macro-F1",
    "balanced_accuracy": "balanced accuracy",
    "expected_calibration_error": "calibration error (ECE)",
    "maximum_calibration_error": "  largest of a bin",
}


def results_table(results: Results) -> str:
    """A line for each metric in percent, with its interval where it has one, and the loss."""
    data = results["data"]
    told = f"{counted(results['images'], 'image')} of {data['split']}, {counted(data['classes'], 'class')}"
    lines = [told, "", f"{'':<25} {'%':>6}   95 % interval"]
    for key, name in NAMES.items():
        if key == "top5" and data["classes"] <= 5:
            continue  # right whatever was said
        line = f"{name:<25} {100 * results['metrics'][key]:6.1f}"
        if key in results["intervals"]:
            low, high = results["intervals"][key]
            line += f"   {100 * low:5.1f} to {100 * high:5.1f}"
        lines.append(line)
    return "\n".join([*lines, f"{'loss':<25} {results['metrics']['loss']:6.3f}"])
