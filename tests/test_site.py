"""The built site: a strict build, complete links, and nothing loaded from other servers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from covpool.nn.pooling import METHODS
from tests.pages import DOCS, ROOT, needs_pages, read

pytest.importorskip("mkdocs")
pytestmark = needs_pages


class Links(HTMLParser):
    """The links of a page, the files that it loads, and its anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors.update(given[name] for name in ("id", "name") if name in given)
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        self.loaded.update(given[name] for name in ("src", "srcset") if name in given)
        if tag == "link":
            self.loaded.add(given.get("href", ""))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@cache
def parsed(page: Path) -> Links:
    found = Links()
    found.feed(page.read_text(encoding="utf-8"))
    return found


def resolved(page: Path, link: str) -> tuple[Path, str]:
    path, _, anchor = unquote(link).partition("#")
    return ((page.parent / path.partition("?")[0]).resolve() if path else page), anchor


def pages_of(site: Path) -> list[Path]:
    return [page for page in sorted(site.rglob("*.html")) if page.name != "404.html"]


@pytest.mark.slow
def test_every_link_and_anchor_is_there(site: Path) -> None:
    for page in pages_of(site):
        for link in parsed(page).links | parsed(page).loaded:
            if re.match(r"[a-z]+:", link) or not link:
                continue
            target, anchor = resolved(page, link)
            assert target.exists(), f"{page.relative_to(site)} links to {link}"
            if anchor and target.suffix == ".html":
                assert anchor in parsed(target).anchors, f"{page.relative_to(site)} links to {link}"


@pytest.mark.slow
def test_every_page_can_be_reached_from_the_first(site: Path) -> None:
    first = (site / "index.html").resolve()
    reached, waiting = {first}, [first]
    while waiting:
        page = waiting.pop()
        for link in parsed(page).links:
            target = resolved(page, link)[0] if not re.match(r"[a-z]+:", link) else page
            if target.suffix == ".html" and target.exists() and target not in reached:
                reached.add(target)
                waiting.append(target)
    assert {page.resolve() for page in pages_of(site)} - reached == set()
    assert len(reached) > 30


@pytest.mark.slow
def test_nothing_comes_from_a_server_of_others(site: Path) -> None:
    for page in pages_of(site):
        assert [address for address in parsed(page).loaded if re.match(r"(?:https?:)?//", address)] == []
        assert "https://fonts." not in page.read_text(encoding="utf-8")


@pytest.mark.slow
def test_measurements_come_along_as_pages(site: Path) -> None:
    text = (site / "choose_a_head.html").read_text(encoding="utf-8")
    assert 'href="results/0.1.0/fine_grained--xeon-amx-1c--cpu.html"' in text
    assert "Stanford Cars" in (site / "results/0.1.0/fine_grained--xeon-amx-1c--cpu.html").read_text("utf-8")
    assert (site / "examples" / "serve.py").exists()


@pytest.mark.slow
def test_docstrings_are_turned_into_markdown(site: Path) -> None:
    text = (site / "api" / "functional.html").read_text(encoding="utf-8")
    assert "<math" in text
    assert ":func:" not in text
    assert ":math:" not in text


@pytest.mark.slow
def test_signatures_show_the_values_of_defaults(site: Path) -> None:
    for page, names in (
        ("nn", ("DIM", "DEFAULT_METHOD")),
        ("closed_form", ("FROZEN_DIM", "AVERAGE")),
        ("models", ("HIDDEN",)),
    ):
        text = re.sub(r"<[^>]+>", "", (site / "api" / f"{page}.html").read_text(encoding="utf-8"))
        assert not [name for name in names if re.search(rf"= \(?{name}\b", text)]
    text = re.sub(r"<[^>]+>", "", (site / "api" / "nn.html").read_text(encoding="utf-8"))
    assert re.search(r"CovPool\(\n +in_channels: int,\n +pool: str = (?:&#39;|&quot;|'|\")isqrt_cov", text)
    assert re.search(r"dim: int \| None = 256,\n", text)


@pytest.mark.slow
def test_equations_are_rendered(site: Path) -> None:
    text = (site / "numerics.html").read_text(encoding="utf-8")
    assert text.count('<math xmlns="http://www.w3.org/1998/Math/MathML" display="block"') == read(
        DOCS / "numerics.md"
    ).count("```math")
    assert "```math" not in text


def test_the_api_has_all_methods() -> None:
    page = read(DOCS / "api" / "nn.md")
    for name, method in METHODS.items():
        assert f"### {name} " in page
        assert f"::: {method.__module__}.{method.__name__}\n" in page
