"""The command line itself: verbs, help, errors and exit codes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

import covpool
from covpool.cli.main import VERBS, Command, _output, main
from covpool.errors import CovpoolError, UsageError, UsageTypeError


@dataclasses.dataclass(frozen=True)
class Greeting:
    """Greet.

    Attributes:
        name: whom.
        loud_voice: how often to shout.
        mood: the ``tone``.
        share: of the day.
        is_late: at night.
    """

    name: str
    loud_voice: int = 1
    mood: Literal["kind", "curt"] | int | None = None
    share: float = 0.5
    is_late: bool = False


def pretend(monkeypatch: pytest.MonkeyPatch, run: Any, **more: Any) -> None:
    """Add a verb ``greet`` to the table."""
    greet = Command(Greeting, "covpool greet Li", run, lambda greeting: f"hello {greeting.name}", **more)
    monkeypatch.setitem(sys.modules, "covpool.cli.greet", SimpleNamespace(greet=greet))
    monkeypatch.setitem(VERBS, "greet", VERBS["plan"]._replace(file=""))


def process(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300)


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out and verb.summary in out for name, verb in VERBS.items())


def test_help_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80


def test_help_and_version_do_not_wait_for_torch() -> None:
    script = """
import sys
from covpool.cli.main import main
assert main(["--help"]) == main(["--version"]) == 0
assert main(["trian"]) == 2
assert "torch" not in sys.modules
"""
    assert process("-c", script).returncode == 0


def test_nothing_to_do_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.startswith("usage: covpool")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"covpool {covpool.__version__}\n"


def test_help_of_a_verb(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pretend(monkeypatch, None)
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as exit_:
        _output("greet", ["--help"])
    assert exit_.value.code == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "Greet." in lines
    assert "name whom" in lines
    assert "--loud-voice LOUD_VOICE" in lines
    assert "how often to shout (default: 1)" in lines
    assert "--mood MOOD the tone" in lines
    assert lines[-2:] == ["example:", "covpool greet Li"]


@pytest.mark.parametrize("option", ["--loud-voice=3", "--loud_voice=3"])
def test_an_option_by_hyphen_or_underscore(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, lambda greeting: greeting)
    assert main(["greet", "Li-Wei--x", option, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "name": "Li-Wei--x",
        "loud_voice": 3,
        "mood": None,
        "share": 0.5,
        "is_late": False,
    }
    assert main(["greet", "Li-Wei--x"]) == 0
    assert capsys.readouterr().out == "hello Li-Wei--x\n"


@pytest.mark.parametrize(
    ("words", "is_late"),
    [
        ("Li --is-late", True),
        ("--is-late Li", True),
        ("--is-late --json Li", True),
        ("Li --is-late true", True),
        ("Li --is-late=true", True),
        ("Li --is-late false", False),
        ("--is-late=false Li", False),
        ("Li", False),
    ],
)
def test_a_flag_needs_no_value(
    words: str, is_late: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, lambda greeting: greeting)
    assert main(["greet", *words.split(), "--json"]) == 0
    greeting = json.loads(capsys.readouterr().out)
    assert (greeting["name"], greeting["is_late"]) == ("Li", is_late)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["shout"], "covpool: 'shout' is not a verb; covpool --help lists them"),
        (["help"], "covpool: 'help' is not a verb: did you mean --help?"),
        (["-v"], "covpool: '-v' is not a verb: did you mean --version?"),
        (["GREET"], "covpool: 'GREET' is not a verb: did you mean greet?"),
        (["great"], "covpool: 'great' is not a verb: did you mean greet?"),
        (["greet"], "covpool greet: the following arguments are required: name; example: covpool greet Li"),
        (
            ["greet", "Li", "--foo", "3"],
            "covpool greet: unrecognized arguments: --foo 3; covpool greet --help lists the options",
        ),
        (
            ["greet", "Li", "--loud", "3"],
            "covpool greet: unrecognized arguments: --loud 3: did you mean --loud-voice?",
        ),
        (
            ["greet", "Li", "--loud_vice=3"],
            "covpool greet: unrecognized arguments: --loud-vice=3: did you mean --loud-voice?",
        ),
        (["greet", "Li", "--loud-voice"], "covpool greet: --loud-voice needs a value: a whole number"),
        (["greet", "Li", "--loud-voice", "x"], "covpool greet: --loud-voice takes a whole number; got x"),
        (
            ["greet", "Li", "--mood", "sad"],
            "covpool greet: --mood takes kind, curt or a whole number; got sad",
        ),
        (["greet", "Li", "--share", "x"], "covpool greet: --share takes a number; got x"),
    ],
)
def test_a_mistake_on_the_command_line(
    arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, None)
    assert main(arguments) == 2
    assert capsys.readouterr() == ("", f"{sentence}\n")


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (UsageError("it is\n  too late"), 2, "it is too late"),
        (UsageTypeError("it must be an int"), 2, "it must be an int"),
        (CovpoolError("no"), 2, "no"),
        (FileNotFoundError(2, "No such file or directory", "a.pth"), 2, "a.pth: No such file or directory"),
        (OSError("disk on fire"), 2, "disk on fire"),
        (
            OSError(28, "No space left on device", "a.csv"),
            2,
            "a.csv: No space left on device: free some space, and rerun the command",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
            2,
            "the GPU does not have enough memory: use a smaller batch size or smaller images",
        ),
        (ModuleNotFoundError("no", name="timm"), 2, "timm is missing: pip install 'covpool[models]'"),
        (
            MemoryError(),
            2,
            "the machine does not have enough memory: use a smaller batch size or smaller images",
        ),
    ],
)
def test_a_mistake_is_a_sentence(
    error: Exception,
    code: int,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(arguments: Greeting) -> None:
        raise error

    pretend(monkeypatch, run)
    assert main(["greet", "Li"]) == code
    assert capsys.readouterr() == ("", f"covpool greet: {sentence}\n")
    assert main(["greet", "Li", "--debug"]) == code
    first, *_, last = capsys.readouterr().err.splitlines()
    assert (first, last) == ("Traceback (most recent call last):", f"covpool greet: {sentence}")


@pytest.mark.parametrize("debug", [[], ["--debug"]])
@pytest.mark.parametrize(
    "error",
    [
        TypeError("unexpected keyword"),
        ValueError("too many values to unpack"),
        KeyError("top1"),
        RuntimeError("singular"),
        ModuleNotFoundError("no", name="covpool.x"),
    ],
)
def test_a_bug_shows_its_traceback(
    error: Exception, debug: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(arguments: Greeting) -> None:
        raise error

    pretend(monkeypatch, run)
    assert main(["greet", "Li", *debug]) == 1
    out, err = capsys.readouterr()
    first, *between, last = err.splitlines()
    assert not out
    assert first == "Traceback (most recent call last):"
    assert any(line.endswith("in run") for line in between)
    message = f"{type(error).__name__}: {error}"
    assert last == f"covpool greet: internal error: {message}; please report it, with the traceback above"


@pytest.mark.parametrize("as_json", [False, True])
def test_a_verb_may_have_an_exit_code(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, lambda greeting: greeting, exit_code=lambda greeting: greeting.loud_voice)
    assert main(["greet", "Li", "--loud-voice", "7", *["--json"] * as_json]) == 7
    assert "Li" in capsys.readouterr().out


def test_the_first_of_several_processes_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, lambda greeting: greeting)
    for rank, spoken in (("0", "hello Li\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        assert main(["greet", "Li"]) == 0
        assert capsys.readouterr() == (spoken, "")


@pytest.mark.parametrize(
    ("resumes", "sentence"),
    [
        (False, "stopped"),
        (True, "stopped, and the work so far is saved; to resume: covpool greet 'Li Wei' --share 0.2"),
    ],
)
def test_after_an_interruption(
    resumes: bool, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(arguments: Greeting) -> None:
        raise KeyboardInterrupt

    pretend(monkeypatch, run)
    monkeypatch.setitem(VERBS, "greet", VERBS["plan"]._replace(file="", resumes=resumes))
    assert main(["greet", "Li Wei", "--share", "0.2"]) == 130
    assert capsys.readouterr() == ("", f"covpool greet: {sentence}\n")


@pytest.mark.slow
def test_a_missing_package_is_named_with_its_extra() -> None:
    script = """
