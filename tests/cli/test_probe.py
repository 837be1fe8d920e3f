from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import timm
import torch

from covpool.cli.main import main
from tests.data.trees import plant


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a probe command, in a folder with images and weights."""
    monkeypatch.chdir(tmp_path)
    names = [
        f"{split}/{bird}/{i}.jpg" for split in ("train", "test") for bird in ("jay", "tit") for i in "abcde"
    ]
    plant(tmp_path / "birds", *names)
    torch.save(timm.create_model("test_resnet", num_classes=0).state_dict(), "weights.pth")
    command = ["probe", "birds", "--model", "test_resnet", "--weights", "weights.pth", "--image-size", "64"]
    return [
        *command,
        "--dim",
        "8",
        "--heads",
        "gap,isqrt_cov",
        "--seeds",
        "1",
        "--epochs",
        "1",
        "--workers",
        "0",
    ]


def test_a_table_and_where_the_best_is(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    captured = capsys.readouterr()
    assert captured.err == "features take 38.4 kB in runs/features: 96×2×2 values per image and flip\n"
    printed = captured.out.splitlines()
    titles = ["head", "seeds", "set aside", "set aside, flip", "test", "test, flip", "over gap", "seconds"]
    assert re.split("  +", printed[0]) == titles
    assert [line.split()[0] for line in printed[1:3]] == ["gap", "isqrt_cov"]
    assert len({len(line) for line in printed[:3]}) == 1
    assert not printed[3]
    assert printed[4].startswith("best head: ")
    assert printed[4].endswith(", by 'set aside, flip', in runs/probe/bundle")
    assert printed[5] == "results: runs/probe/results.json"
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["record"] == json.loads(
        Path("runs/probe/results.json").read_text()
    )


@pytest.mark.slow
def test_tuning_of_several_layers_in_one_table(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--tune", "--trials", "2", "--layers", "last4", "--fusion", "concat"]) == 0
    titles, gap, ours = capsys.readouterr().out.splitlines()[:3]
    expected = ["over gap", "lr", "dropout", "parameters", "vector", "seconds"]
    assert re.split("  +", titles)[-6:] == expected
    assert re.split("  +", gap)[-2] == "96"
    assert re.split("  +", ours)[-2] == "36"


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--heads", "gap,isqrtcov2"], "a head must be one of"),
        (["--max-cache", "1e-9"], "more than --max-cache 1e-09: use a larger --max-cache"),
        (["--weights", "gone.pth"], "gone.pth: No such file or directory"),
        (["--pretrained"], "pass --pretrained or --weights FILE"),
        (["--image-size", "0"], "--image-size must be at least 1"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    words: list[str], more: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, *more]) == 2
    message = capsys.readouterr().err
    assert sentence in message
    assert len(message.splitlines()) == 1
