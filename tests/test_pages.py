"""The code of the front page and of the pages in docs runs as it stands."""

from __future__ import annotations

import re
import shlex
import shutil
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from covpool.cli.parser import parse
from tests.data.pictures import TINY10, needs_sparrows, needs_tiny10
from tests.evaluate.birds import a_bundle, some_sparrows

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"

pytestmark = pytest.mark.skipif(not README.exists(), reason="tests without the checkout around them")


def run_code(page: Path) -> dict[str, object]:
    """Run the Python of a page, block after block; what a comment before a block needs may be absent."""
    text = page.read_text(encoding="utf-8")
    names: dict[str, object] = {}
    pattern = re.compile(r"(?:<!-- needs: (\w+) -->\n)?```python\n(.*?)```", flags=re.DOTALL)
    for needed, block in pattern.findall(text):
        if not needed or find_spec(needed):
            exec(block, names)
    assert names, f"{page.name} has no code"
    return names


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # pages save models


def test_front_page(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_code(README)
    assert capsys.readouterr().out == ("torch.Size([2, 200]) 30612232\ntorch.Size([8, 32896]) tensor(True)\n")
    assert tuple(names["v"].shape) == (8, 32896)  # type: ignore[attr-defined]


def test_methods_page(capsys: pytest.CaptureFixture[str]) -> None:
    from covpool.nn import methods

    names = run_code(ROOT / "docs" / "methods.md")
    assert tuple(names["vector"].shape) == (2, 8256)  # type: ignore[attr-defined]
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(methods())


def test_explain_page(capsys: pytest.CaptureFixture[str]) -> None:
    run_code(ROOT / "docs" / "explain.md")
    assert capsys.readouterr().out.splitlines()[0] == "exact (10, 10) (100, 100) True"


def test_links_between_pages() -> None:
    """Every file that a page links to is there, and every test that one names."""
    pages = [README, *(ROOT / "docs").glob("*.md")]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)#:]+)(?:#[\w-]*)?\)", text):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"
        for file in re.findall(r"`(tests/[\w/]+\.py)`", text):
            assert (ROOT / file).exists(), f"{page.name} names {file}"
    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", text))
    found = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    assert named
    assert {name for name in named if f"def {name}(" not in found} == set()


def test_models_page() -> None:
    names = run_code(ROOT / "docs" / "models.md")
    assert names["model"].num_classes == 10  # type: ignore[attr-defined]
    assert len(names["groups"]) == 2  # type: ignore[arg-type]


@needs_tiny10
def test_training_page(capsys: pytest.CaptureFixture[str]) -> None:
    for name in sorted((TINY10 / "train").iterdir())[:2]:
        Path("birds", name.name).mkdir(parents=True)
        for file in sorted(name.iterdir())[:20]:
            shutil.copy(file, Path("birds", name.name))
    names = run_code(ROOT / "docs" / "training.md")
    assert names["run"].summary["images"] == {"train": 36, "val": 4}  # type: ignore[attr-defined]
    assert "report.html" in capsys.readouterr().out


@needs_tiny10
def test_probing_page(capsys: pytest.CaptureFixture[str]) -> None:
    import timm
    import torch

    for split, count in (("train", 10), ("test", 5)):
        for name in sorted((TINY10 / "train").iterdir())[:2]:
            Path("birds", split, name.name).mkdir(parents=True)
            for file in sorted(name.iterdir())[:count]:
                shutil.copy(file, Path("birds", split, name.name, f"{split}-{file.name}"))
    torch.save(timm.create_model("resnet10t", num_classes=0).state_dict(), "resnet10t.pth")
    run_code(ROOT / "docs" / "probing.md")
    assert Path("runs", "probe", "bundle", "covpool.json").exists()
    assert "bundle" in capsys.readouterr().out


@needs_sparrows
def test_evaluation_page(capsys: pytest.CaptureFixture[str]) -> None:
    some_sparrows(Path("birds"))
    a_bundle(Path("runs/birds/bundle"))
    names = run_code(ROOT / "docs" / "evaluation.md")
    assert names["done"].results["images"] == 54  # type: ignore[attr-defined]
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize("verb", ["eval", "retrieve"])
def test_commands_of_the_evaluation_page(verb: str) -> None:
    """Every option that the page names exists."""
    text = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    commands = re.findall(rf"covpool {verb} (.*?)(?:\s+#.*)?$", text, flags=re.MULTILINE)
    assert len(commands) >= 2
    for command in commands:
        arguments = import_module(f"covpool.cli.{verb}").Arguments
        parse(verb, arguments, shlex.split(command))


@needs_sparrows
def test_export_page(capsys: pytest.CaptureFixture[str]) -> None:
    some_sparrows(Path("birds"), train=1, test=2)
    a_bundle(Path("runs/birds/bundle"))
    names = run_code(ROOT / "docs" / "export.md")
    assert names["report"].parity["onnx"].top1 == 1.0  # type: ignore[attr-defined]
    assert names["logits"].shape == (1, 6)  # type: ignore[attr-defined]
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_commands_of_the_export_page() -> None:
    """Every option that the page names exists."""
    from covpool.cli.export import Arguments
    from covpool.export import ExportOptions

    text = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    commands = re.findall(r"covpool export (.*?)(?:\s+#.*)?$", text, flags=re.MULTILINE)
    assert len(commands) >= 3
    for command in commands:
        arguments, _ = parse("export", Arguments, shlex.split(command))
        ExportOptions(formats=arguments.formats)


def test_commands_of_the_training_page(tmp_path: Path) -> None:
    """Every option that the page names exists."""
    from covpool.cli.train import parse as parse_training

    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    commands = re.findall(r"covpool train (--.*?)(?:\s+#.*)?$", text, flags=re.MULTILINE)
    assert len(commands) >= 4
    for command in commands:
        if "--help" not in command:
            parse_training(shlex.split(command))
    for option in re.findall(r"`(--[\w.-]+ [^`]+)`", text):
        if not option.startswith(("--pool", "--compare")):
            parse_training(shlex.split(option))


def test_scale_page() -> None:
    pytest.importorskip("pyarrow")
    names = run_code(ROOT / "docs" / "scale.md")
    assert names["done"].new_images == 20  # type: ignore[attr-defined]
    assert names["again"].new_images == 0  # type: ignore[attr-defined]
    assert names["vectors"].files == 3  # type: ignore[attr-defined]


def test_commands_of_the_scale_page() -> None:
    """Every option that the page names exists."""
    from covpool.cli import embed, predict
    from covpool.cli.parser import parse

    text = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    commands = re.findall(r"^    covpool (predict|embed) (.*)$", text, flags=re.MULTILINE)
    assert len(commands) == 3
    files = {"embed": embed, "predict": predict}
    for verb, words in commands:
        parse(f"covpool {verb}", files[verb].Arguments, shlex.split(words))  # type: ignore[attr-defined]
