"""Arguments are checked before torch is imported, and every command prints a line at once."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from covpool.cli.main import VERBS, command_of, long_help
from covpool.cli.parser import MAY_BE_ZERO, parse_several, valued
from covpool.errors import UsageError
from tests.cli.test_options import OPTIONS, POSITIONALS

# The commands whose options are keys of a recipe, which needs torch.
RECIPES = ("train", "lr-find")
# Refuse to import torch, and note in the log when that is asked for.
WITHOUT_TORCH = """
import json, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("torch", file=sys.stderr)
            raise ModuleNotFoundError("torch", name="torch")
sys.meta_path.insert(0, Refuse())
from covpool.cli.main import main
for words in json.loads(sys.argv[1]):
    print(main(words), file=sys.stderr)
"""


def log_of(commands: list[list[str]], folder: Path) -> list[str]:
    """Run commands in one process without torch; return the lines of their errors and exit codes."""
    words = [sys.executable, "-c", WITHOUT_TORCH, json.dumps(commands)]
    run = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    return run.stderr.splitlines()


def test_wrong_arguments_are_found_without_torch(tmp_path: Path) -> None:
    (tmp_path / "birds").mkdir()
    wrong = {
        "--image-size must be at least 1; got -5": ["fit", "birds", "--image-size", "-5"],
        "--epochs must be at least 1; got -3": ["fit", "birds", "--epochs", "-3"],
        "nofile.pth: No such file or directory": ["fit", "birds", "--weights", "nofile.pth"],
        "brids: No such file or directory: did you mean birds?": ["eval", "bundle", "brids"],
        "device takes auto, cpu, cuda, mps or xpu; got gpu: did you mean cuda?": [
            "predict",
            "bundle",
            "birds",
            "--device",
            "gpu",
        ],
        "the following arguments are required: data; example: covpool fit birds": ["fit"],
        "unrecognized arguments: --lr 1; covpool fit --help lists the options": ["fit", "birds", "--lr", "1"],
        "unrecognized arguments: --output there: did you mean --out?": ["fit", "birds", "--output", "there"],
        "unrecognized arguments: --pool gap: did you mean --heads?": ["fit", "birds", "--pool", "gap"],
        "unrecognized arguments: --epoch 3: did you mean --epochs?": ["fit", "birds", "--epoch", "3"],
        "unrecognized arguments: -o there: did you mean --out?": ["fit", "birds", "-o", "there"],
        "unrecognized arguments: b.jpg; covpool predict accepts only bundle and data; quote spaces": [
            "predict",
            "bundle",
            "birds",
            "b.jpg",
        ],
        "--data is not an option: leave out this word": ["fit", "--data", "birds"],
        "join values by commas, as in --heads gap,isqrt_cov": ["fit", "birds", "--heads", "gap", "isqrt_cov"],
        "--heads needs a value: values separated by commas": ["fit", "birds", "--heads"],
        "--image-size needs a value: a whole number": ["fit", "birds", "--image-size"],
        "parquet or folder; got cubs: did you mean cub?": [
            "check",
            "birds",
            "--layout",
            "cubs",
        ],
    }
    needing = [verb for verb in POSITIONALS if POSITIONALS[verb]]
    log = log_of([*wrong.values(), *([verb] for verb in needing)], tmp_path)
    assert "torch" not in log
    assert [line for line in log if line == "2"] == ["2"] * (len(wrong) + len(needing))
    for sentence, words in wrong.items():
        assert any(line.startswith(f"covpool {words[0]}: ") and sentence in line for line in log), sentence


def test_every_command_prints_a_line_before_it_imports_torch(tmp_path: Path) -> None:
    places = {**POSITIONALS, "train": ["data"], "lr-find": ["data"], "doctor": []}
    assert places.keys() == VERBS.keys()
    needed = {"probe": ["--pretrained"]}
    commands = [[verb, *("." for _ in names), *needed.get(verb, [])] for verb, names in places.items()]
    log = "\n".join(log_of(commands, tmp_path))
    for verb in places:
        assert f"covpool {verb}: loading torch\ntorch\n" in log, verb
    quiet = log_of([[*words, "--quiet"] for words in commands], tmp_path)
    assert "torch" in quiet
    assert not [line for line in quiet if "loading" in line]


def test_an_option_of_true_or_false_takes_other_words_for_these() -> None:
    hints = {"finetune": bool, "out": str}
    words = ["birds", "--finetune", "yes", "--out", "on", "--finetune", "birds"]
    assert valued(words, hints) == [*words[:5], "--finetune=true", "birds"]


@pytest.mark.parametrize("verb", OPTIONS)
def test_numbers_out_of_range(verb: str, tmp_path: Path) -> None:
    command = command_of(verb)
    kinds = (command.Arguments, *command.OPTIONS)
    for name, hint in ((name, hint) for kind in kinds for name, hint in get_type_hints(kind).items()):
        if name in command.SKIP or not re.search(r"\bint\b", str(hint)):
            continue
        least = int(name not in MAY_BE_ZERO)
        option = f"--{name.replace('_', '-')}"
        value = f"[{least - 1}]" if "tuple" in str(hint) else str(least - 1)
        words = [*(str(tmp_path) for _ in POSITIONALS[verb]), option, value]
        with pytest.raises(UsageError, match=f"{option} must be at least {least}; got {least - 1}"):
            parse_several(f"covpool {verb}", kinds, words, skip=command.SKIP)


@pytest.mark.parametrize("verb", [*RECIPES, *(verb for verb in OPTIONS if "--out" in OPTIONS[verb])])
def test_every_folder_of_results_has_a_stated_default(verb: str) -> None:
    meaning = re.search(r"^  --out .*?(?=^  --|\Z)", long_help(verb), re.MULTILINE | re.DOTALL)
    assert meaning is not None
    assert re.search(r"\(default:\s|if\s+not\s+given", meaning[0])


def test_options_of_several_words_take_commas(tmp_path: Path) -> None:
    command = command_of("explain")
    for words in ("wren,robin", "[wren, robin]"):
        (parsed,), _ = parse_several(
            "covpool explain", [command.Arguments], ["bundle", str(tmp_path), "--classes", words]
        )
        assert parsed.classes == ("wren", "robin")
