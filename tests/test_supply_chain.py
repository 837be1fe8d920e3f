"""The packages that covpool needs: the table on the page, and the lock file with hashes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def required(*extras: str) -> list[Requirement]:
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in EXTRAS[extra])]
    return [one for one in map(Requirement, lines) if one.name != "covpool"]


def test_the_page_lists_every_package_with_its_extras() -> None:
    page = (ROOT / "docs/security.md").read_text("utf-8").partition("## Dependencies")[2]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if "|" in line][2:]
    listed = {package: set(extras.split(", ")) - {""} for package, extras, *_ in rows}
    wanted: dict[str, set[str]] = {one.name: set() for one in required()}
    for extra in EXTRAS.keys() - {"all", "dev", "docs"}:
        for line in EXTRAS[extra]:
            if (name := Requirement(line).name) != "covpool":
                wanted.setdefault(name, set()).add(extra)
    assert listed == wanted
    assert all(all(cells[2:]) for cells in rows), "every package has a license, a maintainer and a use"


def test_the_lock_file_has_every_package_in_an_allowed_version_with_hashes() -> None:
    path = ROOT / ".ci/lock.txt"
    if not path.exists():
        pytest.skip("the lock file is not in the sdist")
    locked = {}
    for entry in re.split(r"\n(?=\S)", path.read_text("utf-8")):
        if found := re.match(r"([\w.-]+)==(\S+)", entry):
            locked[canonicalize_name(found[1])] = found[2]
            assert "--hash=sha256:" in entry, found[1]
    for one in required("all", "dev", "docs", *EXTRAS["all"][0].partition("[")[2].rstrip("]").split(",")):
        assert locked[canonicalize_name(one.name)] in one.specifier, one
