"""Methods outside of covpool: registered by their own file, or offered by an installed package."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import covpool
from covpool.errors import UsageError
from covpool.models.card import BundleError
from covpool.nn import CovPool, Method, methods, register_method
from covpool.nn.pooling import METHODS

SOURCE = '''
from dataclasses import dataclass
from typing import ClassVar

import covpool


@dataclass(frozen=True)
class Options:
    factor: float = 2.0


class Larger(covpool.nn.Method):
    """The mean, multiplied."""

    summary: ClassVar[str] = "mean times a factor"
    order: ClassVar[int] = 1
    Options = Options

    def forward(self, x, weights=None):
        return self.options.factor * x.mean(-1)
'''
REGISTERED = SOURCE + '\n\ncovpool.register_method("larger", Larger)\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder on the path of modules, and forget its modules and methods afterwards."""
    before, modules = dict(METHODS), set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    METHODS.clear()
    METHODS.update(before)
    for name in set(sys.modules) - modules:
        if name.startswith("my_"):
            del sys.modules[name]


@pytest.fixture
def registered(folder: Path) -> Path:
    (folder / "my_pooling.py").write_text(REGISTERED, "utf-8")
    importlib.invalidate_caches()
    importlib.import_module("my_pooling")
    return folder


@pytest.mark.usefixtures("registered")
def test_the_layer_the_model_and_the_head_know_it() -> None:
    from covpool.models.config import parse_head

    x = torch.randn(2, 5, 3, 4)
    torch.testing.assert_close(CovPool(5, "larger", dim=None, factor=3.0)(x), 3.0 * x.mean((2, 3)))
    assert methods()["larger"] == "mean times a factor"
    with pytest.raises(TypeError, match="its options are: factor"):
        CovPool(5, "larger", dim=None, steps=3)
    model = covpool.create_model("resnet10t", pool="larger", num_classes=3, pool_options={"factor": 0.5})
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 3)
    assert parse_head("larger@factor=0.5").options == {"factor": 0.5}


def test_a_bundle_names_the_module_and_never_imports_it(registered: Path) -> None:
    model = covpool.create_model(
        "resnet10t", pool="larger", num_classes=3, pool_options={"factor": 0.5}
    ).eval()
    bundle = registered / "bundle"
    covpool.save_model(model, bundle)
    assert json.loads((bundle / "covpool.json").read_text("utf-8"))["pool_module"] == "my_pooling"
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(covpool.load_model(bundle).eval()(images), model(images))

    del METHODS["larger"], sys.modules["my_pooling"]
    (registered / "my_pooling.py").write_text("raise AssertionError('imported')", "utf-8")
    with pytest.raises(
        BundleError, match=r"method 'larger' is registered by the module 'my_pooling': import"
    ):
        covpool.load_model(bundle)
    assert "my_pooling" not in sys.modules


def test_a_bundle_of_covpools_own_method_names_no_module(tmp_path: Path) -> None:
    covpool.save_model(covpool.create_model("resnet10t", pool="gap", num_classes=3), tmp_path / "bundle")
    assert json.loads((tmp_path / "bundle" / "covpool.json").read_text("utf-8"))["pool_module"] == ""


def test_an_installed_package_offers_a_method(folder: Path) -> None:
    """A real entry point; its package is imported when the name is used, and not before."""
    (folder / "my_package.py").write_text(SOURCE, "utf-8")
    info = folder / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n", "utf-8")
    (info / "entry_points.txt").write_text("[covpool.methods]\nlargest = my_package:Larger\n", "utf-8")
    importlib.invalidate_caches()
    with pytest.raises(ValueError, match="pool must be one of"):
        CovPool(5, "unknown", dim=None)
    assert "my_package" not in sys.modules
    assert CovPool(5, "largest", dim=None)(torch.randn(2, 5, 3, 4)).shape == (2, 5)
    assert METHODS["largest"] is sys.modules["my_package"].Larger
    assert covpool.create_model("resnet10t", pool="largest", num_classes=3).config.pool == "largest"


class Mine(Method):
    summary = "mine"


@pytest.mark.usefixtures("folder")
def test_names_and_classes_that_are_refused() -> None:
    for name in ("Mine", "my+method", "a@b", "", "1st"):
        with pytest.raises(UsageError, match="name must have lower-case letters"):
            register_method(name, Mine)
    with pytest.raises(TypeError, match=r"must be a subclass of covpool\.nn\.Method"):
        register_method("mine", torch.nn.Module)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"'gap' is the method of covpool.nn.pooling.method: choose another"):
        register_method("gap", Mine)
    register_method("mine", Mine)
    again = type("Mine", (Mine,), {"__module__": Mine.__module__, "__qualname__": Mine.__qualname__})
    register_method("mine", again)
    assert METHODS["mine"] is again
    with pytest.raises(TypeError, match="NoSummary needs a summary"):
        register_method("no_summary", type("NoSummary", (Method,), {}))


@pytest.mark.usefixtures("folder")
def test_a_vector_of_another_length_is_an_error() -> None:
    class Halves(Method):
        """It returns one value for each channel, and keeps the default of a triangle."""

        summary = "means of channels"

        def forward(self, x: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
            """Pool."""
            return x.mean(-1)

    register_method("halves", Halves)
    with pytest.raises(UsageError, match=r"halves returned 8 values .* its out_features is 36"):
        CovPool(8, "halves", dim=None)(torch.randn(2, 8, 5, 5))
