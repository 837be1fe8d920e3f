"""``covpool plan``: its options and errors match those of the library."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

from covpool.cli.main import main
from covpool.cli.models import PlanArguments, run_plan
from covpool.models import ModelConfig
from covpool.models.plan import plan


def test_options_have_the_defaults_of_the_library() -> None:
    library: dict[str, Any] = {
        name: parameter.default
        for function in (ModelConfig, plan)
        for name, parameter in inspect.signature(function).parameters.items()
    }
    example, config = PlanArguments("resnet18"), ModelConfig("resnet18")
    for field in dataclasses.fields(PlanArguments):
        if field.name != "backbone":
            default = getattr(config, field.name, library[field.name])
            assert getattr(example, field.name) == default, field.name


def test_every_option_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covpool.models.plan.plan", lambda config, **options: (config, options))
    shape: dict[str, Any] = {
        "backbone": "test_vit",
        "num_classes": 7,
        "image_size": 96,
        "pool": "gap",
        "keep_resolution": False,
        "rank": 4,
        "hidden": (5,),
        "join": "cls",
        "pool_options": {"steps": 4},
        "backbone_options": {"drop_path_rate": 0.1},
    }
    step: dict[str, Any] = {"batch_size": 3, "precision": "float32", "optimizer": "adamw", "processes": 2}
    assert run_plan(PlanArguments(**shape, **step, dim="none")) == (ModelConfig(**shape, dim=None), step)
    assert run_plan(PlanArguments("test_vit", head="mlp", dim=24))[0] == ModelConfig(
        "test_vit", head="mlp", dim=24
    )
    assert {*shape, *step, "dim", "head"} == {field.name for field in dataclasses.fields(PlanArguments)}


def test_as_a_person_runs_it(capsys: pytest.CaptureFixture[str]) -> None:
    command = "plan test_resnet --dim 24 --num-classes 20000 --batch-size 8 --precision bfloat16"
    assert main(command.split()) == 0
    out, err = capsys.readouterr()
    assert not err
    assert out.startswith("test_resnet, isqrt_cov of 24 channels (300 values), 20,000 classes\n")
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--dim wide", "--dim takes a whole number, auto or none; got wide"),
        ("--precision half", "--precision takes float32, bfloat16 or float16; got half"),
        ("--keep-resolution maybe", "--keep-resolution takes true or false; got maybe"),
        ("--hidden 3", "--hidden takes a list, as [1,2]; got 3"),
        ("--pool max", "--pool must be one of 'gap', 'cov', "),
        ("--batch-size 0", "--batch-size must be at least 1; got 0"),
        (
            '--pool-options {"step":3}',
            "step is not an option of pool 'isqrt_cov'; its options are: iteration, steps",
        ),
    ],
)
def test_mistakes(options: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "test_resnet", *options.split()]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(f"covpool plan: {sentence}")
    assert err.count("\n") == 1
