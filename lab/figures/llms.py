"""Write docs/llms.txt for language models, with one line per page: ``python -m lab figures llms``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from lab.record import ROOT

DOCS = ROOT / "docs"
FILE = DOCS / "llms.txt"


def text() -> str:
    """Return the contents, from the navigation and the first sentence of every page."""
    config = (ROOT / "mkdocs.yml").read_text("utf-8")
    navigation: list[dict[str, Any]] = yaml.safe_load(config[config.index("\nnav:") :])["nav"]
    lines = [
        "# covpool",
        "",
        "> Replace global average pooling with covariance pooling (iSQRT-COV) in PyTorch image models. "
        'In Python: `covpool.create_model("resnet50")`, `covpool.load_model("hf-hub:user/name")`, '
        "`covpool.CovPool` for your own networks. In a shell: `covpool fit FOLDER`, `covpool train`, "
        "`covpool predict`; `covpool --help` lists all commands.",
    ]
    for part in navigation:
        for title, pages in part.items():
            lines += ["", f"## {title}", ""]
            lines += _lines(pages)
    return "\n".join(lines) + "\n"


def _lines(pages: list[dict[str, Any]]) -> list[str]:
    """Return a line per page of a part, and of the groups in it."""
    lines = []
    for page in pages:
        for name, path in page.items():
            lines += _lines(path) if isinstance(path, list) else [f"- [{name}]({path}){_about(path)}"]
    return lines


def _about(path: str) -> str:
    """Return the first sentence of a page in ``docs``."""
    file = DOCS / path
    if file.suffix != ".md" or not file.exists():
        return ""
    paragraphs = re.split(r"\n\s*\n", file.read_text("utf-8"))
    prose = next((part for part in paragraphs if re.match(r"[A-Za-z`*]", part)), "")
    plain = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", " ".join(prose.split()))
    sentence = re.split(r"(?<=[.:])\s", plain)[0].rstrip(":.")
    return f": {sentence}" if sentence else ""


def write_pages() -> list[Path]:
    """Write docs/llms.txt."""
    FILE.write_text(text(), "utf-8")
    return [FILE]
