"""The files of a release: workflows, the bill of materials, the conda recipe, hubconf and llms.txt."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

import covpool

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / ".github").is_dir(), reason="an sdist has no such files")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
# Packages with other names in conda.
CONDA = {"torch": "pytorch", "matplotlib": "matplotlib-base"}


@pytest.mark.parametrize("file", ["ci.yml", "release.yml"])
def test_actions_are_pinned_by_commit(file: str) -> None:
    text = (ROOT / ".github" / "workflows" / file).read_text("utf-8")
    used = re.findall(r"uses: (.+)", text)
    assert used
    for line in used:
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_bill_of_materials_lists_every_requirement(monkeypatch: pytest.MonkeyPatch) -> None:
    # hatchling is only available in a build.
    for module, name in (("builders.hooks", "BuildHookInterface"), ("metadata", "MetadataHookInterface")):
        interface = ModuleType(f"hatchling.{module}.plugin.interface")
        setattr(interface, name, object)
        monkeypatch.setitem(sys.modules, interface.__name__, interface)
    make = load("hatch_build").bill
    bill = json.loads(make("1.2.3", PROJECT["dependencies"], PROJECT["optional-dependencies"]))
    assert bill["metadata"]["component"]["purl"] == "pkg:pypi/covpool@1.2.3"
    scopes = {part["name"]: part["scope"] for part in bill["components"]}
    assert scopes["torch"] == "required"
    assert scopes["timm"] == scopes["huggingface-hub"] == scopes["ray"] == "optional"
    assert not {"covpool", "ruff", "mkdocs-material"} & scopes.keys()
    references = [part["bom-ref"] for part in bill["components"]]
    assert bill["dependencies"] == [{"ref": "pkg:pypi/covpool@1.2.3", "dependsOn": references}]
    assert make("1.2.3", ["torch>=2"], {}) == make("1.2.3", ["torch>=2"], {})


def requirements(*extras: str) -> dict[str, str]:
    """Return the minimum version of each package that the extras need."""
    found = list(PROJECT["dependencies"])
    for extra in extras:
        found += PROJECT["optional-dependencies"][extra]
    result = {}
    for text in found:
        name, least = re.fullmatch(r"([\w-]+)(?:\[.*\])?(?:>=([\d.]+))?", text).groups()  # type: ignore[union-attr]
        if name != "covpool":
            result[CONDA.get(name, name)] = least
    return result


def test_the_conda_recipe_has_the_requirements_of_the_wheel() -> None:
    recipe: dict[str, Any] = yaml.safe_load((ROOT / ".ci" / "conda-forge" / "recipe.yaml").read_text("utf-8"))
    run = dict(line.split(" >=") for line in recipe["requirements"]["run"])
    assert run.pop("python") == "${{ python_min }}"
    assert recipe["context"]["python_min"] == PROJECT["requires-python"].removeprefix(">=")
    assert run == requirements("data", "models", "train", "hub")
    assert recipe["context"]["version"] == covpool.CHECKOUT_VERSION.removesuffix(".dev0")
    assert recipe["about"]["license"] == PROJECT["license"]
    assert recipe["about"]["summary"] == PROJECT["description"]


def test_torch_hub_finds_the_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    model = torch.hub.load(str(ROOT), "create_model", "test_resnet", source="local", dim=8, num_classes=3)
    covpool.save_model(model, tmp_path / "bundle")
    again = torch.hub.load(str(ROOT), "load_model", tmp_path / "bundle", source="local")
    assert again.num_classes == 3


def test_llms_txt_lists_every_page() -> None:
    from lab.figures.llms import FILE, text

    assert FILE.read_text("utf-8") == text(), "python -m lab figures llms writes it"
