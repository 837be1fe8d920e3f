from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from covpool import create_model, save_model
from covpool.cli.main import main


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    save_model(create_model("test_resnet", dim=8, num_classes=3), tmp_path / "bundle")
    (tmp_path / "images").mkdir()
    for i in range(3):
        noise = torch.randint(0, 256, (64, 64, 3), dtype=torch.uint8).numpy()
        Image.fromarray(noise).save(tmp_path / "images" / f"{i}.png")
    (tmp_path / "images" / "bad.png").write_bytes(b"\x89PNG and no more")
    words = [str(tmp_path / "bundle"), str(tmp_path / "images"), "--out", str(tmp_path / "out")]
    assert main(["diagnose", *words]) == 0
    said = capsys.readouterr().out
    assert "isqrt_cov, 8 channels, 100 positions" in said
    assert "on 3 images" in said
    found = json.loads((tmp_path / "out" / "diagnosis.json").read_text())
    assert found["images"] == 3
    assert len(found["spectrum"]) == 8
    assert (tmp_path / "out" / "diagnosis.png").read_bytes()[:4] == b"\x89PNG"
