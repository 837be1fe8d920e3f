from __future__ import annotations

import pytest


@pytest.fixture
def _no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write no report: figures take seconds to draw, and one test checks them."""
    monkeypatch.setattr("covpool.training.report.write_report", lambda folder, images, model: folder)


@pytest.fixture
def _no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the report with empty figures."""
    for module in ("report.figures", "report"):
        monkeypatch.setattr(f"covpool.training.{module}.png", lambda figure, *_, **__: b"")
