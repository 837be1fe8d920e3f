"""Find a verb, run it, and print its result or its error: ``covpool VERB``.

To add a verb: write a file of its name in this folder with a :class:`Command` of its name, and add a line to
``PROJECT``. In Python, the verb ``lr-find`` is ``lr_find``.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import importlib
import io
import json
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest import mock

from covpool import __version__
from covpool.errors import WORKER_DIED, CovpoolError, Interrupted, ReportedByFirstError
from covpool.storage.files import package_text
from covpool.storage.remote import trust_rows
from covpool.terminal import announce_loading, did_you_mean, printable, running

# Exit codes of Ctrl-C and SIGTERM, as in shells.
STOPPED = (130, 143)


class Verb(NamedTuple):
    """A line of ``covpool --help``, and the facts that main needs before it imports the verb's file.

    Attributes:
        summary: the end of the line, after the verb's name.
        extra: the extra with its dependencies; empty where torch is enough.
        resumes: whether the same command resumes after an interruption.
        file: the file with its :class:`Command`; empty if it has the verb's name.
    """

    summary: str
    extra: str
    resumes: bool = False
    file: str = ""


# In the order of a project.
PROJECT = {
    "start": {
        "demo": Verb("covariance against average pooling, in a minute", "train", file="start"),
    },
    "data": {
        "check": Verb("find unreadable and duplicate images, and empty classes", "data", file="images"),
        "shard": Verb("write images into tar shards with an index", "data", file="images"),
    },
    "plan": {
        "plan": Verb("memory and FLOPs of training, and a recommended head", "models", file="models"),
        "lr-find": Verb("suggest a learning rate, from a short sweep", "train"),
    },
    "train": {
        "fit": Verb("a model for a folder of images, compared with GAP", "eval", resumes=True),
        "update": Verb("add images and classes to a fitted model, in seconds", "eval", file="fit"),
        "forget": Verb("remove images from a fitted model", "eval", file="fit"),
        "merge": Verb("join two fitted models, without their images", "eval", file="fit"),
        "train": Verb("a network on images, from a folder to a report", "train", resumes=True),
        "probe": Verb("heads on a frozen backbone, in minutes", "eval", resumes=True, file="heads"),
        "svm": Verb("linear SVMs on a trained network's features", "eval", resumes=True, file="heads"),
    },
    "evaluate": {
        "eval": Verb("accuracy with intervals, calibration, confusions", "eval", file="evaluate"),
        "retrieve": Verb("image retrieval by embeddings: recall at k, mAP", "eval", file="evaluate"),
        "explain": Verb("draw where in an image the evidence for a class is", "train", file="explain"),
        "diagnose": Verb("check the covariances of a network, with advice", "train", file="explain"),
    },
    "use": {
        "predict": Verb("predict the classes of any number of images", "eval", resumes=True, file="infer"),
        "embed": Verb("write embeddings of any number of images", "eval", resumes=True, file="infer"),
        "export": Verb("ONNX and torch.export files, compared with the model", "export"),
        "push": Verb("a bundle to the Hugging Face Hub, with a model card", "hub", file="models"),
    },
    "paper": {
        "convert": Verb("a checkpoint of fast-MPN-COV into a bundle", "models", file="models"),
    },
    "machine": {
        "doctor": Verb("versions, devices, extras, and a self-test", "", file="start"),
    },
}
# Their options are the keys of a recipe.
OPTIONS_NEED_TORCH = ("train", "lr-find")
VERBS = {name: verb for verbs in PROJECT.values() for name, verb in verbs.items()}


# Begins the help of a verb in help.txt; the name of the verb follows.
HELP_MARK = "######## "


class Command(NamedTuple):
    """The options and the functions of a verb. Its file imports torch at most, so that ``--help`` is quick.

    Attributes:
        Arguments: a dataclass; its docstring is the help, fields without a default are positional.
        EXAMPLE: a command line that works, for the end of the help.
        run: do the work, and return a dataclass.
        text: format the result of ``run`` for a person.
        OPTIONS: dataclasses of the library whose fields are options too: ``run`` receives one of each after
            the arguments.
        SKIP: fields of ``OPTIONS`` that are no options.
        parse: map words to the arguments of ``run`` and whether to print JSON, where dataclasses do not
            describe the options.
        exit_code: map the result of ``run`` to an exit code.
    """

    Arguments: type[Any]
    EXAMPLE: str
    run: Callable[..., Any]
    text: Callable[[Any], str]
    OPTIONS: tuple[type[Any], ...] = ()
    SKIP: tuple[str, ...] = ()
    parse: Callable[[Sequence[str]], tuple[Any, bool]] | None = None
    exit_code: Callable[[Any], int] = lambda result: 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    0 is success and 2 a mistake of the caller. 1 is an internal error, or a negative answer, as from
    ``check`` with problems. 130 is Ctrl-C, and 143 is ``train`` after SIGTERM.
    """
    verb, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    if verb == "--version":
        return _print("covpool", f"covpool {__version__}")
    if verb in ("-h", "--help"):
        return _print("covpool", _help())
    if not verb:
        print(_help(), file=sys.stderr)
        return 2
    if verb not in VERBS:
        hint = did_you_mean(verb, (*VERBS, "--help", "--version")) or "; covpool --help lists them"
        return _complain("covpool", f"{verb!r} is not a verb{hint}")
    if {"-h", "--help", "--help-all"} & {*rest}:
        try:
            text = long_help(verb) if "--help-all" in rest else short_help(verb)
        except ModuleNotFoundError as error:  # in a checkout
            return _complain(f"covpool {verb}", explained(error, VERBS[verb].extra)[0])
        return _print(f"covpool {verb}", text)
    if arguments is None:  # otherwise the process belongs to another program
        keep_freed_memory()
    return _run(verb, rest)


