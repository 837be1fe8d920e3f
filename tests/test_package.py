"""The shape of the package: who imports whom, what importing it costs, and its version."""

from __future__ import annotations

import ast
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
from covpool.provenance.machine import release
from covpool.version import OF_A_CHECKOUT, version_in

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "covpool"

# A room imports only itself and rooms above it in this list.
ROOMS = (
    "functional",
    "nn",
    "provenance",
    "models",
    "data",
    "inference",
    "explain",
    "train",
    "recipes",
    "evaluate",
    "export",
    "bench",
    "reproduce",
    "doctor",
    "cli",
)
# What every user of the layer reaches, so torch and nothing else, not even inside a function.
TORCH_ONLY = ("functional", "nn")
# Modules at the top of the package that every other may import.
SHARED = ("device", "drawing", "durable", "errors", "lazy", "processes", "wording")


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Every module a file imports, wherever in it; a name taken from covpool itself counts as its module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide which room is imported"
            if node.module == "covpool":
                yield from (f"covpool.{alias.name}" for alias in node.names)
            else:
                assert node.module
                yield node.module


def imports_of_room(room: str) -> list[tuple[str, str]]:
    """Pairs of a file of the room and a module it imports."""
    return [
        (str(path.relative_to(SOURCE)), module)
        for path in sorted((SOURCE / room).rglob("*.py"))
        for module in imported_modules(ast.parse(path.read_text(encoding="utf-8")))
    ]


def forbidden_rooms(room: str, module: str) -> bool:
    top, _, rest = module.partition(".")
    if top != "covpool" or rest == "__version__":
        return False
    # `import covpool` alone gives every room, so it is no room above.
    return rest.partition(".")[0] not in (*SHARED, *ROOMS[: ROOMS.index(room) + 1])


def rooms_that_exist() -> list[str]:
    return [path.name for path in sorted(SOURCE.iterdir()) if path.is_dir() and path.name != "__pycache__"]


def test_every_folder_is_a_known_room() -> None:
    assert set(rooms_that_exist()) <= set(ROOMS)


@pytest.mark.parametrize("room", rooms_that_exist())
def test_room_imports_only_rooms_above_it(room: str) -> None:
    wrong = [pair for pair in imports_of_room(room) if forbidden_rooms(room, pair[1])]
    assert not wrong


@pytest.mark.parametrize("room", TORCH_ONLY)
def test_room_imports_torch_and_nothing_else(room: str) -> None:
    allowed = {"covpool", "torch", *sys.stdlib_module_names}
    wrong = [pair for pair in imports_of_room(room) if pair[1].partition(".")[0] not in allowed]
    assert not wrong


@pytest.mark.parametrize(
    ("room", "module", "forbidden"),
    [
        ("functional", "covpool.functional.triu", False),
        ("functional", "covpool.nn", True),
        ("functional", "covpool", True),
        ("nn", "covpool.functional", False),
        ("nn", "covpool.bench.timing", True),
        ("bench", "covpool.nn", False),
        ("bench", "covpool.__version__", False),
        ("bench", "covpool.reproduce", True),
        ("bench", "torch", False),
    ],
)
def test_the_rule_itself(room: str, module: str, forbidden: bool) -> None:
    assert forbidden_rooms(room, module) is forbidden


def test_imports_are_found_wherever_they_are() -> None:
    source = """
import torch.nn as nn
from covpool import functional, __version__
def f():
    from covpool.bench.timing import time
"""
    found = sorted(imported_modules(ast.parse(source)))
    assert found == ["covpool.__version__", "covpool.bench.timing", "covpool.functional", "torch.nn"]


def modules_after(script: str) -> set[str]:
    """Those that a script imports in a fresh process, after what is told with ``before``."""
    program = f"import json, sys\nbefore = set(sys.modules)\n{script}\n"
    program += "print(json.dumps(sorted(set(sys.modules) - before)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(json.loads(result.stdout))


def test_import_covpool_imports_nothing_else() -> None:
    modules = modules_after("import covpool; covpool.__version__; dir(covpool)")
    assert {module.partition(".")[0] for module in modules} - sys.stdlib_module_names == {"covpool"}


def test_the_layer_imports_only_torch() -> None:
    # After torch: what torch itself brings along is not ours to count.
    asked = "import torch; before = set(sys.modules); import covpool; covpool.nn.CovPool; covpool.functional"
    modules = modules_after(asked)
    assert {"covpool.functional", "covpool.nn"} <= modules
    packages = {module.partition(".")[0] for module in modules}
    assert packages - {"torch"} - sys.stdlib_module_names == {"covpool"}


def test_torch_is_the_only_requirement() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["dependencies"] == ["torch>=2.10"]


def test_import_covpool_takes_little_more_than_torch(capsys: pytest.CaptureFixture[str]) -> None:
    # Of the processor, in fresh processes and in turn: by the clock, other work on the machine would count.
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
    assert build["fallback-version"] == OF_A_CHECKOUT
    assert {cited[1], newest[1]} == {release(OF_A_CHECKOUT)}


def test_version_is_that_of_the_metadata_beside_the_package(tmp_path: Path) -> None:
    assert covpool.__version__ == version_in(Path(covpool.__file__).parents[1])
    assert version_in(tmp_path) == OF_A_CHECKOUT
    information = tmp_path / "covpool-9.8.7.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.4\nName: covpool\nVersion: 9.8.7\n")
    assert version_in(tmp_path) == "9.8.7"


def test_version_in_a_checkout_is_not_that_of_an_installed_covpool() -> None:
    if Path(covpool.__file__) != SOURCE / "__init__.py":
        pytest.skip("covpool is not that of the checkout")
    assert covpool.__version__ == OF_A_CHECKOUT
    try:
        installed = metadata.distribution("covpool")
    except metadata.PackageNotFoundError:
        pytest.skip("covpool is on the path but not installed")
    if f'"{ROOT.as_uri()}"' not in (installed.read_text("direct_url.json") or ""):
        pytest.skip("the installed covpool is another")
    if ".dev" in installed.version:
        pytest.skip("what a development version leads to depends on the tags that a clone has")
    assert release(installed.version) == release(), "pip install -e . again: its release is another by now"
