"""A small arena: cells run one by one and resume, and a table lists the cells that ran and the others."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import timm
import torch

from lab.experiments import arena
from lab.paper.claims import frozen_verdict
from tests.data.pictures import SPARROWS, needs_sparrows

ONE_STEP = "isqrt_cov@iteration=paper@steps=1"


def test_cells_have_names_and_seeds() -> None:
    names = [f"{case.name}:{head}" for case, head in arena.chosen_cells()]
    assert len(set(names)) == len(names)
    assert list(arena.chosen_cells("cub-lite0-224:gap")) == [(arena.CASES[1], "gap")]
    (case,) = {case for case, _ in arena.chosen_cells("cars-lite0-448")}
    assert (case.seeds, arena.CASES[1].seeds) == (3, 5)
    with pytest.raises(ValueError, match=r"there is no cell cub-lite0-224:gapp; cells are named as"):
        list(arena.chosen_cells("cub-lite0-224:gapp"))


def test_every_claim_compares_heads_that_run() -> None:
    assert len(arena.CLAIMS) == 28
    assert arena.PAPER in arena.OF_CLAIMS
    others = [f"isqrt_cov@iteration=paper@steps={steps}" for steps in (1, 3, 7, 8, 9)]
    assert list(arena.AS_PAPER) == [*others, "isqrt_cov@iteration=paper@steps=5@normalization=frobenius"]
    for *_, better, other in arena.CLAIMS:
        assert better != other


def test_verdicts_follow_the_intervals() -> None:
    above, below, neither, equal, slightly_below = (
        {"mean": (low + high) / 2, "low": low, "high": high}
        for low, high in ((0.001, 0.02), (-0.02, -0.001), (-0.01, 0.02), (-0.004, 0.003), (-0.002, -0.001))
    )
    for found, expected in (
        ([None], "not run here"),
        ([above], "agrees in sign"),
        ([above, neither], "agrees in sign"),
        ([below, neither, None], "does not agree"),
        ([above, below], "not resolved here"),
        ([neither], "not resolved here"),
        ([equal], "equal here"),
        ([slightly_below], "equal here"),
        ([equal, neither], "not resolved here"),
        ([equal, above], "agrees in sign"),
    ):
        assert frozen_verdict(found) == expected


def test_the_hours_of_cells_that_did_not_run() -> None:
    heads = [{"head": "gap", "seconds": 100.0}, {"head": "isqrt_cov", "seconds": 1000.0}]
    hours = {one["cell"]: one["hours"] for one in arena.not_run({"cub-lite0-224": {"heads": heads}})}
    assert "cub-lite0-224:gap" not in hours
    # Seven training runs on four times the pixels and 8,137 images instead of 5,994.
    assert hours["cars-lite0-448:gap"] == round(7 * 4 * 100 * 8137 / 5994 / 3600, 2)
    assert hours["cub-lite0-224:cov"] == round(9 * 550 / 3600, 2)  # as the median of the two


@pytest.mark.slow
@needs_sparrows
def test_cells_run_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split in ("train", "test"):
        for species in sorted((SPARROWS / split).iterdir())[:3]:
            (tmp_path / "sets" / "sparrows" / split / species.name).mkdir(parents=True)
            for image in sorted(species.iterdir())[:8]:
                (tmp_path / "sets" / "sparrows" / split / species.name / image.name).symlink_to(image)
    weights = tmp_path / "weights.pth"
    torch.save(timm.create_model("test_efficientnet", num_classes=0).state_dict(), weights)
    case = arena.Case("sparrows", "small", 64, seeds=2, claims=True)
    monkeypatch.setattr(arena, "CASES", (case,))
    monkeypatch.setattr(arena, "PACKAGES", {"small": ("test_efficientnet", "", "")})
    monkeypatch.setattr(arena, "OWN", {"small": {}})
    monkeypatch.setattr(arena, "weights_file", lambda backbone: weights)
    monkeypatch.setattr(arena, "TRIALS", 2)
    monkeypatch.setattr(arena, "BACKBONES", {"small": "a small EfficientNet"})
    monkeypatch.setattr(arena.Case, "epochs", 1)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # compiling takes half a minute
    monkeypatch.setattr(arena, "fastest_precision", lambda: "float32")
    run = partial(arena.main, tmp_path / "sets", tmp_path / "runs", file=tmp_path / "arena.json")
    for head in ("gap", arena.PAPER, ONE_STEP, "cov", "abmilp"):
        run((f"{case.name}:{head}",))
    results = json.loads((tmp_path / "arena.json").read_bytes())
    (made,) = results["cases"]
    assert {one["seeds"] for one in made["heads"]} == {2}
    assert made["best_attentive"] == "abmilp"
    heads = {one["head"]: one for one in made["heads"]}
    assert [head for head, one in heads.items() if one["over_gap"] is None] == ["gap"]
    assert [head for head, one in heads.items() if one["over_attentive"] is None] == ["abmilp"]
    assert (len(heads["gap"]["trials"]), heads[ONE_STEP]["trials"]) == (2, [])
    assert heads[ONE_STEP]["arguments"]["lr"] == heads[arena.PAPER]["lr"]
    tested = [one for one in made["claims"] if one["difference"] is not None]
    assert [(one["better"], one["other"]) for one in tested] == [
        (ONE_STEP, "cov"),
        (arena.PAPER, "cov"),
        (arena.PAPER, ONE_STEP),
        (arena.PAPER, "gap"),
    ]
    assert len(results["not_run"]) == len(case.heads) - 5
    table = (tmp_path / "arena.md").read_text("utf-8")
    assert table == f"{arena.table(results)}\n"
    assert f"## Not run: {len(case.heads) - 5} of {len(case.heads)} cells" in table
    assert (tmp_path / "arena.png").stat().st_size > 1000
    (tmp_path / "runs").rename(tmp_path / "lost")
    run((f"{case.name}:gap", f"{case.name}:cov"))  # both are in the results
    assert not (tmp_path / "runs").exists()
    again = json.loads((tmp_path / "arena.json").read_bytes())
    assert again == results | {"date": again["date"]}
