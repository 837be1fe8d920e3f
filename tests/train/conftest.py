from __future__ import annotations

import pytest


@pytest.fixture
def _no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures take seconds to draw, and one test looks at them."""
    monkeypatch.setattr("covpool.train.report.write_report", lambda folder, images, model: folder)
