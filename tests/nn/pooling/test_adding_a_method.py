"""The method of docs/adding_a_method.md: one file and one line make it available everywhere."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from covpool.nn import CovPool, methods
from covpool.nn.pooling import METHODS
from covpool.training.recipe_files import read_recipe
from tests.nn.pooling import test_every_method

PAGE = Path(__file__).parents[3] / "docs" / "adding_a_method.md"
NAME = "log_variance"
CHECKS = {name: check for name, check in vars(test_every_method).items() if name.startswith("test_")}

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="tests without the checkout around them")


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), flags=re.DOTALL)


@pytest.fixture(autouse=True)
def _added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the page's file and the page's line."""
    file = tmp_path / f"{NAME}.py"
    file.write_text(blocks()[0], "utf-8")
    spec = importlib.util.spec_from_file_location(NAME, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, NAME, module)
    spec.loader.exec_module(module)
    ((name, class_name),) = re.findall(r'^\+ +"(\w+)": (\w+),$', PAGE.read_text("utf-8"), flags=re.MULTILINE)
    monkeypatch.setitem(METHODS, name, getattr(module, class_name))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("check", CHECKS)
def test_what_is_asked_of_every_method(check: str) -> None:
    CHECKS[check](NAME)


def test_the_code_of_the_page() -> None:
    names: dict[str, object] = {}
    for block in blocks()[1:]:
        exec(block, names)
    vector, model = names["vector"], names["model"]
    assert isinstance(vector, torch.Tensor)
    assert vector.shape == (4, 22)
    assert isinstance(model, torch.nn.Module)
    assert model.pool.pool == NAME
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 4)


def test_a_bundle_is_the_same_to_the_bit() -> None:
    import covpool

    model = covpool.create_model("resnet10t", pool=NAME, num_classes=3, pool_options={"eps": 0.5}).eval()
    covpool.save_model(model, "bundle")
    other, images = covpool.load_model("bundle").eval(), torch.randn(2, 3, 64, 64)
    assert other.pool.pooling.options.eps == 0.5
    assert torch.equal(other(images), model(images))


def test_it_is_the_variance() -> None:
    x = torch.randn(2, 5, 3, 4)
    expected = (x.flatten(2).var(-1, correction=0) + 0.1).log()
    torch.testing.assert_close(CovPool(5, NAME, dim=None, eps=0.1)(x), expected)


def test_lists_and_recipes_have_it() -> None:
    assert methods()[NAME] == "logarithm of every channel's variance"
    recipe = read_recipe("resnet50-imagenet", {"model.pool": NAME, "model.pool_options": {"eps": 1.0}})
    assert recipe.model.pool == NAME
