"""The demo: images that only a covariance separates, and its report page."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
import torch

from covpool.cli.main import main
from covpool.demo import CHANCE, CLASSES, CONTRAST, Network, evidence, make_images, run_demo


def test_classes_have_the_same_mean_color_and_contrast() -> None:
    textures = make_images(50, seed=1)
    assert textures.images.min() >= 0
    assert textures.images.max() <= 1
    assert textures.labels.bincount().tolist() == [50] * len(CLASSES)
    # Images have different mean colors, but their distribution is the same in every class.
    means = textures.images.mean((2, 3))
    spread = means.std(0)
    by_class = torch.stack([means[textures.labels == label].mean(0) for label in range(len(CLASSES))])
    assert spread.min() > 0.05
    assert (by_class - by_class[0]).abs().max() < 2e-3
    # Clipping changes little: few pixels leave [0, 1].
    assert textures.images.std((2, 3)) == pytest.approx(CONTRAST, rel=0.05)


def test_seeds_make_other_images() -> None:
    assert torch.equal(make_images(1, seed=3).images, make_images(1, seed=3).images)
    assert not torch.equal(make_images(1, seed=3).images, make_images(1, seed=4).images)


def test_evidence_and_bias_sum_to_the_logit() -> None:
    network, image = Network("isqrt_cov", seed=0), make_images(1, seed=0).images[3]
    positions, bias = evidence(network, image, 3)
    with torch.no_grad():
        logits = network(image[None])[0]
    assert float(positions.sum()) + bias == pytest.approx(float(logits[3] - logits.mean()), abs=1e-4)


def test_a_small_demo_writes_a_page_that_needs_nothing_else(tmp_path: Path) -> None:
    record = run_demo(tmp_path, seeds=1, train=(2, 4), test=4)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "results.json").read_bytes()) == record
    assert not re.search(r"""(src|href|srcset)=["'](?!data:)""", page)
    assert "made to show the idea" in page
    assert "docs/results.md" in page
    assert page.count("<img") == 4 * len(CLASSES) + 2 * len(CLASSES) + 2


@pytest.mark.slow
def test_the_whole_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.process_time()  # other work on the machine does not count
    assert main(["demo", "--out", str(tmp_path)]) == 0
    seconds = time.process_time() - began
    record = json.loads((tmp_path / "results.json").read_bytes())
    assert len(record["runs"]) == 3
    for run in record["runs"]:
        last = {name: accuracy[-1] for name, accuracy in run["accuracy"].items()}
        assert abs(last["gap"] - CHANCE) < 0.1, run["seed"]
        assert last["isqrt_cov"] > 0.95, run["seed"]
    with capsys.disabled():
        print(f"\ncovpool demo: {seconds:.0f} CPU seconds")
    assert seconds < 30


def test_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--seeds", "0"]) == 2
    assert "--seeds must be at least 1; got 0" in capsys.readouterr().err
