"""The layout of covpool: imports between packages, import cost, public names, and the version."""

from __future__ import annotations

import ast
import importlib
import json
import re
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

import covpool
from covpool import CHECKOUT_VERSION, version_in
from covpool.provenance import release

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "covpool"

# A package imports only itself and packages above it in this list.
PACKAGES = (
    "functional",
    "nn",
    "storage",
    "provenance",
    "data",
    "models",
    "inference",
    "explain",
    "training",
    "recipes",
    "evaluate",
    "closed_form",
    "export",
    "demo",
    "doctor",
    "cli",
)
# The folders of a checkout that no file of the wheel may import.
NOT_IN_THE_WHEEL = ("benchmarks", "docs", "examples", "experiments", "lab", "results", "tests")
# Every user of the layer imports these, so they may import only torch, even inside functions.
TORCH_ONLY = ("functional", "nn")
# Top-level modules that every package may import.
SHARED = ("arguments", "device", "drawing", "errors", "hub", "processes", "terminal")


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Yield every module that a file imports, at any level. ``from covpool import x`` counts as covpool.x."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide which package is imported"
            if node.module == "covpool":
                yield from (f"covpool.{alias.name}" for alias in node.names)
            else:
                assert node.module
                yield node.module


def imports_of(package: str) -> list[tuple[str, str]]:
    """Return pairs of a file of the package and a module that it imports."""
    return [
        (str(path.relative_to(SOURCE)), module)
        for path in sorted((SOURCE / package).rglob("*.py"))
        for module in imported_modules(ast.parse(path.read_text(encoding="utf-8")))
    ]


def is_forbidden(package: str, module: str) -> bool:
    top, _, rest = module.partition(".")
    if top in NOT_IN_THE_WHEEL:
        return True
    if top != "covpool" or rest in ("__version__", "lazily"):
        return False
    # `import covpool` gives access to every package, so it is forbidden too.
    return rest.partition(".")[0] not in (*SHARED, *PACKAGES[: PACKAGES.index(package) + 1])


def packages() -> list[str]:
    return [path.name for path in sorted(SOURCE.iterdir()) if path.is_dir() and path.name != "__pycache__"]


def test_every_folder_is_a_known_package() -> None:
    assert set(packages()) <= set(PACKAGES)


@pytest.mark.parametrize("package", packages())
def test_package_imports_only_packages_above_it(package: str) -> None:
    wrong = [pair for pair in imports_of(package) if is_forbidden(package, pair[1])]
    assert not wrong


def test_no_file_imports_a_folder_that_is_not_in_the_wheel() -> None:
    found = imports_of(".")
    assert len(found) > 1000
    assert not [pair for pair in found if pair[1].partition(".")[0] in NOT_IN_THE_WHEEL]


@pytest.mark.parametrize("package", TORCH_ONLY)
def test_package_imports_torch_and_nothing_else(package: str) -> None:
    allowed = {"covpool", "torch", *sys.stdlib_module_names}
    wrong = [pair for pair in imports_of(package) if pair[1].partition(".")[0] not in allowed]
    assert not wrong


def test_storage_imports_errors_and_the_clients_of_remote_files() -> None:
    clients = {"aiohttp", "fsspec", "yarl", *sys.stdlib_module_names}
    found = {pair[1] for pair in imports_of("storage") if not pair[1].startswith("covpool.storage.")}
    assert {name for name in found if name.partition(".")[0] not in clients} == {"covpool.errors"}


@pytest.mark.parametrize(
    ("package", "module", "forbidden"),
    [
        ("functional", "covpool.functional.covariance", False),
        ("functional", "covpool.nn", True),
        ("functional", "covpool", True),
        ("nn", "covpool.functional", False),
        ("nn", "covpool.data.decode", True),
        ("demo", "covpool.nn", False),
        ("demo", "covpool.__version__", False),
        ("demo", "covpool.cli", True),
        ("demo", "torch", False),
        ("demo", "lab.record", True),
        ("demo", "tests.pages", True),
    ],
)
def test_the_rule_itself(package: str, module: str, forbidden: bool) -> None:
    assert is_forbidden(package, module) is forbidden


def test_imports_are_found_wherever_they_are() -> None:
    source = """
import torch.nn as nn
from covpool import functional, __version__
def f():
    from covpool.data.decode import decode
"""
    found = sorted(imported_modules(ast.parse(source)))
    assert found == ["covpool.__version__", "covpool.data.decode", "covpool.functional", "torch.nn"]


def modules_after(script: str) -> set[str]:
    """Return the modules that a script imports in a fresh process. The script may reset ``before``."""
    program = f"import json, sys\nbefore = set(sys.modules)\n{script}\n"
    program += "print(json.dumps(sorted(set(sys.modules) - before)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(json.loads(result.stdout))


def test_import_covpool_imports_nothing_else() -> None:
    modules = modules_after("import covpool; covpool.__version__; dir(covpool)")
    assert {module.partition(".")[0] for module in modules} - sys.stdlib_module_names == {"covpool"}


