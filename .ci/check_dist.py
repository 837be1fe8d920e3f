"""What was built: the wheel holds the package, all of it and nothing else, and leads to the right release."""

import json
import os
import re
import sys
import tarfile
import zipfile
from pathlib import Path

root = Path(__file__).parents[1]
(wheel,) = Path(sys.argv[1]).glob("*.whl")
(sdist,) = Path(sys.argv[1]).glob("*.tar.gz")
version = wheel.name.split("-")[1]

source = {
    path.relative_to(root / "src").as_posix()
    for path in (root / "src" / "covpool").rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
}
# So that the comparison below cannot pass because both lack them.
kinds = ("py.typed", "recipes/modern.yaml", "train/report/templates/", "bench/schemas/", "cli/main.py")
assert all(any(kind in name for name in source) for kind in kinds), kinds
with zipfile.ZipFile(wheel) as archive:
    held = {name for name in archive.namelist() if not name.endswith("/")}
    (bill,) = (
        json.loads(archive.read(name)) for name in held if name.endswith(".dist-info/sboms/covpool.cdx.json")
    )
information = {name for name in held if name.startswith(f"covpool-{version}.dist-info/")}
assert held - information == source, sorted((held - information) ^ source)

assert bill["metadata"]["component"]["version"] == version, bill["metadata"]
assert "torch" in {part["name"] for part in bill["components"] if part["scope"] == "required"}, bill

with tarfile.open(sdist) as archive:
    top = f"covpool-{version}"
    unpacked = {name.removeprefix(f"{top}/") for name in archive.getnames()}
needed = {"LICENSE", "PKG-INFO", "README.md", "hatch_build.py", "pyproject.toml", "tests/test_package.py"}
assert needed | {f"src/{name}" for name in source} <= unpacked, needed - unpacked
assert not any(
    name.startswith(("results", ".ci", "docs", "benchmarks", "experiments")) for name in unpacked
), sorted(unpacked)

# A tag that the sources do not expect would make a release whose results lie in another's folder. What a
# development version leads to depends on the tags that a clone has.
(expected,) = re.findall(r'"(.+)\.dev0"', (root / "src" / "covpool" / "__init__.py").read_text("utf-8"))
assert ".dev" in version or re.fullmatch(rf"{re.escape(expected)}(rc\d+)?", version), (
    f"it was built as {version}, but src/covpool/__init__.py leads to {expected}"
)
# An index shows the README elsewhere, where relative links lead nowhere.
with zipfile.ZipFile(wheel) as archive:
    metadata = archive.read(f"covpool-{version}.dist-info/METADATA").decode()
if address := os.environ.get("COVPOOL_REPOSITORY"):
    assert f"Project-URL: Repository, {address}" in metadata
    relative = re.findall(r"\]\((?![a-z]+:|#)[^)]*\)", metadata)
    assert not relative, relative
print(f"{wheel.name}: {len(source)} files, {wheel.stat().st_size // 1000} kB")
