"""``covpool fit`` on real photographs: the comparison, cross-validation, fine-tuning and kills."""

from __future__ import annotations

import contextlib
import csv
import json
import shutil
from pathlib import Path

import pytest
import timm
import torch

import covpool.evaluate.fit
from covpool.cli import fit as cli_fit
from covpool.cli.main import main
from covpool.evaluate.probe.options import FitOptions
from covpool.models.bundle import load_model
from tests.data.pictures import SPARROWS, needs_sparrows
from tests.forked import command, finish, send_when
from tests.train.report.test_pages import Page

pytestmark = needs_sparrows
MODEL = ["--model", "test_efficientnet", "--weights", "weights.pth", "--image-size", "64", "--dim", "8"]
SMALL = [*MODEL, "--workers", "0", "--seeds", "2"]


@pytest.fixture
def birds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Photographs of three species and weights, in the current folder."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    torch.save(timm.create_model("test_efficientnet", num_classes=0).state_dict(), "weights.pth")
    for split in ("train", "test"):
        for species in sorted((SPARROWS / split).iterdir())[:3]:
            (tmp_path / "birds" / split / species.name).mkdir(parents=True)
            for image in sorted(species.iterdir())[:10]:
                shutil.copy(image, tmp_path / "birds" / split / species.name)
    return tmp_path / "birds"


def rows(path: str) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
@pytest.mark.usefixtures("birds")
def test_from_a_folder_to_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    Path("birds/train/photo.nef").write_bytes(b"raw")
    assert main(["fit", "birds", *SMALL]) == 0
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert "1/3 check the images" in lines
    assert any("1 not read; see runs/birds/problems.csv" in line for line in lines)
    assert "2/3 compare gap and isqrt_cov on frozen test_efficientnet" in lines
    assert "    accuracy is measured on 30 images: its 95 % interval is up to ±18 points" in lines
    table = captured.out.splitlines()
    assert [line.split()[0] for line in table[:3]] == ["head", "gap", "isqrt_cov"]
    assert "covpool predict runs/birds/bundle PHOTO.jpg" in captured.out
    again = " ".join(["covpool fit birds --out runs/birds", *MODEL, "--seeds 2 --finetune"])
    assert again in captured.out

    results = json.loads(Path("runs/birds/results.json").read_bytes())
    best = results["best"]
    predictions = rows(f"runs/birds/probe/predictions/{best}-0.csv")
    assert len(predictions) == 30
    right = sum(row["label"] == row["predicted"] for row in predictions)
    assert results["top1"] == pytest.approx(right / 30)
    assert load_model("runs/birds/bundle").config.pool == best

    page = Page(Path("runs/birds/report.html"))
    assert f"{100 * results['top1']:.1f} % top-1 accuracy on 30 test images" in page.words.replace(
        "\u00a0", " "
    )
    for words in ("Heads compared", "What to do next", "Confusion matrix", "Most confident errors"):
        assert words in page.words
    before = Path("runs/birds/probe/results.json").read_text()
    assert main(["fit", "birds", *SMALL, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["record"]["heads"] == results["heads"]
    assert json.loads(before)["rows"] == json.loads(Path("runs/birds/probe/results.json").read_text())["rows"]


@pytest.mark.parametrize(("data", "out"), [("birds.v2/", "birds.v2"), ("link", "link"), (".", "here")])
def test_the_folder_has_the_name_of_the_data(
    data: str, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("birds.v2").mkdir()
    Path("link").symlink_to("birds.v2")
    called = []
    monkeypatch.setattr(covpool.evaluate.fit, "fit_images", lambda *_, out, **__: called.append(out))
    with contextlib.suppress(AttributeError):  # nothing was fitted
        cli_fit.run(cli_fit.Arguments(data), FitOptions())
    assert called == [Path("runs") / out]


@pytest.mark.usefixtures("birds")
def test_without_a_test_split_every_image_is_predicted_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "birds/train", *SMALL, "--out", "runs/folds", "--seeds", "1"]) == 0
    captured = capsys.readouterr()
    position = captured.err.index("no test images: 5-fold cross-validation")
    assert position < captured.err.index("features take")  # before the work starts
    assert "(cross-validation)" in captured.out
    results = json.loads(Path("runs/folds/results.json").read_bytes())
    predictions = rows(f"runs/folds/probe/predictions/{results['best']}-0.csv")
    assert len({row["name"] for row in predictions}) == len(predictions) == 30
    assert "by cross-validation" in Page(Path("runs/folds/report.html")).words


@pytest.mark.slow
@pytest.mark.usefixtures("birds")
def test_fine_tuning_starts_from_the_best_head(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "birds", *SMALL]) == 0
    assert main(["fit", "birds", *SMALL, "--finetune", "--epochs", "1"]) == 0
    captured = capsys.readouterr()
    assert "3/4 fine-tune test_efficientnet from" in captured.err
    tuned = json.loads(Path("runs/birds/results.json").read_bytes())["finetuned"]
    start, end = load_model("runs/birds/start"), load_model("runs/birds/finetune/bundle")
    moved, size = (
        (end.get_classifier().weight - start.get_classifier().weight).norm(),
        start.get_classifier().weight.norm(),
    )
    assert 0 < moved < 0.3 * size  # a new classifier would be far away
    kept = load_model("runs/birds/bundle").state_dict()
    chosen = end if tuned["is_best"] else load_model("runs/birds/probe/bundle")
    assert all(torch.equal(kept[name], value) for name, value in chosen.state_dict().items())


@pytest.mark.slow
@pytest.mark.usefixtures("birds")
def test_a_fine_tuned_network_is_not_cross_validated() -> None:
    words = [
        "fit",
        "birds/train",
        *SMALL,
        "--seeds",
        "1",
        "--out",
        "runs/folds",
        "--finetune",
        "--epochs",
        "1",
    ]
    assert main(words) == 0
    results = json.loads(Path("runs/folds/results.json").read_bytes())
    is_tuned = results["finetuned"]["is_best"]
    page = Page(Path("runs/folds/report.html"))
    assert results["split"] == ("val" if is_tuned else "cross-validation")
    assert ("by cross-validation" in page.words) != is_tuned


@pytest.mark.slow
def test_a_killed_fit_resumes(birds: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = command("fit", birds, *SMALL, "--out", "killed", log=log)
    send_when(process, lambda: Path("killed/probe/predictions/gap-1.csv").stat(), log)
    for folder in ("killed", "undisturbed"):
        finish(command("fit", birds, *SMALL, "--out", folder, log=log), log)
    killed, undisturbed = (
        json.loads(Path(folder, "results.json").read_bytes()) for folder in ("killed", "undisturbed")
    )
    for name in ("top1", "best"):
        assert killed[name] == undisturbed[name]
    assert [head["test"] for head in killed["heads"]] == [head["test"] for head in undisturbed["heads"]]
