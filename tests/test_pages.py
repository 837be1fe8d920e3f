"""The Python code and the commands on the pages run as written, and links are valid."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from covpool.cli.main import VERBS, command_of, main
from covpool.cli.parser import parse_several
from tests.data.pictures import SPARROWS, TINY10
from tests.evaluate.birds import a_bundle, some_sparrows
from tests.pages import (
    DOCS,
    PAGES,
    ROOT,
    commands,
    languages,
    name_of,
    named_commands,
    needs_pages,
    python_blocks,
    read,
)

pytestmark = needs_pages

# Pages whose code is run by another test, because it adds to the package or needs a server.
RUN_ELSEWHERE = {
    "docs/adding_a_method.md": "tests/nn/pooling/test_adding_a_method.py",
    "docs/hub.md": "tests/models/hub/test_hub.py",
}
WITH_CODE = [name_of(page) for page in PAGES if python_blocks(page) and name_of(page) not in RUN_ELSEWHERE]
WITH_COMMANDS = [name_of(page) for page in PAGES if list(commands(page)) or named_commands(page)]


def tiny_birds(splits: dict[str, int]) -> None:
    """Make a folder ``birds`` from two classes of tiny10. The split ``""`` is the folder itself."""
    if not TINY10.is_dir():
        pytest.skip("tiny10 is not next to the project")
    for split, count in splits.items():
        for name in sorted((TINY10 / "train").iterdir())[:2]:
            folder = Path("birds", split, name.name)
            folder.mkdir(parents=True)
            for file in sorted(name.iterdir())[:count]:
                shutil.copy(file, folder / f"{split}-{file.name}")


def sparrows_and_bundle(folder: str = "birds", train: int = 3, test: int = 9) -> None:
    if not SPARROWS.is_dir():
        pytest.skip("the sparrows are not next to the project")
    some_sparrows(Path(folder), train, test)
    a_bundle(Path("runs/birds/bundle"))


def for_probing() -> None:
    import timm
    import torch

    tiny_birds({"train": 10, "test": 5})
    torch.save(timm.create_model("resnet10t", num_classes=0).state_dict(), "resnet10t.pth")
    sparrows_and_bundle("CUB_200_2011", train=3, test=2)


# Files that the code of a page needs.
PREPARED: dict[str, Callable[[], None]] = {
    "docs/training.md": lambda: tiny_birds({"": 20}),
    "docs/probing.md": for_probing,
    "docs/evaluation.md": sparrows_and_bundle,
    "docs/export.md": lambda: sparrows_and_bundle(train=1, test=2),
    "docs/answers/images_per_class.md": lambda: tiny_birds({"train": 10, "test": 5}),
}


def check_front(names: dict[str, Any], out: str) -> None:
    assert tuple(names["vector"].shape) == (8, 32896)
    assert tuple(names["logits"].shape) == (2, 200)


def check_layer(names: dict[str, Any], out: str) -> None:
    assert out == "torch.Size([8, 200]) tensor(True)\n"


def check_functional(names: dict[str, Any], out: str) -> None:
    assert tuple(names["v"].shape) == (8, 32896)


def check_printed(page: str) -> Callable[[dict[str, Any], str], None]:
    """Return a check that every line is printed as the comment after its ``print`` states."""
    stated = re.findall(r"# (tensor\(\w+\)|True|False)$", read(ROOT / page), re.MULTILINE)
    assert stated

    def check(names: dict[str, Any], out: str) -> None:
        printed = out.splitlines()
        assert list(dict.fromkeys(stated)) == list(dict.fromkeys(printed))
        assert len(printed) >= len(stated)

    return check


def check_dino(names: dict[str, Any], out: str) -> None:
    assert len(out.splitlines()) == 4
    assert all(line.endswith("(2, 10)") for line in out.splitlines())


def check_images_per_class(names: dict[str, Any], out: str) -> None:
    assert out == "10 to 10 images per class\n"


def check_methods(names: dict[str, Any], out: str) -> None:
    from covpool.nn import methods

    assert tuple(names["vector"].shape) == (2, 8256)
    assert [line.split()[0] for line in out.splitlines()] == list(methods())


def check_models(names: dict[str, Any], out: str) -> None:
    assert names["model"].num_classes == 10
    assert len(names["groups"]) == 2


def check_training(names: dict[str, Any], out: str) -> None:
    assert names["run"].summary["images"] == {"train": 36, "val": 4}
    assert "report.html" in out


def check_probing(names: dict[str, Any], out: str) -> None:
    assert Path("runs", "probe", "bundle", "covpool.json").exists()
    assert "bundle" in out
    assert names["report"].classes == 6
    assert Path("birds-svm", "covpool.json").exists()


def check_evaluation(names: dict[str, Any], out: str) -> None:
    assert names["done"].results["images"] == 54
    assert len(out.splitlines()) == 2


def check_explain(names: dict[str, Any], out: str) -> None:
    assert out.splitlines()[0] == "exact (10, 10) (100, 100) True"


def check_merge(names: dict[str, Any], out: str) -> None:
    assert out == "tensor(True)\n"


def check_sklearn(names: dict[str, Any], out: str) -> None:
    assert out == "{'covpoolfeatures__pool': 'isqrt_cov'}\n"


def check_export(names: dict[str, Any], out: str) -> None:
    assert names["report"].parity["onnx"].top1 == 1.0
    assert names["logits"].shape == (1, 6)
    agreement, first, predicted = out.splitlines()
    assert agreement == "1.0"
    assert first == names["metadata"]["classes"][0]
    assert predicted in names["metadata"]["classes"]


def check_scale(names: dict[str, Any], out: str) -> None:
    assert names["done"].new_images == 20
    assert names["again"].new_images == 0
    assert names["vectors"].files == 3


# Checks of results that a page states.
CHECKED: dict[str, Callable[[dict[str, Any], str], None]] = {
    "README.md": check_front,
    "docs/api/nn.md": check_layer,
    "docs/api/functional.md": check_functional,
    **{
        page: check_printed(page)
        for page in (
            "docs/answers/nan_gradients.md",
            "docs/answers/matrix_square_root.md",
            "docs/answers/triangle_order.md",
        )
    },
    "docs/answers/dino_head.md": check_dino,
    "docs/answers/images_per_class.md": check_images_per_class,
    "docs/methods.md": check_methods,
    "docs/models.md": check_models,
    "docs/training.md": check_training,
    "docs/probing.md": check_probing,
    "docs/evaluation.md": check_evaluation,
    "docs/explain.md": check_explain,
    "docs/export.md": check_export,
    "docs/merge.md": check_merge,
    "docs/api/sklearn.md": check_sklearn,
    "docs/scale.md": check_scale,
}


# These are fast; the others export, train or evaluate.
FAST = ("README.md", "docs/merge.md")
CASES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in WITH_CODE]


@pytest.mark.parametrize("name", CASES)
def test_the_code_of_a_page_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run block after block. Skip a block if the package in the comment before it is missing."""
    monkeypatch.chdir(tmp_path)  # pages save models
    PREPARED.get(name, lambda: None)()
    names: dict[str, Any] = {}
    for needed, block in python_blocks(ROOT / name):
        if not needed or find_spec(needed):
            exec(block, names)
    if name in CHECKED:
        CHECKED[name](names, capsys.readouterr().out)


