"""Hooks of mkdocs: links out of docs/, to results, examples and sources, work on the site as on a code host.

Every file that a page links to is added to the site, at its path in the repository: Markdown as a page, other
files unchanged. A link to a folder becomes a link to its README. So the site is complete, and needs no URL of
a repository.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel

DOCS = "docs/"
FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2[ \t]*$", flags=re.DOTALL | re.MULTILINE)
NOTEBOOK_LINK = re.compile(r'(<a [^>]*href="[^":#]+)\.(?:md|ipynb)([#"])')
NOTEBOOK_HEADING = re.compile(r'(<h\d [^>]*id="|<a [^>]*href="#)([^"]+)')
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[\w.-]*)?\))")


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add the files that pages link to, and the files that those link to."""
    root = Path(config.config_file_path).parent
    waiting = [
        file
        for file in files
        if file.src_uri.endswith(".md") and file.inclusion.value > InclusionLevel.DRAFT.value
    ]
    while waiting:
        file = waiting.pop()
        for target in _outside(file.src_uri, file.content_string, root):
            if target not in files.src_uris:
                brought = _brought(target, root, config)
                files.append(brought)
                waiting += [brought] if target.endswith(".md") else []
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, **_: Any) -> str:
    """Rewrite the links of a page to the paths of the files in the site."""
    root = Path(config.config_file_path).parent

    def turned(link: re.Match[str]) -> str:
        target = _site_path(_target(page.file.src_uri, link[2], root))
        return f"{link[1]}{posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or '.')}{link[3]}"

    return _outside_of_code(markdown, lambda text: LINK.sub(turned, text))


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Rewrite the links and headings of notebooks, which mkdocs leaves unchanged, as on other pages."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    html = NOTEBOOK_HEADING.sub(lambda match: match[1] + match[2].lower(), html)
    return NOTEBOOK_LINK.sub(r"\1.html\2", html)


def _outside(src_uri: str, markdown: str, root: Path) -> list[str]:
    """Return the link targets of a page that are not in docs/, as paths from the root of the repository."""
    targets: list[str] = []

    def look(text: str) -> str:
        targets.extend(_target(src_uri, link[2], root) for link in LINK.finditer(text))
        return text

    _outside_of_code(markdown, look)
    return [target for target in targets if not target.startswith(DOCS)]


def _outside_of_code(markdown: str, change: Callable[[str], str]) -> str:
    """Return the page with ``change`` applied to everything except code blocks."""
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(markdown[end:])])


def _target(src_uri: str, link: str, root: Path) -> str:
    """Return a link as a path from the root of the repository."""
    source = src_uri if (root / src_uri).exists() else DOCS + src_uri
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    return f"{target}/README.md" if (root / target).is_dir() else target


def _site_path(target: str) -> str:
    return target.removeprefix(DOCS)


def _brought(target: str, root: Path, config: MkDocsConfig) -> File:
    path = root / target
    if not path.is_file():
        raise PluginError(f"a page links to {target}, which is not there")
    inclusion = InclusionLevel.NOT_IN_NAV
    return File.generated(config, target, abs_src_path=str(path), inclusion=inclusion)
