"""The reports of a run and of a comparison: complete, self-contained, and safe for any names."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import accuracy_score

from covpool.data.image_set import ImageSet, Subset
from covpool.data.sources import open_images
from covpool.training.report import _difference, _recipe_differences, pair, write_comparison, write_report
from covpool.training.report.record import read_run
from tests.data.pictures import SPARROWS, TINY10, needs_sparrows, needs_tiny10
from tests.training.report.runs import invented, labelled, write_run

EVIL = (
    "<script>document.title='run'</script>",
    '"><img src=x onerror="document.title=\'run\'">',
    "</style></title><svg onload=document.title='run'>",
    "{{ 7 * 7 }}&amp;",
    "鳥類 \u202e القط",
)


class Page(HTMLParser):
    """Elements, attributes and text of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "source", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join("".join(self.text).split())


def assert_harmless(page: Page) -> None:
    """Check that nothing runs, nothing is loaded from elsewhere, and every element is closed."""
    assert page.open == []
    for tag, attributes in page.elements:
        assert tag not in ("script", "iframe", "object", "embed", "link", "base", "form", "svg")
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "srcset"):
            assert (attributes.get(name) or "data:image/").startswith("data:image/")
        if tag == "a":  # links to the report of a run, below or next to the page
            assert re.fullmatch(r"[\w%.-][\w%./-]*/report\.html", attributes["href"] or "")
    css = "".join(page.text[: next(i for i, text in enumerate(page.text) if "color-scheme" in text) + 1])
    assert "url(" not in css
    assert "@import" not in css


@pytest.fixture(scope="module")
def tiny10() -> ImageSet:
    images = open_images(TINY10, "val")
    return Subset(images, np.arange(0, len(images), 5))


@pytest.fixture(scope="module")
def run(tiny10: ImageSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder, tiny10.classes, labelled(tiny10), split="val", accuracy=0.6)
    assert write_report(folder, tiny10) == folder / "report.html"
    return folder


@needs_tiny10
def test_the_headline_comes_first(run: Path) -> None:
    predictions = read_run(run).predictions
    top1 = accuracy_score(predictions.labels, predictions.predicted)
    words = Page(run / "report.html").words
    body = words[words.index("resnet18 · isqrt_cov", words.index("color-scheme")) :]
    assert body.startswith(
        f"resnet18 · isqrt_cov {100 * top1:.1f} % top-1 accuracy on {len(predictions)} validation images"
    )
    assert "chosen on these same images" in body
    headings = [
        "What was trained",
        "Training curves",
        "Classes, hardest",
        "Confusion matrix",
        "Most confident errors",
    ]
    places = [body.index(heading) for heading in [*headings, "Recipe", "Environment"]]
    assert places == sorted(places)


@needs_tiny10
def test_all_of_it_is_in_the_page(run: Path, tiny10: ImageSet) -> None:
    page = Page(run / "report.html")
    assert_harmless(page)
    for name in tiny10.classes:
        assert name in page.words
    assert "backbone: resnet18" in page.words
    assert "2.13.0" in page.words
    sources = [attributes["src"] or "" for tag, attributes in page.elements if tag == "img"]
    assert sum(source.startswith("data:image/jpeg") for source in sources) == 24
    assert sum(source.startswith("data:image/png") for source in sources) == 4
    assert sum(tag == "source" for tag, _ in page.elements) == 4  # for dark mode


@needs_tiny10
def test_the_files_beside_the_page(run: Path) -> None:
    for name in ("curves.png", "confusion.png", "worst.png"):
        with Image.open(run / name) as image:
            image.load()
            assert min(image.size) > 300
    assert len((run / "per_class.csv").read_text(encoding="utf-8").splitlines()) == 11
    assert not list(run.glob(".*"))


def write_evil(folder: Path) -> Path:
    images = [(f"{EVIL[i % 5]}/\udcff{i}.jpg", i % 5) for i in range(40)]
    write_run(folder, EVIL, images, accuracy=0.3)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    summary |= {"model": EVIL[1], "machine": EVIL[2], "versions": {EVIL[0]: EVIL[1]}}
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    (folder / "recipe.yaml").write_text(f"out: {EVIL[0]}{EVIL[2]}", encoding="utf-8")
    return write_report(folder, None)


@pytest.mark.usefixtures("_no_figures")
def test_names_are_text_and_nothing_else(tmp_path: Path) -> None:
    page = Page(write_evil(tmp_path))
    assert_harmless(page)
    for name in EVIL:
        assert name in page.words
    assert "49" not in re.findall(r"\d+", page.words.split("Classes, hardest")[1].split("Recipe")[0])


@pytest.mark.usefixtures("_no_figures")
def test_without_anything_to_measure_by(tmp_path: Path) -> None:
    write_run(tmp_path, ["a", "b"], [], split=None, validation=False, epochs=1)
    page = Page(write_report(tmp_path))
    assert_harmless(page)
    assert "Nothing was measured" in page.words
    assert "Classes, hardest" not in page.words
    assert not (tmp_path / "per_class.csv").exists()


@pytest.mark.slow
def test_a_thousand_classes_and_two(tmp_path: Path) -> None:
    for classes in (1000, 2):
        folder = tmp_path / str(classes)
        names = [f"class {number}" for number in range(classes)]
        page = Page(write_report(write_run(folder, names, invented(classes, 5))))
        assert_harmless(page)
        assert sum(tag == "tr" for tag, _ in page.elements) == classes + (2 if classes > 30 else 1)
        assert ("Top-5" in page.words) == (classes > 5)
        assert (folder / "report.html").stat().st_size < 2_000_000


