"""Check a built wheel and sdist, their files, version and links: ``.ci/check_dist.py FOLDER``."""

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
# The build adds it; see hatch_build.py. Without it, --help imports torch.
source.add("covpool/cli/help.txt")
# Without this check, the comparison below would pass if both sides lacked these files.
kinds = ("py.typed", "recipes/modern.yaml", "training/report/templates/", "evaluate/schemas/", "cli/main.py")
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
assert not any(name.startswith(("results", ".ci", "docs", "lab")) for name in unpacked), sorted(unpacked)

# If the sources do not expect the tag of a release, its results are in the folder of another version.
# Development versions are not checked: their number depends on the tags in the clone.
(expected,) = re.findall(r'"(.+)\.dev0"', (root / "src" / "covpool" / "__init__.py").read_text("utf-8"))
assert ".dev" in version or re.fullmatch(rf"{re.escape(expected)}(rc\d+)?", version), (
    f"it was built as {version}, but src/covpool/__init__.py leads to {expected}"
)
# A package index shows the README on another site, where relative links are broken.
with zipfile.ZipFile(wheel) as archive:
    metadata = archive.read(f"covpool-{version}.dist-info/METADATA").decode()
if address := os.environ.get("COVPOOL_REPOSITORY"):
    assert f"Project-URL: Repository, {address}" in metadata
    relative = re.findall(r"\]\((?![a-z]+:|#)[^)]*\)", metadata)
    assert not relative, relative
print(f"{wheel.name}: {len(source)} files, {wheel.stat().st_size // 1000} kB")
