from __future__ import annotations

import pytest


@pytest.fixture
def _no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures take seconds to draw, and other tests look at them."""
    for module in ("figures", "pages"):
        monkeypatch.setattr(f"covpool.train.report.{module}.png", lambda figure, *_, **__: b"")
