from __future__ import annotations

import pytest


@pytest.fixture
def _no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures take seconds to draw, and one test looks at them."""
    monkeypatch.setattr("covpool.train.report.write_report", lambda folder, images, model: folder)


@pytest.fixture
def _no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report itself is written, with empty figures."""
    for module in ("figures", "pages"):
        monkeypatch.setattr(f"covpool.train.report.{module}.png", lambda figure, *_, **__: b"")
