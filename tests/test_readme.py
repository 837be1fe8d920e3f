"""The code on the front page runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.skipif(not README.exists(), reason="tests without the checkout around them")
def test_code_of_the_front_page(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) >= 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    assert capsys.readouterr().out == "torch.Size([8, 32896]) tensor(True)\n"
    assert tuple(names["v"].shape) == (8, 32896)  # type: ignore[attr-defined]
