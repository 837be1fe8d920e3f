"""A probe that takes seconds: the number of species, and the options."""

from __future__ import annotations

from covpool.evaluate.probe import ProbeOptions

SPECIES = 3
OPTIONS = ProbeOptions(
    "test_efficientnet", weights="weights.pth", dim=8, seeds=2, epochs=2, workers=0, image_size=64
)
