"""The row of isqrt_cov for the board of Efficient Probing, from real images and pretrained weights."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest

from lab.__main__ import main
from tests.models.weights.sparrows import FOLDER

BOARD = """family,method,arch,pretrain,eval,image_size,lp,lp_gap,ep,notes
CNN,Supervised,Lite0,IN-1K,IN-1K,224,1.00,yes,2.00,theirs
CNN,Supervised,Lite0,IN-1K,IN-1K,448,3.00,yes,4.00,another size
"""


@pytest.mark.slow
def test_a_row_with_logs_and_that_of_the_board(tmp_path: Path) -> None:
    if not FOLDER.is_dir():
        pytest.skip("there is no shared/data/sparrows next to the repository")
    data = tmp_path / "birds"
    for split in ("train", "test"):
        for species in sorted((FOLDER / split).iterdir())[:3]:
            shutil.copytree(species, data / split / species.name)
    words = [str(data), str(tmp_path / "out"), "tf_efficientnet_lite0", "Supervised", "Lite0"]
    words += ["--lp", "gap", "--compile", "false", "--workers", "0", "--pretrain", "IN-1K"]
    assert main(["board", *words]) == 0
    (row,) = csv.DictReader((tmp_path / "out" / "results.csv").read_text().splitlines())
    assert (row["lp_gap"], row["ep"], row["image_size"]) == ("yes", "", "224")
    assert 50 < float(row["isqrt_cov"]) <= 100
    log = (tmp_path / "out" / row["isqrt_cov_log"]).read_text()
    assert f"Max Accuracy: {row['isqrt_cov']}%" in log
    assert "Classifier Parameters: 24,771" in log  # 8,256 values and a bias, for 3 classes

    (tmp_path / "board.csv").write_text(BOARD)
    assert main(["board", *words, "--board", str(tmp_path / "board.csv")]) == 0
    (row,) = csv.DictReader((tmp_path / "out" / "results.csv").read_text().splitlines())
    assert (row["lp"], row["ep"], row["notes"]) == ("1.00", "2.00", "theirs")
    assert 50 < float(row["isqrt_cov"]) <= 100