def long_help(verb: str) -> str:
    """Return the help of a verb with all options.

    The wheel has it in ``help.txt``, so that it is printed without importing torch. The build writes this
    file. A checkout does not have it, and makes the help from the options.
    """
    text = package_text("covpool.cli", "help.txt")
    if not text:
        return help_of(verb)
    return text.partition(f"{HELP_MARK}{verb}\n")[2].partition(HELP_MARK)[0].strip("\n")


def help_of(verb: str) -> str:
    """Return the help of a verb from its options, 100 columns wide."""
    with (
        mock.patch.dict(os.environ, {"COLUMNS": "102"}),
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.suppress(SystemExit),
    ):
        _output(verb, ["--help"])
    return printed.getvalue().strip()


def short_help(verb: str) -> str:
    """Return the help of a verb without its groups of ``more options``, and say how to see them."""
    groups = long_help(verb).split("\n\n")
    kept = [group for group in groups if not group.startswith("more options")]
    if len(kept) < len(groups):
        kept.insert(-2, f"covpool {verb} --help-all lists all options.")
    return "\n\n".join(kept)


def command_of(verb: str) -> Command:
    """Import the file of a verb, and return its command."""
    name = verb.replace("-", "_")
    module = importlib.import_module(f"covpool.cli.{VERBS[verb].file or name}")
    return cast(Command, getattr(module, name))


def _run(verb: str, arguments: list[str]) -> int:
    command = f"covpool {verb}"
    try:
        quiet = "--quiet" in arguments
        with trust_rows(bool({"--trust-rows", "--trust_rows"} & {*arguments})), running(quiet=quiet):
            output, code = _output(verb, arguments)
        if _is_first():
            code = _print(command, output) or code
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        sentence, code = explained(error, VERBS[verb].extra)
        if code == 1 or "--debug" in arguments:
            traceback.print_exception(error)
        if sentence:
            _complain(command, _as_typed(sentence, arguments))
    if code in STOPPED and _is_first():
        _complain(command, _how_to_resume(verb, arguments))
    return code


def _output(verb: str, arguments: list[str]) -> tuple[str, int]:
    if verb in OPTIONS_NEED_TORCH and "--help" not in arguments:
        announce_loading(f"covpool {verb}")
    command = command_of(verb)
    if command.parse is not None:
        parsed, as_json = command.parse(arguments)
        announce_loading(f"covpool {verb}")
        result = command.run(parsed)
    else:
        from covpool.cli.parser import parse_several  # jsonargparse may be missing

        kinds = (command.Arguments, *command.OPTIONS)
        values, as_json = parse_several(f"covpool {verb}", kinds, arguments, command.EXAMPLE, command.SKIP)
        result = command.run(*values)
    if as_json:
        return json.dumps(dataclasses.asdict(result), indent=2, default=os.fspath), command.exit_code(result)
    return command.text(result), command.exit_code(result)


def _print(command: str, text: str) -> int:
    """Write to standard output, and return the exit code: not 0 if the output did not accept the text."""
    # Names of files and classes may hold control characters, and bytes that are no text.
    text = "\n".join(printable(line, most=None) for line in text.split("\n"))
    try:
        print(text, flush=True)
    except BrokenPipeError:  # head or less has read enough; without this Python would flush again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        return _complain(command, explained(error, "")[0])
    return 0


def _complain(command: str, message: str) -> int:
    # The message may quote a file.
    print(f"{command}: {printable(' '.join(message.split()), most=None)}", file=sys.stderr)
    return 2


def _as_typed(sentence: str, arguments: list[str]) -> str:
    """Return an error about an argument of Python with the option that the caller typed for it."""
    name, _, rest = sentence.partition(" ")
    option = f"--{name.replace('_', '-').lower()}"
    typed = {word.partition("=")[0].replace("_", "-") for word in arguments}
    return f"{option} {rest}" if option in typed else sentence


