"""The command line of ``covpool train``; the training loop is tested elsewhere."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from covpool.cli.main import main
from covpool.cli.train import make_parser
from covpool.errors import Interrupted
from covpool.training.recipe import Recipe
from covpool.training.recipe_files import SHORT, options, read_recipe, recipe_names, recipe_text

# The advice for a word that is no option.
STRAY = "; covpool train accepts only data; quote spaces and patterns, as 'photos/*.jpg'"

# Every option: removing one breaks users' scripts, and each new one must be documented.
FROZEN = """
--accumulate --augmentation.colour --augmentation.crop --augmentation.flip --augmentation.ratio
--augmentation.scale --augmentation.shorter-side --augmentation.strength --balance --batch-size --bundle
--checkpoint-minutes --checkpoint-steps --checkpoint.keep --checkpoint.minutes --checkpoint.steps --compare
--data --data.balance --data.cache --data.layout --data.limit --data.max-bad --data.path --data.val-fraction
--data.window --data.workers --debug --deterministic --device --dim --ema --epochs --freeze --help
--image-size --json --key-map --limit --loop.accumulate --loop.channels-last --loop.compile
--loop.deterministic --loop.device --loop.ema --loop.max-skips --loop.precision --loop.divide-classes
--loop.sync-batchnorm --loop.timeout --loss.cutmix --loss.label-smoothing --loss.mixup --lr --max-bad
--max-skips --model --model.backbone --model.backbone-options --model.dim --model.drop-rate --model.features
--model.fusion --model.head --model.hidden --model.hidden-batchnorm --model.image-size --model.join
--model.keep-resolution --model.layers --model.normalize --model.num-classes --model.pool
--model.pool-options --model.preprocessing --model.rank --optimizer.classifier-factor --optimizer.clip
--optimizer.decay-norms --optimizer.layer-decay --optimizer.lr --optimizer.momentum --optimizer.name
--optimizer.weight-decay --out --patience --pool --precision --pretrained --print-config
--quiet --recipe
--schedule.epochs --schedule.final-lr --schedule.head-first --schedule.head-lr --schedule.kind
--schedule.milestones --schedule.warmup --seed --trackers --trust-rows --val-fraction
--validation.batch-size --validation.monitor --validation.patience --validation.refit --weight-decay
--weights --weights.bundle --weights.freeze --weights.keep-statistics --weights.key-map --weights.path
--weights.pretrained --workers
"""

SUMMARY = {"split": "test", "metrics": {"top1": 0.7125, "macro_f1": 0.7, "images": 1615}, "epochs": 12}


def words(options: str) -> list[str]:
    return ["train", *options.split()]


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> list[Recipe]:
    """Return the recipes that reach the training loop, which is replaced by a stub."""
    recipes: list[Recipe] = []

    def train_recipe(recipe: Recipe) -> Any:
        recipes.append(recipe)
        if recipe.seed == 143:
            raise Interrupted(signal.SIGTERM, "stopped at step 7: the same command goes on")
        summary = SUMMARY if recipe.seed == 0 else {**SUMMARY, "split": None, "metrics": None}
        return SimpleNamespace(
            folder=Path(recipe.out), summary=summary, was_finished=recipe.seed == 2, images=None
        )

    def write_comparison(folder: Path, runs: dict[str, Path], images: object) -> Path:
        return folder / "report.html"

    monkeypatch.setattr("covpool.training.run.train_recipe", train_recipe)
    monkeypatch.setattr("covpool.training.report.write_comparison", write_comparison)
    return recipes


def test_options_are_frozen() -> None:
    known = {name for action in make_parser()._actions for name in action.option_strings} - {"-h"}
    known |= {f"--{short}" for short in SHORT}
    assert sorted(name.replace("_", "-") for name in known) == sorted(FROZEN.split())


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help-all"]) == 0
    text = capsys.readouterr().out
    common, _, more = text.partition("\nmore options of data:\n")
    for short, key in SHORT.items():
        assert f"\n  --{short.replace('_', '-')} " in common
        assert f"--{key} " not in text
    assert set(re.findall(r"^  --([\w-]+\.[\w-]+) ", more, re.MULTILINE)) == {
        key.replace("_", "-") for key in options() if "." in key and key not in SHORT.values()
    }
    assert "``" not in text
    assert "None" not in text
    assert all(f"\n  {name}: {sentence}\n" in text for name, sentence in recipe_names().items())
    assert [action.dest for action in make_parser()._actions if not action.help] == []


def test_a_whole_command_line(fits: list[Recipe], capsys: pytest.CaptureFixture[str]) -> None:
    command = words(
        "--data DIR --model resnet18 --dim 64 --epochs 60 --batch-size 256 --image-size 224 --limit 9 "
        "--seed 0 --deterministic true --checkpoint-steps 500 --out OUT --pool gap "
        "--recipe resnet50-imagenet --optimizer.weight-decay 0.01 --model.pool-options {} "
        "--augmentation.shorter-side=[300,400] --ema none"
    )
    assert main(command) == 0
    assert fits == [
        read_recipe(
            "resnet50-imagenet",
            {
                "data.path": "DIR",
                "model.backbone": "resnet18",
                "model.dim": 64,
                "schedule.epochs": 60,
                "batch_size": 256,
                "model.image_size": 224,
                "data.limit": 9,
                "seed": 0,
                "loop.deterministic": True,
                "checkpoint.steps": 500,
                "out": "OUT",
                "model.pool": "gap",
                "optimizer.weight_decay": 0.01,
                "model.pool_options": {},
                "augmentation.shorter_side": (300, 400),
                "loop.ema": None,
            },
        )
    ]
    assert capsys.readouterr() == (
        "top-1 71.2%, macro-F1 70.0% on the 1,615 images of test, after 12 epochs\nreport: OUT/report.html\n",
        "",
    )


@pytest.mark.parametrize(
    "given",
    [
        "--data d --recipe alexnet-imagenet --lr 0.5",
        "--lr 0.5 --recipe=alexnet-imagenet --data=d",
        "--optimizer.lr=5e-1 --data.path d --recipe alexnet-imagenet",
        "d --recipe alexnet-imagenet --lr 0.5",
    ],
)
def test_the_order_of_options_does_not_matter(given: str, fits: list[Recipe]) -> None:
    assert main(words(given)) == 0
    assert fits == [read_recipe("alexnet-imagenet", {"data.path": "d", "optimizer.lr": 0.5})]


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ("--deterministic", "loop.deterministic", True),
        ("--pretrained --seed 0", "weights.pretrained", True),
        ("--loop.compile", "loop.compile", True),
        ("--deterministic=false", "loop.deterministic", False),
        ("--dim none", "model.dim", None),
        ("--dim=none", "model.dim", None),
        ("--dim null", "model.dim", None),
        ("--balance none", "data.balance", "none"),
        ("--out none", "out", "none"),
        ("--out 1e-3", "out", "1e-3"),
        ("--trackers []", "trackers", ()),
    ],
)
def test_values(given: str, key: str, value: Any, fits: list[Recipe]) -> None:
    assert main(words(f"--data d {given}")) == 0
    assert fits == [read_recipe(None, {"data.path": "d", key: value})]


def test_weights_by_their_short_names(fits: list[Recipe]) -> None:
    assert main(words("d --weights a.pth --key-map order")) == 0
    given = {"data.path": "d", "weights.path": "a.pth", "weights.key_map": "order"}
    assert fits == [read_recipe("finetune", given)]


def test_no_recipe_is_the_modern_one_and_a_file_is_read(fits: list[Recipe], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("data: {path: there}\nbatch_size: 3\n", "utf-8")
    assert main(["train", "--data", "d"]) == 0
    assert main(["train", "--recipe", str(tmp_path / "mine.yaml")]) == 0
    assert fits == [read_recipe("modern", {"data.path": "d"}), read_recipe(tmp_path / "mine.yaml")]


def test_print_config(fits: list[Recipe], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["train", "--print-config", "--recipe", "resnet50-cars", "--epochs", "3"]) == 0
    text = capsys.readouterr().out
    expected = read_recipe("resnet50-cars", {"schedule.epochs": 3})
    assert text == recipe_text(expected)
    (tmp_path / "mine.yaml").write_text(text, "utf-8")
    assert read_recipe(tmp_path / "mine.yaml") == expected
    assert not fits


def test_compare(fits: list[Recipe], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words("--data d --out runs --dim 32 --compare gap")) == 0
    assert [(recipe.out, recipe.model.pool, recipe.model.dim) for recipe in fits] == [
        ("runs/isqrt_cov", "isqrt_cov", 32),
        ("runs/gap", "gap", "auto"),
    ]
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["isqrt_cov", "gap", "report"]
    assert lines[2] == "report: runs/report.html"


def test_json(fits: list[Recipe], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words("--data d --out runs --json")) == 0
    assert json.loads(capsys.readouterr().out) == {
        "folder": "runs",
        "report": "runs/report.html",
        "was_finished": False,
        "summary": SUMMARY,
        "runs": {},
    }
    assert main(words("--data d --out runs --compare gap --json")) == 0
    assert json.loads(capsys.readouterr().out)["runs"]["gap"]["folder"] == "runs/gap"


def test_what_is_said_of_other_runs(fits: list[Recipe], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words("--data d --seed 1")) == 0
    assert capsys.readouterr().out.startswith("trained, after 12 epochs; there were no images to test on\n")
    assert main(words("--data d --seed 2")) == 0
    assert capsys.readouterr().out.startswith("finished before: trained, after 12 epochs")


def test_an_interruption_has_its_exit_code(fits: list[Recipe], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words("--data d --seed 143")) == 143
    assert capsys.readouterr() == (
        "stopped at step 7: the same command goes on\n",
        "covpool train: stopped, and the work so far is saved; "
        "to resume: covpool train --data d --seed 143\n",
    )


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("--epochs 3", "the data is missing: a folder of images, a CSV of path,label, or shards"),
        ("--data d --epochs x", "--epochs takes a whole number; got x"),
        ("--data d --schedule.epochs x", "--epochs takes a whole number; got x"),
        ("--data d --optimizer.clip x", "--optimizer.clip takes a number; got x"),
        ("--data d --image-size x", "--image-size takes a whole number; got x"),
        ("--data d --device tpu", "--device takes auto, cpu, cuda, mps or xpu; got tpu"),
        ("--data d --epochs", "--epochs needs a value: a whole number"),
        ("--data d --epoch 3", "unrecognized arguments: --epoch 3: did you mean --epochs?"),
        ("--data d --optimizer.lrr 3", "unrecognized arguments: --optimizer.lrr 3: did you mean --lr?"),
        ("--data d --optimizer {}", "unrecognized arguments: --optimizer {}: did you mean --lr?"),
        ("d e", f"unrecognized arguments: e{STRAY}"),
        ("--epochs 3 d", f"unrecognized arguments: d{STRAY}"),
        ("--data d --epochs 0", "--epochs must be at least 1; got 0"),
        (
            "--data d --compare isqrt_cov",
            "--compare isqrt_cov is the pooling of the recipe: choose another",
        ),
        ("--recipe none.yaml", "none.yaml: No such file or directory"),
    ],
)
def test_mistakes(given: str, sentence: str, fits: list[Recipe], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(given)) == 2
    assert capsys.readouterr() == ("", f"covpool train: {sentence}\n")
    assert not fits


@pytest.mark.slow
def test_under_torchrun_the_first_process_speaks() -> None:
    command = ["-m", "covpool", *words("--recipe alexnet-imagenet --print-config")]
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == recipe_text(read_recipe("alexnet-imagenet"))