def test_no_code_is_hidden_from_these_tests() -> None:
    """Python is fenced as ``python``. Pages that are prepared, checked or run elsewhere exist."""
    for page in PAGES:
        assert languages(page) <= {"", "python", "sh", "diff", "math", "toml", "yaml"}, name_of(page)
        unfenced = re.sub(r"```.*?```", "", read(page), flags=re.DOTALL)
        assert not re.findall(r"^    (?:import|from) \w+", unfenced, re.MULTILINE), name_of(page)
    assert {*PREPARED, *CHECKED} <= set(WITH_CODE)
    for name, test in RUN_ELSEWHERE.items():
        assert python_blocks(ROOT / name)
        assert Path(name).name in read(ROOT / test)


@pytest.mark.parametrize("name", WITH_COMMANDS)
def test_the_commands_of_a_page_are_understood(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser of the verb accepts each command. In sentences, the verb and its options exist."""
    # The files of the commands are not here.
    monkeypatch.setattr("covpool.cli.parser.check_paths", lambda command, parsed: None)
    for verb, *words in commands(ROOT / name):
        assert verb in VERBS, f"{name}: covpool {verb}"
        if {"--help", "--help-all"} & {*words}:
            continue
        command = command_of(verb)
        if command.parse is not None:
            command.parse(words)
        else:
            parse_several(f"covpool {verb}", (command.Arguments, *command.OPTIONS), words)
    for verb, *words in named_commands(ROOT / name):
        assert verb in VERBS, f"{name}: covpool {verb}"
        options = [word.partition("=")[0] for word in words if word.startswith("--")]
        if options:
            assert set(options) <= options_of(verb, capsys), f"{name}: covpool {verb} {words}"


def options_of(verb: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """Return all options in the help of a verb."""
    capsys.readouterr()
    assert main([verb, "--help-all"]) == 0
    return set(re.findall(r"--[\w.-]+", capsys.readouterr().out))


def test_options_that_the_training_page_names() -> None:
    from covpool.cli.train import parse as parse_training

    named = re.findall(r"`(--[\w.-]+ [^`]+)`", read(DOCS / "training.md"))
    assert len(named) > 5
    for option in named:
        if not option.startswith(("--pool", "--compare")):
            parse_training(option.split())


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", read(page), flags=re.S), flags=re.M)
    words = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings]
    return {re.sub(r"[^\w\s-]", "", heading).replace(" ", "-") for heading in words}


def test_links_between_pages() -> None:
    """Every linked file, every linked heading and every named test exists."""
    for page in PAGES:
        text = read(page)
        for link, anchor in re.findall(r"\]\(([^)#:]*)(?:#([\w-]*))?\)", text):
            linked = page.parent / link if link else page
            assert linked.exists(), f"{page.name} links to {link}"
            if anchor and linked.suffix == ".md":
                assert anchor in anchors(linked), f"{page.name} links to {link}#{anchor}"
        for file in re.findall(r"`(tests/[\w/]+\.py)`", text):
            assert (ROOT / file).exists(), f"{page.name} names {file}"
    named = set(re.findall(r"`(test_\w+)`", "".join(map(read, PAGES))))
    found = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    assert named
    assert {name for name in named if f"def {name}(" not in found} == set()
