"""Draw the packages in docs/layout.md from the imports: ``python -m lab figures packages``.

Packages are on the diagonal, in the order of ``tests/test_package.py``. Dots in a package's row mark the
packages that it imports. A package imports only packages before it, so no dot is right of the diagonal.
"""

from __future__ import annotations

from pathlib import Path

from lab.record import ROOT
from tests.test_package import PACKAGES, imports_of

PICTURE = ROOT / "docs" / "images" / "packages.svg"
STEP, LEFT, TOP, SIDE = 30, 20, 20, 150
INK, FAINT, LINE, BOX, DOT = "#1f2328", "#656d76", "#e4e8ec", "#e8eaf6", "#3f51b5"


def imported(package: str) -> list[str]:
    """Return the other packages that a package imports, in their order."""
    modules = [module.split(".") for _, module in imports_of(package)]
    names = {parts[1] for parts in modules if parts[0] == "covpool" and len(parts) > 1}
    return [name for name in PACKAGES if name in names - {package}]


def svg() -> str:
    """Return the picture as SVG."""
    size = STEP * len(PACKAGES)
    width, height = LEFT + size + SIDE, TOP + size + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
    ]
    for i, package in enumerate(PACKAGES):
        x, y = LEFT + STEP * i, TOP + STEP * i
        parts += _lines(x, y, TOP + size)
        for name in imported(package):
            parts.append(_dot(LEFT + STEP * PACKAGES.index(name), y, f"{package} imports {name}"))
        parts.append(f'<rect x="{x}" y="{y}" width="120" height="24" rx="5" fill="{BOX}"/>')
        parts.append(f'<text x="{x + 10}" y="{y + 17}" font-size="14" fill="{INK}">{package}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _lines(x: int, y: int, bottom: int) -> list[str]:
    """Return lines from the left edge to the package, and from the package down."""
    style = f'stroke="{LINE}" stroke-width="2"'
    return [
        f'<line x1="{LEFT}" y1="{y + 12}" x2="{x}" y2="{y + 12}" {style}/>',
        f'<line x1="{x + 12}" y1="{y + 24}" x2="{x + 12}" y2="{bottom}" {style}/>',
    ]


def _dot(x: int, y: int, title: str) -> str:
    return f'<circle cx="{x + 12}" cy="{y + 12}" r="6" fill="{DOT}"><title>{title}</title></circle>'


def write_pages() -> list[Path]:
    """Draw docs/images/packages.svg."""
    PICTURE.write_text(svg(), "utf-8")
    return [PICTURE]
