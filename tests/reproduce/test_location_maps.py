from __future__ import annotations

from pathlib import Path

import pytest
import torch

from covpool import create_model, save_model
from covpool.reproduce import location_maps
from tests.data.pictures import SPARROWS, needs_sparrows


@needs_sparrows
def test_every_order_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = create_model("test_resnet", dim=8, num_classes=3)
    save_model(model, tmp_path / "bundle")
    flat = torch.zeros(160, 160).numpy()  # Grad-CAM's package is not among ours
    monkeypatch.setattr(location_maps, "_grad_cam", lambda model, image, label: flat)
    results = location_maps.run(tmp_path / "bundle", SPARROWS, 3)
    assert len(results["rows"]) == 3
    orders = ["exact map", "Grad-CAM", "centre first", "random places"]
    assert [list(row) for row in results["rows"]] == [orders] * 3
    assert all(0 < area < 1 for row in results["rows"] for pair in row.values() for area in pair)
    table = location_maps.table(results)
    assert all(f"| {name} | 0." in table for name in orders)


def test_wins_are_counted() -> None:
    rows = [{"exact map": [0.1, 0.9], "x": [0.2, 0.95]}, {"exact map": [0.3, 0.9], "x": [0.2, 0.8]}]
    assert location_maps._wins(rows, "x", 0) == "50"
    assert location_maps._wins(rows, "x", 1) == "50"