def test_the_layer_imports_only_torch() -> None:
    # Count after torch, to leave out torch's own imports.
    asked = "import torch; before = set(sys.modules); import covpool; covpool.nn.CovPool; covpool.functional"
    modules = modules_after(asked)
    assert {"covpool.functional", "covpool.nn"} <= modules
    packages = {module.partition(".")[0] for module in modules}
    assert packages - {"torch"} - sys.stdlib_module_names == {"covpool"}


# Packages with an API page.
DOCUMENTED = (
    "closed_form",
    "data",
    "evaluate",
    "explain",
    "export",
    "functional",
    "inference",
    "models",
    "nn",
    "sklearn",
    "training",
)


def documented_names(package: str) -> set[str]:
    """Return the full names on the page of a package."""
    page = ROOT / "docs" / "api" / f"{package}.md"
    return set(re.findall(r"^::: (covpool\.[\w.]+)", page.read_text(encoding="utf-8"), re.MULTILINE))


def test_every_documented_package_has_a_page_and_a_line() -> None:
    index = (ROOT / "docs" / "api" / "index.md").read_text(encoding="utf-8")
    pages = {path.stem for path in (ROOT / "docs" / "api").glob("*.md")} - {"index"}
    assert pages == set(DOCUMENTED)
    assert all(f"[covpool.{package}]({package}.md)" in index for package in DOCUMENTED)
    assert set(DOCUMENTED) <= set(covpool.__all__)


@pytest.mark.parametrize("package", DOCUMENTED)
def test_public_names_are_documented_and_exist(package: str) -> None:
    module = getattr(covpool, package)
    # A page names the function ``f`` of a file ``f`` as ``f.f``.
    found = documented_names(package)
    names = found | {re.sub(r"\.(\w+)\.\1$", r".\1", name) for name in found}
    assert {f"covpool.{package}.{name}" for name in module.__all__} <= names
    for name in module.__all__:
        assert getattr(module, name) is not None
    for name in documented_names(package):
        parent, _, last = name.rpartition(".")
        assert hasattr(importlib.import_module(parent), last), name


def test_a_name_that_does_not_exist() -> None:
    for module in (covpool, covpool.data, covpool.training):
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            module.nothing  # noqa: B018
    with pytest.raises(AttributeError, match=r"'isqrt_cov': use covpool\.functional\.isqrt_cov"):
        covpool.isqrt_cov  # noqa: B018


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("covpool.create_model", "covpool.create_model needs timm: pip install 'covpool[models]'"),
        ("covpool.inference.infer", "covpool.inference.infer needs timm: pip install 'covpool[eval]'"),
    ],
)
def test_a_missing_dependency_names_the_extra(
    script: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [name for name in sys.modules if name.partition(".")[0] in ("covpool", "timm")]
    for name in names:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        exec(f"import covpool; {script}", {})
    assert str(caught.value) == sentence


def test_torch_is_the_only_requirement() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["dependencies"] == ["torch>=2.10"]


@pytest.mark.slow
def test_import_covpool_takes_little_more_than_torch(capsys: pytest.CaptureFixture[str]) -> None:
    # CPU time of fresh processes, in alternation, so that other work on the machine does not count.
    seconds: dict[str, list[float]] = {"torch": [], "torch, covpool.functional, covpool.nn": []}
    for names in [*seconds] * 3:
        script = f"import time, {names}; print(time.process_time())"
        result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        seconds[names].append(float(result.stdout))
    torch, both = (statistics.median(taken) for taken in seconds.values())
    with capsys.disabled():
        print(f"\nimport torch {torch:.2f} s, import covpool {both - torch:+.2f} s")
    assert both - torch < 1.5


def test_version_of_a_checkout_is_told_alike_everywhere() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["version"]
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    newest = re.search(r"^## \[(.+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert cited
    assert newest
    assert build["fallback-version"] == CHECKOUT_VERSION
    assert {cited[1], newest[1]} == {release(CHECKOUT_VERSION)}


def test_version_is_that_of_the_metadata_beside_the_package(tmp_path: Path) -> None:
    assert covpool.__version__ == version_in(Path(covpool.__file__).parents[1])
    assert version_in(tmp_path) == CHECKOUT_VERSION
    information = tmp_path / "covpool-9.8.7.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.4\nName: covpool\nVersion: 9.8.7\n")
    assert version_in(tmp_path) == "9.8.7"


def test_version_in_a_checkout_is_not_that_of_an_installed_covpool() -> None:
    if Path(covpool.__file__) != SOURCE / "__init__.py":
        pytest.skip("covpool is not that of the checkout")
    assert covpool.__version__ == CHECKOUT_VERSION
    try:
        installed = metadata.distribution("covpool")
    except metadata.PackageNotFoundError:
        pytest.skip("covpool is on the path but not installed")
    if f'"{ROOT.as_uri()}"' not in (installed.read_text("direct_url.json") or ""):
        pytest.skip("the installed covpool is another")
    if ".dev" in installed.version:
        pytest.skip("what a development version leads to depends on the tags that a clone has")
    assert release(installed.version) == release(), "pip install -e . again: its release is another by now"
