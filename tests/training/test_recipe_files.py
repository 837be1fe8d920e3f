"""Read, write and override recipes, and compare them before a run resumes."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from covpool.data.transforms import Augmentation
from covpool.errors import UsageError
from covpool.models.config import ModelConfig
from covpool.models.create import pretrained_config
from covpool.training.recipe import DataOptions, LoopOptions, OptimizerOptions, Recipe, WeightOptions
from covpool.training.recipe_files import (
    SHORT,
    flat,
    options,
    read_recipe,
    recipe_names,
    recipe_text,
    write_recipe,
)
from covpool.training.run_folder import as_begun

# Words that YAML would read as other types.
WORDS = [
    "1e-3",
    "1e3",
    "true",
    "null",
    "~",
    "3",
    "0x1f",
    "2020-01-01",
    "1_0",
    "",
    " a",
    "a: b",
    "- a",
    "#",
    "é\n",
]

RECIPES = [
    Recipe(),
    Recipe(
        data=DataOptions(path="/a b/ü", limit=7, balance="sampling", cache="s3"),
        model=ModelConfig(
            "vit_base", dim=None, keep_resolution=True, hidden=(1,), pool_options={"x": [1, {"y": None}]}
        ),
        weights=WeightOptions(path="w.pth", key_map={"a.": "b.", "c.": None}),
        augmentation=Augmentation("random", shorter_side=(3, 4), strength=1e-07),
        optimizer=OptimizerOptions(lr=1 / 3, clip=1e300),
        loop=LoopOptions(ema=0.1 + 0.2),
        seed=2**70,
    ),
    Recipe(weights=WeightOptions(path="w", key_map="order"), augmentation=Augmentation(shorter_side=5)),
    *[Recipe(out=word, model=ModelConfig(word, pool_options={word: word})) for word in WORDS],
]


@pytest.mark.parametrize("recipe", RECIPES, ids=[str(i) for i in range(len(RECIPES))])
def test_what_is_written_is_read(recipe: Recipe, tmp_path: Path) -> None:
    write_recipe(recipe, tmp_path / "recipe.yaml")
    assert read_recipe(tmp_path / "recipe.yaml") == recipe
    assert read_recipe(str(tmp_path / "recipe.yaml")) == recipe
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_all_recipes_come_back(tmp_path: Path) -> None:
    for name in recipe_names():
        write_recipe(read_recipe(name), tmp_path / "recipe.yaml")
        assert read_recipe(tmp_path / "recipe.yaml") == read_recipe(name)


def test_a_file_says_what_differs_and_overrides_come_last(tmp_path: Path) -> None:
    file = tmp_path / "mine.yml"
    file.write_text(
        "optimizer: {lr: 1e-2, clip: 5}\nbatch_size: 8\nmodel:\n  pool_options: {steps: 3}\n", "utf-8"
    )
    expected = dataclasses.replace(
        Recipe(),
        optimizer=OptimizerOptions(lr=0.01, clip=5.0),
        batch_size=8,
        model=ModelConfig("resnet50", pool_options={"steps": 3}),
    )
    assert read_recipe(file) == expected
    overridden = read_recipe(file, {"batch_size": 4, "optimizer.clip": None, "data.path": tmp_path})
    assert (overridden.batch_size, overridden.optimizer) == (4, OptimizerOptions(lr=0.01))
    assert overridden.data.path == str(tmp_path)
    assert overridden.model == expected.model


def test_no_name_is_modern() -> None:
    assert read_recipe() == read_recipe("modern")
    assert read_recipe(None, {"seed": 3}).seed == 3


def test_another_pooling_leaves_out_what_was_for_the_first() -> None:
    paper = read_recipe("resnet50-imagenet").model
    baseline = read_recipe("resnet50-imagenet", {"model.pool": "gap"}).model
    assert baseline == dataclasses.replace(paper, pool="gap", dim="auto", pool_options={})
    with_dim = read_recipe("resnet50-imagenet", {"model.pool": "gap", "model.dim": 64}).model
    assert with_dim.dim == 64
    assert read_recipe("resnet50-imagenet", {"model.pool": "isqrt_cov"}).model == paper
    assert read_recipe("resnet50-imagenet", {"model.pool": "mpn_cov"}).model.dim == paper.dim
    probing = read_recipe("resnet50-imagenet", {"model.pool": "moment_probing"}).model
    assert probing.dim == "auto", "it projects the channels itself"
    assert probing.keep_resolution == paper.keep_resolution


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("optimizer: {lrr: 1}", "a recipe has no optimizer.lrr; is it optimizer.lr?"),
        ("optimiser: {lr: 1}", "a recipe has no optimiser"),
        ("optimizer: 3", "optimizer must be a mapping of keys to values; got 3"),
        ("optimizer:", "optimizer must be a mapping of keys to values; got None"),
        ("optimizer: {lr: fast}", "optimizer.lr takes a number; got fast"),
        ("schedule: {epochs: 2.5}", "schedule.epochs takes a whole number; got 2.5"),
        ("schedule: {milestones: [a]}", "schedule.milestones takes a list, as [1,2]; got"),
        ("loop: {device: tpu}", "loop.device takes auto, cpu, cuda, mps or xpu; got tpu"),
        ("loop: {compile: 1}", "loop.compile takes true or false; got 1"),
        ("model: {pool_options: 3}", 'model.pool_options takes names and values, as {"a": 1}; got 3'),
        ("out: 3", "out takes a word; got 3"),
        ("3: 4", "a recipe has no 3"),
        ("[1, 2]", "is not a recipe: it must be a mapping of keys to values"),
        ("", "is not a recipe: it must be a mapping of keys to values"),
        ("a: [", "is not valid YAML: while parsing"),
        ("a: \x00", "is not valid YAML: unacceptable character"),
    ],
)
def test_mistakes_in_a_file(text: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text, "utf-8")
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        read_recipe(file)
    assert str(error.value).startswith(str(file))
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:pathlib.Path.touch [{}]",
        "!!python/object/new:subprocess.check_call [[touch, {}]]",
        "!!python/name:os.system",
        "!!python/module:os",
        "!touch {}",
    ],
)
def test_tags_run_nothing(tag: str, tmp_path: Path) -> None:
    file, trace = tmp_path / "mine.yaml", tmp_path / "trace"
    for text in (f"out: {tag}", f"model:\n  pool_options:\n    a: {tag}", tag):
        file.write_text(text.replace("{}", str(trace)), "utf-8")
        with pytest.raises(ValueError, match="could not determine a constructor for the tag"):
            read_recipe(file)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            {"optimizer.weightdecay": 1},
            "a recipe has no optimizer.weightdecay; is it optimizer.weight_decay?",
        ),
        ({"optimizer": {"lr": 1}}, "a recipe has no optimizer"),
        ({"batch_size": "x"}, "batch_size takes a whole number; got x"),
        ({"batch_size": 0}, "batch_size must be at least 1; got 0"),
        ({"model.pool": "median"}, "pool must be one of"),
        ({"weights.pretrained": True, "weights.path": "a"}, "initial weights have one source"),
        ({"weights.key_map": "order"}, "key_map describes a file of weights"),
    ],
)
def test_mistakes_in_overrides(overrides: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match="^" + sentence.replace("?", r"\?")):
        read_recipe("modern", overrides)


def test_names() -> None:
    with pytest.raises(
        ValueError, match=r"resnet5 is not a recipe: alexnet-imagenet, .*modern.* as a .yaml file"
    ):
        read_recipe("resnet5")
    with pytest.raises(FileNotFoundError):
        read_recipe("resnet5.yaml")


def test_every_key_has_a_meaning_and_every_short_name_a_key() -> None:
    assert options().keys() == flat(Recipe()).keys()
    assert all(option.meaning for option in options().values())
    assert set(SHORT.values()) <= options().keys()
    assert len(set(SHORT.values())) == len(SHORT)
    assert not SHORT.keys() & options().keys()


def test_text_is_in_the_order_of_the_sections() -> None:
    text = recipe_text(Recipe())
    assert text.startswith("batch_size: 256\nseed: 0\n")
    assert text.index("\ndata:\n  path: ''\n") < text.index("\nmodel:\n  backbone: resnet50\n")


@pytest.mark.parametrize(
    "text",
    [
        "model:\n  pool_options: &a {a: *a}\n",
        "model:\n  pool_options:\n    a: &a [x, x]\n"
        + "".join(
            f"    {new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in pairwise("abcdefghijk")
        ),
        "batch_size: &size 8\nvalidation: {batch_size: *size}\n",
    ],
    ids=["itself", "billion laughs", "harmless"],
)
def test_aliases_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"recipe.yaml: a recipe has no aliases, as in line \d+: write"):
        read_recipe(path)


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("# " + "x" * 2**16)
    with pytest.raises(UsageError, match="larger than 64 KiB"):
        read_recipe(tmp_path / "recipe.yaml")


@pytest.mark.parametrize(("key", "value"), [("data.cache", "/scratch"), ("data.path", "moved"), ("out", "x")])
def test_what_does_not_change_the_result_may_change(tmp_path: Path, key: str, value: str) -> None:
    write_recipe(read_recipe(), tmp_path / "recipe.yaml")
    recipe = read_recipe(None, {key: value, "model.pool_options": {"iteration": "fitted", "steps": 3}})
    assert as_begun(tmp_path / "recipe.yaml", recipe) == recipe


def test_what_is_left_open_is_as_it_was(tmp_path: Path) -> None:
    write_recipe(read_recipe(None, {"model.dim": 32, "model.num_classes": 7}), tmp_path / "recipe.yaml")
    model = as_begun(tmp_path / "recipe.yaml", read_recipe()).model
    assert (model.dim, model.num_classes) == (32, 7)
    with pytest.raises(ValueError, match="was started with --dim 32, not 64"):
        as_begun(tmp_path / "recipe.yaml", read_recipe(None, {"model.dim": 64}))


def test_what_changes_the_result_may_not(tmp_path: Path) -> None:
    write_recipe(read_recipe(), tmp_path / "recipe.yaml")
    with pytest.raises(ValueError, match=r"was started with --seed 0, not 1: use the same values"):
        as_begun(tmp_path / "recipe.yaml", read_recipe(None, {"seed": 1}))


@pytest.mark.parametrize(
    ("before", "now", "resumed"),
    [
        ({}, {}, {"iteration": "fitted", "steps": 3}),
        ({"steps": 4}, {"steps": 4}, {"iteration": "fitted", "steps": 4}),
        ({}, {"steps": 4}, None),
        ({}, {"iteration": "fitted"}, {"iteration": "fitted", "steps": 3}),
        ({"side": "channels"}, {"side": "channels"}, {"side": "channels", "iteration": "fitted", "steps": 3}),
        ({"iteration": "fitted", "steps": 4}, {}, {"iteration": "fitted", "steps": 4}),
        ({"iteration": "paper", "steps": 3}, {"steps": 3}, None),
        ({"iteration": "fitted", "steps": 3}, {"iteration": "paper"}, None),
    ],
    ids=str,
)
def test_a_run_keeps_its_iteration(
    before: dict[str, Any], now: dict[str, Any], resumed: dict[str, Any] | None, tmp_path: Path
) -> None:
    write_recipe(read_recipe(None, {"model.pool_options": before}), tmp_path / "recipe.yaml")
    recipe = read_recipe(None, {"model.pool_options": now})
    if resumed is None:
        with pytest.raises(ValueError, match=r"was started with --model.pool-options"):
            as_begun(tmp_path / "recipe.yaml", recipe)
    else:
        assert as_begun(tmp_path / "recipe.yaml", recipe).model.pool_options == resumed


@pytest.mark.parametrize("name", ["efficientnet_lite0", "tf_efficientnet_lite0"])
def test_a_run_with_the_weights_of_a_package_resumes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covpool.models.weights.Package.file", lambda self: Path("lite0.pth"))
    recipe = read_recipe(None, {"model.backbone": name, "weights.pretrained": True})
    resolved = dataclasses.replace(recipe, model=pretrained_config(recipe.model))
    write_recipe(resolved, tmp_path / "recipe.yaml")
    assert as_begun(tmp_path / "recipe.yaml", recipe).model.backbone == resolved.model.backbone
    monkeypatch.setattr("covpool.models.weights.Package.file", lambda self: None)
    with pytest.raises(ValueError, match=r"was started with --model"):
        as_begun(tmp_path / "recipe.yaml", recipe)
