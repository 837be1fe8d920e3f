"""The options of every verb except those with their own parser."""

from __future__ import annotations

import re

import pytest

from covpool.cli.main import VERBS, command_of
from covpool.cli.parser import Parser, make_parser

# Every option of every verb: removing one breaks users' scripts.
SHARED = ["--debug", "--help", "--json", "--quiet"]
WITHOUT_IMAGES = ("convert", "demo", "merge", "plan", "push")

BULK = [
    "--actors",
    "--batch-size",
    "--compile",
    "--connect-timeout",
    "--device",
    "--engine",
    "--flip",
    "--format",
    "--max-bad",
    "--out",
    "--precision",
    "--ray-address",
    "--read-timeout",
    "--retries",
    "--retry",
    "--rows-per-file",
    "--timeout",
    "--verify",
    "--workers",
]

OPTIONS = {
    "update": ["--device", "--keep-sums", "--workers"],
    "forget": ["--device", "--keep-sums", "--workers"],
    "merge": ["--basis", "--keep-sums", "--out"],
    "check": ["--layout", "--out", "--workers"],
    "convert": ["--classes", "--steps"],
    "eval": [
        "--batch-size",
        "--device",
        "--layout",
        "--out",
        "--precision",
        "--seed",
        "--split",
        "--views",
        "--workers",
    ],
    "demo": ["--out", "--seeds"],
    "diagnose": ["--device", "--limit", "--out"],
    "embed": ["--dtype", "--project", "--raw", "--seed", *BULK],
    "fit": [
        "--actors",
        "--balance",
        "--basis",
        "--batch-size",
        "--compile",
        "--keep-sums",
        "--device",
        "--dim",
        "--engine",
        "--epochs",
        "--finetune",
        "--heads",
        "--image-size",
        "--key-map",
        "--model",
        "--out",
        "--ray-address",
        "--seeds",
        "--weights",
        "--workers",
    ],
    "plan": [
        "--backbone-options",
        "--batch-size",
        "--dim",
        "--head",
        "--hidden",
        "--image-size",
        "--join",
        "--keep-resolution",
        "--num-classes",
        "--optimizer",
        "--pool",
        "--pool-options",
        "--precision",
        "--processes",
        "--rank",
    ],
    "probe": [
        "--batch-size",
        "--cache",
        "--compile",
        "--device",
        "--dim",
        "--drop-rate",
        "--epochs",
        "--fusion",
        "--heads",
        "--image-size",
        "--key-map",
        "--layers",
        "--layout",
        "--lr",
        "--max-cache",
        "--model",
        "--out",
        "--precision",
        "--preprocessing",
        "--pretrained",
        "--seeds",
        "--svm-seeds",
        "--trials",
        "--tune",
        "--val-fraction",
        "--weight-decay",
        "--weights",
        "--workers",
    ],
    "export": [
        "--batch-size",
        "--calibration",
        "--compile",
        "--force",
        "--formats",
        "--free-size",
        "--layout",
        "--limit",
        "--out",
        "--preprocessing",
        "--rounds",
        "--split",
        "--workers",
    ],
    "explain": ["--against", "--classes", "--device", "--limit", "--out", "--pairs", "--top"],
    "push": ["--dataset", "--license", "--private", "--results"],
    "retrieve": [
        "--at",
        "--batch-size",
        "--device",
        "--engine",
        "--gallery",
        "--images",
        "--layout",
        "--out",
        "--precision",
        "--split",
        "--workers",
    ],
    "predict": ["--top", *BULK],
    "shard": ["--classes", "--index", "--layout", "--megabytes", "--out", "--seed", "--val-fraction"],
    "svm": [
        "--batch-size",
        "--c",
        "--calibrate",
        "--device",
        "--features",
        "--layout",
        "--max-memory",
        "--out",
        "--precision",
        "--split",
        "--workers",
    ],
}

POSITIONALS = {
    "update": ["model", "data"],
    "forget": ["model", "data"],
    "merge": ["first", "second"],
    "check": ["data"],
    "demo": [],
    "convert": ["file", "folder"],
    "embed": ["bundle", "data"],
    "eval": ["bundle", "data"],
    "fit": ["data"],
    "plan": ["backbone"],
    "predict": ["bundle", "data"],
    "probe": ["data"],
    "diagnose": ["bundle", "data"],
    "explain": ["bundle", "data"],
    "export": ["bundle", "data"],
    "push": ["bundle", "repository"],
    "retrieve": ["bundle", "data"],
    "shard": ["data"],
    "svm": ["bundle", "data"],
}


def parser_of(verb: str) -> Parser:
    command = command_of(verb)
    return make_parser(f"covpool {verb}", command.Arguments, *command.OPTIONS, skip=command.SKIP)


def test_every_verb_has_a_line() -> None:
    # The options of the other verbs are tested elsewhere.
    assert VERBS.keys() == OPTIONS.keys() | {"doctor", "lr-find", "train"}
    assert all(verb.summary and "\n" not in verb.summary for verb in VERBS.values())


@pytest.mark.parametrize("verb", OPTIONS)
def test_options(verb: str) -> None:
    text = parser_of(verb).format_help()
    shared = SHARED if verb in WITHOUT_IMAGES else [*SHARED, "--trust-rows"]
    assert sorted(set(re.findall(r"--[\w-]+", text))) == sorted(OPTIONS[verb] + shared)
    usage = text.partition("\n\n")[0].split()
    assert usage[len(usage) - len(POSITIONALS[verb]) :] == POSITIONALS[verb]


@pytest.mark.parametrize("verb", OPTIONS)
def test_every_option_is_described(verb: str) -> None:
    parser = parser_of(verb)
    assert [action.dest for action in parser._actions if not action.help] == []
    assert "``" not in parser.format_help()