def _how_to_resume(verb: str, arguments: list[str]) -> str:
    if not VERBS[verb].resumes:
        return "stopped"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return "stopped, and the work so far is saved; rerun the same torchrun command to resume"
    words = shlex.join(["covpool", verb, *arguments])
    return f"stopped, and the work so far is saved; to resume: {words}"


def _is_first() -> bool:
    """Return whether this process prints; under torchrun only the first one does."""
    return os.environ.get("RANK", "0") == "0"


def _help() -> str:
    width = max(map(len, PROJECT))
    lines = [
        f"  {(title if i == 0 else '').ljust(width)}  {name.ljust(9)}  {verb.summary}"
        for title, verbs in PROJECT.items()
        for i, (name, verb) in enumerate(verbs.items())
    ]
    return "\n".join(
        [
            "usage: covpool [--version] VERB ...; VERB --help lists its options",
            "Global covariance pooling for image backbones, in the order of a project.",
            *lines,  # indented, without blank lines around them: all must fit on a terminal
        ]
    )


# Advice on errors of the disk.
REMEDIES = {
    errno.ENOSPC: "free some space, and rerun the command",
    errno.EDQUOT: "free some space, and rerun the command",
    errno.EROFS: "use another folder",
    errno.EACCES: "change its permissions, or use another folder",
    errno.EPERM: "change its permissions, or use another folder",
    errno.ENOTDIR: "a file is where a folder should be; use another folder",
    errno.EEXIST: "a file is where a folder should be; use another folder",
    errno.EISDIR: "a folder is where a file should be; give a file",
    errno.EMFILE: "raise the limit of open files (ulimit -n), or use fewer --workers",
}
# Words of the RuntimeError with which torch reports that the CPU's memory is full.
NO_MEMORY = ("can't allocate memory", "not enough memory", "Cannot allocate memory", "backend out of memory")
# Words that torch's errors of a full GPU begin with.
GPUS = ("CUDA", "HIP", "MPS", "XPU")


def explained(error: Exception, extra: str) -> tuple[str, int]:
    """Return a sentence and an exit code for an error.

    The code is 2 for a :class:`~covpool.errors.CovpoolError` and for errors of the environment: a missing
    package, the disk, the network or the memory. It is 1 for all others, which are bugs. The sentence is
    empty where another process prints it.

    Args:
        error: the error that ended a verb.
        extra: the extra that has the verb's dependencies.
    """
    if isinstance(error, ReportedByFirstError):
        return "", 2
    if isinstance(error, Interrupted):  # one training run of several, as in probe
        return str(error), error.exit_code
    if isinstance(error, CovpoolError):
        return str(error), 2
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("covpool"):
        missing = (error.name or "").partition(".")[0]
        return f"{missing} is missing: pip install '{f'covpool[{extra}]' if extra else missing}'", 2
    if _is_memory(error):
        where = "GPU" if any(kind in str(error) for kind in GPUS) else "machine"
        return f"the {where} does not have enough memory: use a smaller batch size or smaller images", 2
    if isinstance(error, RuntimeError) and "DataLoader worker" in str(error):
        return WORKER_DIED, 2  # torch raises it wherever the program is when the worker dies
    if isinstance(error, OSError):
        return _of_the_disk(error) if error.strerror else str(error), 2
    text = f"{type(error).__name__}: {error}"
    return f"internal error: {text}; please report it, with the traceback above", 1


def _is_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError | OSError) and any(words in str(error) for words in NO_MEMORY)


def _of_the_disk(error: OSError) -> str:
    text = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
    if error.errno == errno.ENOENT and isinstance(error.filename, str | os.PathLike):
        return text + named_alike(os.fsdecode(error.filename))
    remedy = REMEDIES.get(error.errno or 0)
    return f"{text}: {remedy}" if remedy else text


def named_alike(path: str) -> str:
    """Return what a path that does not exist may mean, as the end of a sentence; nothing if that is unclear.

    It is a URL with one slash, or a neighbor of the first part of the path that does not exist.
    """
    if url := re.fullmatch(r"(\w{2,}):/([^/].*)", path):
        return f": did you mean {url[1]}://{url[2]}?"
    missing = Path(path)
    try:
        while not missing.parent.exists():
            missing = missing.parent
        return did_you_mean(missing.name, [neighbor.name for neighbor in missing.parent.iterdir()])
    except OSError:
        return ""


# Settings of malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4


def keep_freed_memory() -> bool:
    """Ask the C library to keep freed memory, for this process and those that it forks.

    glibc returns a freed block above 32 MB to the kernel at once, and the activations of a batch are such
    blocks. The kernel has to find and zero their pages again: a third of the time of EfficientNet-Lite2 at
    448 pixels on a CPU. Keeping them makes that process a quarter larger; it does not grow further.

    The setting is for a whole process, so only a program may change it, not a library.

    Returns:
        Whether the setting was made. Other C libraries have none, and a setting of the user stays.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc." in tunables or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS and Windows
        return False
    # Blocks of any size come from the heap, and its end is never returned.
    return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, -1))
