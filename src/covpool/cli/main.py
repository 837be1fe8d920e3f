"""``covpool <verb>``: finds the verb, runs it, and puts what went wrong into one sentence.

To add a verb: write a file in this folder, as :class:`VerbFile` says, and add a line to ``VERBS``. The verb
``lr-find`` is in ``lr_find.py``.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

from covpool import __version__


class Verb(NamedTuple):
    """A line for ``covpool --help``, and the extra that brings what the verb needs."""

    summary: str
    extra: str


VERBS = {
    "bench": Verb("time and memory of the pooling methods on this machine, beside the paper's", "bench"),
    "check": Verb("find what is wrong with a collection of images, before training on it", "data"),
    "convert": Verb("turn a released checkpoint of fast-MPN-COV into a bundle", "models"),
    "diagnose": Verb("look at a network's covariances on images, and say what is amiss", "train"),
    "embed": Verb("write the vectors of any number of images, for search and other classifiers", "eval"),
    "eval": Verb("try a bundle on images: accuracy with intervals, calibration, confusions", "eval"),
    "explain": Verb(
        "draw where in an image the evidence for a class is: maps that sum to the logit", "train"
    ),
    "export": Verb("turn a bundle into ONNX and torch.export files, and prove that they agree", "export"),
    "lr-find": Verb("raise the learning rate until the loss explodes, and suggest one for training", "train"),
    "plan": Verb("memory and FLOPs of training a network, and the head to take", "models"),
    "predict": Verb("tell the classes of any number of images, into Parquet or CSV", "eval"),
    "probe": Verb("train heads on a frozen backbone in minutes, and keep the best", "eval"),
    "reproduce": Verb("run a table or figure of the paper again, in miniature, and judge its claims", "eval"),
    "retrieve": Verb("find like images by a bundle's vectors: recall at k, mean average precision", "eval"),
    "shard": Verb("write images into tar shards with an index, for large sets and object stores", "data"),
    "svm": Verb("fit linear SVMs on a trained network's features: the fine-grained protocol", "eval"),
    "train": Verb("train a network on images, from a folder to a report", "train"),
}

# What a caller can get wrong, as the library says it.
MISTAKES = (ValueError, TypeError, OSError)


class VerbFile(Protocol):
    """What the file of a verb has. It imports torch at most before ``run``, so that ``--help`` is quick.

    It may also have a function ``exit_code`` from what ``run`` returned, for a verb whose answer may be no;
    and ``parse``, from words to arguments and whether JSON was asked for, where options are more than the
    fields of a dataclass.
    """

    Arguments: type[Any]
    """A dataclass; its docstring is the help, fields without a default are positional."""

    def run(self, arguments: Any) -> Any:
        """Do it, and return a dataclass."""

    def text(self, result: Any) -> str:
        """What ``run`` returned, for a person."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    0 is for success, 2 for a mistake of the caller, 130 for Ctrl-C, 143 for a ``train`` after SIGTERM, and 1
    for a mistake of ours, or for a verb whose answer is no, as that of ``check`` where it found something.
    """
    verb, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    if verb == "--version":
        print(f"covpool {__version__}")
    elif verb in ("-h", "--help"):
        print(_help())
    elif not verb:
        print(_help(), file=sys.stderr)
        return 2
    elif verb not in VERBS:
        return _complain("covpool", f"{verb!r} is none of its verbs: {', '.join(VERBS)}")
    else:
        return _run(verb, rest)
    return 0


def _run(verb: str, arguments: list[str]) -> int:
    command = f"covpool {verb}"
    try:
        output, code = _output(verb, arguments)
        if os.environ.get("RANK", "0") == "0":  # under torchrun the first process speaks for all
            print(output, flush=True)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, head or less, has seen enough; Python would flush again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        from covpool.train.processes import ToldByFirstError

        if "--debug" in arguments:
            raise
        if isinstance(error, ToldByFirstError):
            return 2
        if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("covpool"):
            return _complain(command, f"{error.name} is missing: pip install 'covpool[{VERBS[verb].extra}]'")
        if isinstance(error, MISTAKES):
            return _complain(command, _sentence(error))
        return _complain(command, f"{type(error).__name__}: {error} (--debug shows where)", code=1)
    return code


def _output(verb: str, arguments: list[str]) -> tuple[str, int]:
    from covpool.cli.parser import parse  # jsonargparse may be missing

    file = cast(VerbFile, importlib.import_module(f"covpool.cli.{verb.replace('-', '_')}"))
    if hasattr(file, "parse"):
        parsed, as_json = file.parse(arguments)
    else:
        parsed, as_json = parse(f"covpool {verb}", file.Arguments, arguments)
    result = file.run(parsed)
    text = json.dumps(dataclasses.asdict(result), indent=2) if as_json else file.text(result)
    return text, getattr(file, "exit_code", lambda result: 0)(result)


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def _complain(command: str, message: str, code: int = 2) -> int:
    print(f"{command}: {' '.join(message.split())}", file=sys.stderr)
    return code


def _help() -> str:
    width = max(map(len, VERBS))
    listed = "\n".join(f"  {name.ljust(width)}  {verb.summary}" for name, verb in VERBS.items())
    return (
        "usage: covpool [--help] [--version] VERB ...\n\n"
        f"Global covariance pooling for image backbones.\n\n{listed}\n\n"
        "covpool VERB --help has the options of a verb."
    )
