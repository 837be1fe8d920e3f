"""``covpool <verb>``: finds the verb, runs it, and puts what went wrong into one sentence.

To add a verb: write a file in this folder, as :class:`VerbFile` says, and add a line to ``PROJECT``. The verb
``lr-find`` is in ``lr_find.py``.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

from covpool import __version__
from covpool.cli.memory import keep_freed_memory
from covpool.cli.mistakes import did_you_mean, explained

# After Ctrl-C and SIGTERM, as shells have it.
STOPPED = (130, 143)


class Verb(NamedTuple):
    """A line for ``covpool --help``, and what is to be known of a verb before its file is imported.

    Attributes:
        summary: that continues its name.
        extra: that brings what it needs; empty where torch is enough.
        goes_on: whether the same command goes on where it was stopped.
    """

    summary: str
    extra: str
    goes_on: bool = False


# In the order of a project.
PROJECT = {
    "the data": {
        "check": Verb("find what is wrong with images, before training", "data"),
        "shard": Verb("write images into tar shards with an index", "data"),
    },
    "plan": {
        "plan": Verb("memory and FLOPs of training, and the head to take", "models"),
        "lr-find": Verb("suggest a learning rate, from a short sweep", "train"),
    },
    "train": {
        "train": Verb("a network on images, from a folder to a report", "train", goes_on=True),
        "probe": Verb("heads on a frozen backbone, in minutes", "eval", goes_on=True),
        "svm": Verb("linear SVMs on a trained network's features", "eval", goes_on=True),
    },
    "judge": {
        "eval": Verb("accuracy with intervals, calibration, confusions", "eval"),
        "retrieve": Verb("find like images by vectors: recall at k, mAP", "eval"),
        "explain": Verb("draw where in an image the evidence for a class is", "train"),
        "diagnose": Verb("look at the covariances, and say what is amiss", "train"),
    },
    "use": {
        "predict": Verb("tell the classes of any number of images", "eval", goes_on=True),
        "embed": Verb("write the vectors of any number of images", "eval", goes_on=True),
        "export": Verb("ONNX and torch.export files, proved to agree", "export"),
    },
    "the paper": {
        "bench": Verb("time and memory of the pooling methods, here", "bench"),
        "reproduce": Verb("a table or figure again, in miniature", "eval", goes_on=True),
        "convert": Verb("a checkpoint of fast-MPN-COV into a bundle", "models"),
    },
    "this machine": {
        "doctor": Verb("versions, devices, extras, and a self-test", ""),
    },
}
VERBS = {name: verb for verbs in PROJECT.values() for name, verb in verbs.items()}
# They measure what any program would see, so memory is as any program's.
MEASURING = ("bench", "reproduce")


class VerbFile(Protocol):
    """What the file of a verb has. It imports torch at most before ``run``, so that ``--help`` is quick.

    It may also have a function ``exit_code`` from what ``run`` returned, for a verb whose answer may be no;
    and ``parse``, from words to arguments and whether JSON was asked for, where options are more than the
    fields of a dataclass.
    """

    Arguments: type[Any]
    """A dataclass; its docstring is the help, fields without a default are positional."""

    EXAMPLE: str
    """A command line that works, for the end of the help."""

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
        return _say("covpool", f"covpool {__version__}")
    if verb in ("-h", "--help"):
        return _say("covpool", _help())
    if not verb:
        print(_help(), file=sys.stderr)
        return 2
    if verb not in VERBS:
        hint = did_you_mean(verb, VERBS) or "; covpool --help lists them"
        return _complain("covpool", f"{verb!r} is none of its verbs{hint}")
    if arguments is None and verb not in MEASURING:  # otherwise the process is somebody else's
        keep_freed_memory()
    return _run(verb, rest)


def _run(verb: str, arguments: list[str]) -> int:
    command = f"covpool {verb}"
    try:
        output, code = _output(verb, arguments)
        if _is_first():
            code = _say(command, output) or code
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        if "--debug" in arguments:
            raise
        sentence, code = explained(error, VERBS[verb].extra)
        if sentence:
            _complain(command, sentence)
    if code in STOPPED and _is_first():
        _complain(command, _how_to_go_on(verb, arguments))
    return code


def _say(command: str, text: str) -> int:
    """Write to standard output; the exit code, which is not 0 where it does not take all of it."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader, head or less, has seen enough; Python would flush again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        return _complain(command, explained(error, "")[0])
    return 0


def _how_to_go_on(verb: str, arguments: list[str]) -> str:
    if not VERBS[verb].goes_on:
        return "stopped"
    kept = "stopped, and what was done is kept"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return f"{kept}; the same torchrun command goes on"
    return f"{kept}; to go on: {shlex.join(['covpool', verb, *arguments])}"


def _is_first() -> bool:
    """Whether this process speaks; under torchrun the first one does, for all."""
    return os.environ.get("RANK", "0") == "0"


def _output(verb: str, arguments: list[str]) -> tuple[str, int]:
    file = cast(VerbFile, importlib.import_module(f"covpool.cli.{verb.replace('-', '_')}"))
    if hasattr(file, "parse"):
        parsed, as_json = file.parse(arguments)
    else:
        from covpool.cli.parser import parse  # jsonargparse may be missing

        parsed, as_json = parse(f"covpool {verb}", file.Arguments, arguments, file.EXAMPLE)
    result = file.run(parsed)
    text = (
        json.dumps(dataclasses.asdict(result), indent=2, default=os.fspath) if as_json else file.text(result)
    )
    return text, getattr(file, "exit_code", lambda result: 0)(result)


def _complain(command: str, message: str) -> int:
    print(f"{command}: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _help() -> str:
    width = max(map(len, PROJECT))
    lines = [
        f"  {(title if i == 0 else '').ljust(width)}  {name.ljust(9)}  {verb.summary}"
        for title, verbs in PROJECT.items()
        for i, (name, verb) in enumerate(verbs.items())
    ]
    return "\n".join(
        [
            "usage: covpool [--help] [--version] VERB ...",
            "",
            "Global covariance pooling for image backbones, in the order of a project.",
            "",
            *lines,
            "",
            "covpool VERB --help has the options of a verb, and an example.",
        ]
    )
