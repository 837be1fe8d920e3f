"""Adding, removing and merging give the model of a fit to the same images with the same basis."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from covpool.cli.main import main
from covpool.closed_form.fitting import fit
from covpool.closed_form.kept import SUMS, TENSORS, forget, load_sums, merge, update
from covpool.closed_form.solve import Solution, solve
from covpool.closed_form.sums import Sums
from covpool.errors import UsageError
from covpool.models.bundle import load_model
from covpool.models.saving import save_model
from tests.closed_form.test_fitting import birds, small
from tests.data.pictures import needs_sparrows

__all__ = ["birds"]
pytestmark = needs_sparrows


def solved(folder: str | Path) -> tuple[Solution, tuple[str, ...]]:
    sums = load_sums(Path(folder) / SUMS)[0]
    return solve(sums), sums.classes


def assert_same_model(folder: str | Path, reference: str | Path) -> None:
    """Compare the weights of each class in float64."""
    (one, classes), (other, names) = solved(folder), solved(reference)
    assert sorted(classes) == sorted(names)
    order = [names.index(name) for name in classes]
    torch.testing.assert_close(one.weight, other.weight[order], atol=1e-8, rtol=0)
    torch.testing.assert_close(one.bias, other.bias[order], atol=1e-8, rtol=0)


def part_of(birds: Path, name: str, keep: slice, species: slice = slice(None)) -> str:
    """Copy some training images of some species into another folder."""
    for folder in sorted((birds / "train").iterdir())[species]:
        (birds.parent / name / "train" / folder.name).mkdir(parents=True)
        for photo in sorted(folder.iterdir())[keep]:
            shutil.copy(photo, birds.parent / name / "train" / folder.name)
    return name


@pytest.mark.parametrize("head", ["isqrt_cov", "gap"])
def test_update_with_a_new_class_and_more_images(birds: Path, head: str) -> None:
    options = small(heads=(head,), keep_sums=True)
    fit(part_of(birds, "some", slice(0, 6), slice(0, 2)), "grown", **options)
    basis = {} if head == "gap" else {"basis": "grown"}
    shutil.copytree("grown", "first")
    stages: dict[str, None] = {}
    # 8 images of two species and 10 of a new one; 12 are known
    changed = update("grown", "birds", progress=lambda what, done, total: stages.setdefault(what))
    assert list(stages) == ["saved sums, of grown", "images", "regularization strengths"]
    assert (changed.images, changed.classes, changed.new_images, changed.known_images) == (30, 3, 18, 12)
    assert changed.new_classes == 1
    with pytest.raises(UsageError, match="grown was changed by covpool update, forget or merge"):
        fit("some", "grown", **options)
    fit("birds", "scratch", **options, **{key: "first" for key in basis})
    assert_same_model("grown", "scratch")
    assert set(changed.model.classes or ()) == {path.name for path in (birds / "train").iterdir()}


def test_forget_images_and_a_whole_class(birds: Path) -> None:
    options = small(heads=("isqrt_cov",), keep_sums=True)
    fit("birds", "all", **options)
    shutil.copytree("all", "first")
    species = sorted((birds / "train").iterdir())
    shutil.copytree(species[2], "out/c")
    shutil.copy(sorted(species[0].iterdir())[0], "out/renamed.jpg")
    assert main(["forget", "all", "out"]) == 0
    shutil.rmtree(species[2])
    shutil.rmtree(birds / "test")
    sorted(species[0].iterdir())[0].unlink()
    fit("birds", "scratch", basis="first", **options)
    assert_same_model("all", "scratch")
    with pytest.raises(
        UsageError, match=r"11 of 11 images to remove, first .*are not training images of all"
    ):
        forget("all", "out")
    Path("list.csv").write_text("path\nout/renamed.jpg\nout/none.jpg\n", "utf-8")
    with pytest.raises(FileNotFoundError, match=r"1 of 2 images to remove") as missing:
        forget("all", "list.csv")
    assert str(missing.value.filename).endswith("out/none.jpg")


def test_two_sites_merge(birds: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = small(heads=("isqrt_cov",), keep_sums=True)
    fit(part_of(birds, "one", slice(0, 5)), "a", **options)
    fit(part_of(birds, "other", slice(5, 10), slice(0, 2)), "b", basis="a", **options)
    assert main(["merge", "a", "b", "--out", "both"]) == 0
    assert "25 images of 3 classes" in capsys.readouterr().out
    part_of(birds, "joined", slice(0, 10), slice(0, 2))
    part_of(birds, "joined", slice(0, 5), slice(2, 3))
    fit("joined", "scratch", basis="a", **options)
    assert_same_model("both", "scratch")
    fit("other", "c", **options)
    with pytest.raises(UsageError, match=r"different vectors.*--basis"):
        merge("a", "c", "none")


def test_sums_without_rows_change_in_the_same_way(birds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covpool.closed_form.sums.MAX_ROWS_BYTES", 0)
    monkeypatch.setattr(Sums.__init__, "__defaults__", (1, 0))
    options = small(heads=("isqrt_cov",), keep_sums=True)
    fit(part_of(birds, "some", slice(0, 6)), "grown", **options)
    assert not load_sums(Path("grown") / SUMS)[0].is_exact
    shutil.copytree("grown", "first")
    update("grown", part_of(birds, "more", slice(6, 10)))
    fit("birds", "scratch", basis="first", **options)
    assert_same_model("grown", "scratch")
    forget("grown", "more")
    assert_same_model("grown", "first")


def test_damaged_or_missing_sums(birds: Path) -> None:
    fit("birds", "run", **small(heads=("gap",)))
    with pytest.raises(UsageError, match=r"run/sums does not exist: run covpool fit with --keep-sums"):
        update("run", "birds")
    fit("birds", "kept", **small(heads=("gap",), keep_sums=True))
    file = Path("kept", SUMS, TENSORS)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(UsageError, match="are damaged"):
        update("kept", "birds")


def test_sums_of_another_model_are_refused(birds: Path) -> None:
    options = small(heads=("gap",), keep_sums=True)
    fit("birds", "run", **options)
    model = load_model("run/bundle")
    with torch.no_grad():
        next(model.backbone.parameters()).mul_(1.5)  # as fine-tuning does
    save_model(model, "run/bundle")
    for change in (lambda: update("run", "birds"), lambda: merge("run", "run", "both")):
        with pytest.raises(UsageError, match="is not the model whose sums are kept"):
            change()


def small_sums(birds: Path, out: str, **fields: object) -> None:
    fit("birds", out, **small(heads=("gap",), keep_sums=True, **fields))


def test_forget_leaves_no_trace_of_an_image(birds: Path) -> None:
    small_sums(birds, "run")
    photo = sorted((birds / "train").glob("*/*.jpg"))[0]
    assert any(photo.name.encode() in file.read_bytes() for file in Path("run").rglob("*") if file.is_file())
    old = Path("run", f".{SUMS}.covpool-previous")  # as after a kill in the middle of a change
    shutil.copytree(Path("run", SUMS), old)
    shutil.copy(photo, "photo.jpg")
    assert forget("run", "photo.jpg").new_images == -1
    for file in Path("run").rglob("*"):
        assert file.is_dir() or photo.name.encode() not in file.read_bytes(), file
    assert not old.exists()
    assert not Path("run", "report.html").exists()


def test_sums_are_saved_again_by_another_fit_into_the_folder(birds: Path) -> None:
    small_sums(birds, "run")
    next(birds.glob("train/*/*.jpg")).unlink()
    fit("birds", "run", **small(heads=("gap",)))
    assert update("run", "birds").known_images == 29


@pytest.mark.parametrize("exact", [True, False])
def test_unreadable_images_are_told(birds: Path, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not exact:
        monkeypatch.setattr(Sums.__init__, "__defaults__", (1, 0))
    small_sums(birds, "run")
    folder = next((birds / "train").iterdir())
    part = Path("more") / folder.name
    part.mkdir(parents=True)
    shutil.copy(sorted(folder.iterdir())[0], part / "a.jpg")
    (part / "broken.jpg").write_bytes(b"no image")
    changed = update("run", "more")
    assert changed.unreadable == (f"{folder.name}/broken.jpg",)
    assert changed.new_images == int(not exact)  # the other image is known
    before = load_sums(Path("run", SUMS))[0].counts()
    with pytest.raises(UsageError, match="broken.jpg" if exact else "cannot be read, so nothing is removed"):
        forget("run", "more")
    assert torch.equal(load_sums(Path("run", SUMS))[0].counts(), before)


def test_an_interrupted_merge_can_be_repeated(birds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_sums(birds, "a")
    with monkeypatch.context() as patch:
        patch.setattr("covpool.closed_form.kept.save_sums", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            merge("a", "a", "both")
    assert sorted(path.name for path in Path().iterdir()) == ["a", "birds", "weights.pth"]
    assert merge("a", "a", "both").known_images == 30


def test_sums_of_two_heads_do_not_merge(birds: Path) -> None:
    small_sums(birds, "a")
    fit("birds", "b", **small(heads=("isqrt_cov",), keep_sums=True))
    with pytest.raises(UsageError, match=r"of the head gap, and those of b of isqrt_cov: .* --heads gap"):
        merge("a", "b", "both")
    assert not Path("both").exists()


def test_a_missing_fit_is_not_created(birds: Path) -> None:
    with pytest.raises(UsageError, match="typo is not a folder of covpool fit"):
        update("typo", birds)
    assert not Path("typo").exists()
