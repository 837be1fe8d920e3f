from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from covpool import create_model, save_model
from lab.experiments import location_maps
from lab.experiments.location_maps import areas, centre_first
from tests.data.pictures import SPARROWS, needs_sparrows


@pytest.mark.slow
@needs_sparrows
def test_every_order_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = create_model("test_resnet", dim=8, num_classes=3)
    save_model(model, tmp_path / "bundle")
    flat = torch.zeros(160, 160).numpy()  # the package grad-cam is not a dependency
    monkeypatch.setattr(location_maps, "_grad_cam", lambda model, image, label: flat)
    results = location_maps.run(tmp_path / "bundle", SPARROWS, 3)
    assert len(results["rows"]) == 3
    orders = ["exact map", "Grad-CAM", "centre first", "random places"]
    assert [list(row) for row in results["rows"]] == [orders] * 3
    assert all(0 < area < 1 for row in results["rows"] for pair in row.values() for area in pair)
    table = location_maps.table(results)
    assert all(f"| {location_maps.SHOWN.get(name, name)} | 0." in table for name in orders)


def test_wins_are_counted() -> None:
    rows = [{"exact map": [0.1, 0.9], "x": [0.2, 0.95]}, {"exact map": [0.3, 0.9], "x": [0.2, 0.8]}]
    assert location_maps._wins(rows, "x", 0) == "50 %"
    assert location_maps._wins(rows, "x", 1) == "50 %"


def classify(images: Tensor) -> Tensor:
    """Predict class 1 from the contrast of one corner alone."""
    corner = images[:, :, :16, :16].std((1, 2, 3))
    return torch.stack([torch.zeros_like(corner), 20 * corner - 10], 1)


def test_the_right_order_is_the_best() -> None:
    torch.manual_seed(0)
    image = torch.randn(3, 64, 64)
    corner, opposite = torch.zeros(64, 64), torch.zeros(64, 64)
    corner[:16, :16], opposite[-16:, -16:] = 1, 1
    found = areas(classify, image, 1, {"right": corner, "wrong": opposite, "centre": centre_first(64, 64)})
    assert found["right"].deletion < found["centre"].deletion
    assert found["right"].deletion < found["wrong"].deletion
    assert found["right"].insertion > found["wrong"].insertion


def test_all_or_nothing() -> None:
    """The ends of the curves do not depend on the order. A constant classifier gives its constant."""
    image = torch.randn(3, 32, 32)
    found = areas(lambda x: torch.zeros(len(x), 4), image, 2, {"any": torch.rand(32, 32)})
    assert found["any"].deletion == pytest.approx(0.25)
    assert found["any"].insertion == pytest.approx(0.25)


def test_the_centre_comes_first() -> None:
    order = centre_first(5, 7)
    assert order.flatten().argmax() == 2 * 7 + 3
    assert order.flatten().argmin() in (0, 6, 28, 34)