import sys
from covpool.cli.main import main
sys.modules["timm"] = None
print(main(["plan", "resnet18"]))
del sys.modules["covpool.cli.parser"]
sys.modules["jsonargparse"] = None
print(main(["plan", "resnet18"]))
"""
    result = process("-c", script)
    assert result.stderr.splitlines() == [
        "covpool plan: loading torch",
        "covpool plan: timm is missing: pip install 'covpool[models]'",
        "covpool plan: jsonargparse is missing: pip install 'covpool[models]'",
    ]
    assert result.stdout.splitlines() == ["2", "2"]
    assert result.returncode == 0


@pytest.mark.slow
def test_a_process() -> None:
    good = process("-m", "covpool", "plan", "test_resnet", "--dim", "24", "--batch-size", "8", "--json")
    assert good.returncode == 0, good.stderr
    values = json.loads(good.stdout)
    assert values["config"]["backbone"] == "test_resnet"
    assert values["batch_size"] == 8
    assert values["head"]["parameters"] == 1000 * 301


@pytest.mark.slow
def test_a_process_with_a_mistake() -> None:
    bad = process("-m", "covpool", "plan", "test_resnet", "--batch", "8")
    assert bad.returncode == 2
    assert (bad.stdout, bad.stderr) == (
        "",
        "covpool plan: unrecognized arguments: --batch 8: did you mean --batch-size?\n",
    )


def test_a_reader_that_has_seen_enough() -> None:
    # Like `covpool plan | head`, with a faster verb.
    script = """
import sys
from covpool.cli import main, models
models.convert = models.convert._replace(run=lambda arguments: None, text=lambda result: "x" * 10**6)
sys.exit(main.main(["convert", "a", "b", "--quiet"]))
"""
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    # The first line depends on whether torch is slow to load.
    assert child.stderr.read() in (b"", b"covpool convert: loading torch\n")
    child.stderr.close()
    assert child.wait(timeout=300) == 141