PROBE = """<script>
parent.postMessage({title: document.title, wide: document.documentElement.scrollWidth > innerWidth}, "*");
</script>"""
FRAME = """<body><pre></pre><script>
onmessage = message => document.querySelector("pre").append(JSON.stringify(message.data) + "\\n");
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium to look at the page")
def test_in_a_browser_nothing_runs_and_nothing_is_cut_off(tmp_path: Path) -> None:
    """Test the escaping alone. The policy that forbids scripts is removed, so that the probe can run."""
    html = write_evil(tmp_path).read_text(encoding="utf-8")
    policy = re.compile('<meta http-equiv="Content-Security-Policy"[^>]*>')
    assert policy.search(html)
    (tmp_path / "probe.html").write_text(policy.sub("", html) + PROBE, encoding="utf-8")
    frames = [
        f'<iframe src="probe.html" style="width:{width}px;height:900px"></iframe>' for width in (390, 1280)
    ]
    (tmp_path / "frame.html").write_text(FRAME + "".join(frames), encoding="utf-8")
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000", "--dump-dom")
    command = ["chromium", *options, (tmp_path / "frame.html").as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    messages = [
        json.loads(line)
        for line in re.findall(
            r"\{.*?\}(?=\n)", dom.replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&")
        )
    ]
    assert len(messages) == 2
    for page in messages:
        assert page["title"].startswith(EVIL[1])
        assert not page["wide"]


CLASSES = [f"class {number}" for number in range(10)]


def rights(folder: Path) -> dict[str, bool]:
    with (folder / "predictions.csv").open(encoding="utf-8", newline="") as file:
        return {row["name"]: row["label"] == row["predicted"] for row in csv.DictReader(file)}


def test_images_are_paired_by_name_whatever_their_order(tmp_path: Path) -> None:
    images = invented(10, 20)
    write_run(tmp_path / "a", CLASSES, images, accuracy=0.8)
    write_run(
        tmp_path / "b", CLASSES[::-1], [(n, 9 - c) for n, c in images[::-1]][:150], accuracy=0.6, seed=1
    )
    a, b = rights(tmp_path / "a"), rights(tmp_path / "b")
    first, second = (read_run(tmp_path / name).predictions for name in "ab")
    found = _difference(first, second, pair(first, second))
    assert found is not None
    assert found.images == 150
    assert found.first_only == sum(a[name] and not b[name] for name in b)
    assert found.second_only == sum(b[name] and not a[name] for name in b)
    assert found.difference == pytest.approx(np.mean([a[name] for name in b]) - np.mean(list(b.values())))


def test_images_of_another_class_are_not_the_same(tmp_path: Path) -> None:
    write_run(tmp_path / "a", CLASSES, [("1.jpg", 0), ("2.jpg", 1)])
    write_run(tmp_path / "b", CLASSES, [("1.jpg", 0), ("2.jpg", 2)])
    assert len(pair(*(read_run(tmp_path / name).predictions for name in "ab")).first) == 1


@needs_sparrows
def test_the_page(tmp_path: Path) -> None:
    all_sparrows = open_images(SPARROWS, "test")
    images: ImageSet = Subset(all_sparrows, np.arange(0, len(all_sparrows), 6))
    first, second = (
        write_run(tmp_path / pool, images.classes, labelled(images), accuracy=accuracy, seed=seed, pool=pool)
        for pool, accuracy, seed in (("isqrt_cov", 0.8, 0), ("gap", 0.6, 1))
    )
    page = Page(write_comparison(tmp_path / "new/both", {"isqrt_cov": first, EVIL[0]: second}, images))
    assert_harmless(page)
    a, b = rights(first), rights(second)
    difference = 100 * (np.mean(list(a.values())) - np.mean(list(b.values())))
    assert f"{difference:+.1f} points of top-1: isqrt_cov minus {EVIL[0]}" in page.words
    assert f"isqrt_cov alone is correct on {sum(a[n] and not b[n] for n in a)}" in page.words
    assert "There is one training run of each" in page.words
    assert "model.poolisqrt_covgap" in page.words  # in table cells
    links = [attributes["href"] for tag, attributes in page.elements if tag == "a"]
    assert links == ["../../isqrt_cov/report.html", "../../gap/report.html"]
    assert f"covpool predict {first / 'bundle'} PHOTO.jpg" in page.words  # the run to use
    thumbnails = [
        1 for tag, attributes in page.elements if (attributes.get("src") or "").startswith("data:image/jpeg")
    ]
    only_b = sum(b[name] and not a[name] for name in a)
    assert len(thumbnails) == 12 + min(12, only_b)
    assert (tmp_path / "new/both/curves.png").stat().st_size > 10_000


@pytest.mark.usefixtures("_no_figures")
def test_runs_without_an_image_in_common(tmp_path: Path) -> None:
    write_run(tmp_path / "a", CLASSES, invented(10, 2))
    write_run(tmp_path / "b", CLASSES, [], split=None)
    page = Page(write_comparison(tmp_path / "both", {"a": tmp_path / "a", "b": tmp_path / "b"}))
    assert_harmless(page)
    assert "Nothing to compare by" in page.words


def test_two_runs_are_compared(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two runs can be compared; got 1"):
        write_comparison(tmp_path, {"a": tmp_path})


def test_differences_of_recipes() -> None:
    first = "a: {b: 1, c: [1, 2]}\nout: x\nd: null"
    second = "a: {b: 2, c: [1, 2]}\nout: y\ne: hello"
    assert _recipe_differences(first, second) == [("a.b", "1", "2"), ("d", "null", ""), ("e", "", "hello")]
    assert _recipe_differences("", "") == []
