"""The arena in a small form: cells one by one, resumed, and a table of what ran and what did not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import timm
import torch

from experiments import arena
from tests.data.pictures import SPARROWS, needs_sparrows


def test_cells_have_names_and_seeds() -> None:
    names = [f"{case.name}:{head}" for case, head in arena.cells()]
    assert len(set(names)) == len(names)
    assert list(arena.cells("cub-lite0-224:gap")) == [(arena.CASES[1], "gap")]
    (case,) = {case for case, _ in arena.cells("cars-lite0-448")}
    assert (case.seeds_of("gap"), arena.CASES[1].seeds_of("gap")) == (3, arena.CLAIM_SEEDS)
    assert arena.CASES[1].seeds_of("efficient_probing") == 5
    with pytest.raises(ValueError, match=r"there is no cell cub-lite0-224:gapp; cells are named as"):
        list(arena.cells("cub-lite0-224:gapp"))


def test_every_claim_compares_heads_that_run() -> None:
    for claim in arena.CLAIMS:
        assert {claim.higher, claim.lower} <= set(arena.OF_CLAIMS)
        assert claim.higher != claim.lower


def test_verdicts_follow_the_interval() -> None:
    assert arena.verdict(None) == "not run here"
    for low, high, expected in (
        (0.001, 0.02, "agrees in sign"),
        (-0.02, -0.001, "does not agree"),
        (-0.01, 0.02, "not resolved here"),
    ):
        assert arena.verdict({"mean": (low + high) / 2, "low": low, "high": high}) == expected


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
    case = arena.Case("sparrows", "small", 64, seeds=1, claims=True)
    monkeypatch.setattr(arena, "CASES", (case,))
    monkeypatch.setattr(arena, "PACKAGES", {"small": ("test_efficientnet", "", "")})
    monkeypatch.setattr(arena, "OWN", {"small": {}})
    monkeypatch.setattr(arena, "weights_file", lambda backbone: weights)
    monkeypatch.setattr(arena, "TRIALS", 2)
    monkeypatch.setattr(arena, "CLAIM_SEEDS", 2)
    monkeypatch.setattr(arena.Case, "epochs", 1)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # which takes half a minute
    monkeypatch.setattr(arena, "fastest_precision", lambda: "float32")
    arguments = (str(tmp_path / "sets"), str(tmp_path / "runs"), str(tmp_path / "arena"))
    for head in ("gap", arena.PAPER, arena.STEPS[1], "cov", "abmilp"):
        arena.main(*arguments, f"{case.name}:{head}")
    results = json.loads((tmp_path / "arena.json").read_bytes())
    (made,) = results["cases"]
    seeds = {one["head"]: one["seeds"] for one in made["heads"]}
    assert seeds == {"gap": 2, arena.PAPER: 2, arena.STEPS[1]: 2, "cov": 2, "abmilp": 1}
    assert made["best_attentive"] == "abmilp"
    heads = {one["head"]: one for one in made["heads"]}
    assert [head for head, one in heads.items() if one["over_gap"] is None] == ["gap"]
    assert [head for head, one in heads.items() if one["over_attentive"] is None] == ["abmilp"]
    assert (len(heads["gap"]["trials"]), heads[arena.STEPS[1]]["trials"]) == (2, [])
    assert heads[arena.STEPS[1]]["arguments"]["lr"] == heads[arena.PAPER]["lr"]
    told = [claim["verdict"] for claim in made["claims"] if {claim["higher"], claim["lower"]} <= seeds.keys()]
    assert len(told) == 4
    assert "not run here" not in told
    assert len(results["not_run"]) == len(case.heads) - 5
    table = (tmp_path / "arena.md").read_text("utf-8")
    assert table == f"{arena.table(results)}\n"
    assert f"## Not run: {len(case.heads) - 5} of {len(case.heads)} cells" in table
    assert (tmp_path / "arena.png").stat().st_size > 1000
    arena.main(*arguments, "collect")
    assert json.loads((tmp_path / "arena.json").read_bytes())["cases"] == results["cases"]
