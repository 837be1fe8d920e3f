"""Mutated files for every reader of untrusted files: each is read, or refused with a sentence.

A case must not raise any other error, take longer than ``SECONDS``, need more memory than ``MEMORY``, write
outside the output folder, open a connection or start a program. Cases run one after another in a forked
process, so that a crash of a C library is found too. A case depends only on its number, which a failure
reports. In special cases, a file is replaced by a link, a pipe, a folder or a file of a huge size. In slow
cases, a server sends the files, slowly or with lies.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import pytest
import torch

from covpool.errors import CovpoolError
from covpool.storage import address, remote
from covpool.storage.remote import Requests, limited
from tests.data.servers import Liar
from tests.entrances import ENTRANCES, Entrance, Files

FEW, MANY = 50, 2000
# Limits per case: CPU time, time, and memory above that of the process before.
SECONDS, WAITING, MEMORY = 10, 20, 2 << 30
PRECIOUS = "years of work"
Kind = Literal["mutated", "special", "slow"]
SERVED = [name for name, entrance in ENTRANCES.items() if entrance.read_url]
# Limits of requests to the slow server. Each limit is short, so that thousands of cases wait for all of them.
REQUESTS, TABLES, PAUSES = Requests(0.2, 0.2, 0.1, 1, 1000), 2, (0.01,)

FORBIDDEN = ("socket.connect", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork")
# Audit events that change files, with the index of the path argument.
CHANGING = {"os.mkdir": 0, "os.rename": 1, "os.remove": 0, "os.rmdir": 0, "os.link": 1, "os.symlink": 1}


class OutOfTimeError(BaseException):
    """A BaseException, so that only the test catches it."""


def watch(inside: str, port: int) -> list[str]:
    """Return a list that grows when anything writes outside a folder, connects, or starts a program.

    Connections to a port of this machine are allowed.
    """
    seen: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in FORBIDDEN and not (event == "socket.connect" and arguments[1] == ("127.0.0.1", port)):
            seen.append(f"it called {event}{arguments!r}")
            raise PermissionError(seen[-1])
        path = arguments[CHANGING[event]] if event in CHANGING else None
        if event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            path = arguments[0]
        if path is None or isinstance(path, int) or path == os.devnull:
            return
        full = os.path.realpath(os.path.dirname(os.path.join(os.getcwd(), os.fsdecode(path))))
        if full != inside and not full.startswith(f"{inside}/"):
            seen.append(f"it wrote to {path!r}, outside {inside}")
            raise PermissionError(seen[-1])

    sys.addaudithook(hook)
    return seen


def make_special(path: Path, precious: Path, chance: random.Random) -> None:
    """Replace a file by one that is not regular, or that claims a huge size."""
    data = path.read_bytes()
    path.unlink()
    match chance.randrange(8):
        case 0:
            os.mkfifo(path)
        case 1:
            path.mkdir()
        case 2:
            os.mkfifo(path.parent / "pipe")
            path.symlink_to("pipe")
        case 3:
            path.symlink_to(chance.choice(("/dev/zero", "/dev/stdin", "/proc/self/maps")))
        case 4:
            path.symlink_to(chance.choice((path.name, "nothing", "..", "/")))
        case 5:
            path.symlink_to(precious)
        case _:  # a sparse file takes no space
            path.write_bytes(data)
            os.truncate(path, chance.choice((len(data) + 1, 1 << 20, 1 << 31, 1 << 40)))


def read_slowly(server: Liar, read_url: Callable[[str], object], folder: Path) -> None:
    """Read a folder from the server."""
    server.serve(folder, folder.name)
    os.environ["XDG_CACHE_HOME"] = str(folder)
    with limited(REQUESTS):
        read_url(f"{server.url}/{folder.name}")


def slow_server(place: str) -> Liar:
    """Start a server, and shorten the waits for it."""
    server = Liar(Path(place))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for module in (address, remote):
        vars(module).update(pauses_before=lambda retries: PAUSES)
    vars(remote).update(TABLE_TIMEOUTS=TABLES, MAX_WAIT_SECONDS=0.02)
    return server


def run_cases(name: str, first: int, last: int, place: str, pipe: Connection, kind: Kind) -> None:
    """Send the number of each case before it runs, and a sentence if it fails."""
    precious = Path(f"{place}-precious")
    precious.write_text(PRECIOUS)
    entrance = ENTRANCES[name]
    samples = entrance.samples()
    entrance.read(write_files(samples[0], Path(place, "sample")))  # valid files, which trigger the imports
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, resource.RLIM_INFINITY))
    for number in (signal.SIGVTALRM, signal.SIGALRM):
        signal.signal(number, out_of_time)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # a forked process has only one thread
    faulthandler.disable()  # the parent reports a crash
    server = slow_server(place) if kind == "slow" else None
    seen = watch(os.path.realpath(place), server.server_port if server else 0)
    for number in range(first, last):
        pipe.send(number)
        chance = random.Random(f"{name} {number}")
        files = dict(chance.choice(samples))
        files = files if kind == "slow" else entrance.mutate(files, chance)
        folder = write_files(files, Path(place, str(number)))
        if kind == "special":
            make_special(folder / chance.choice(sorted(files)), precious, chance)
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
        signal.setitimer(signal.ITIMER_REAL, WAITING)
        try:
            if server and entrance.read_url:
                read_slowly(server, entrance.read_url, folder)
            else:
                entrance.read(folder)
        except (CovpoolError, OSError) as error:
            if len(str(error)) > 200_000:
                pipe.send(f"its message has {len(str(error))} characters")
        except BaseException:
            pipe.send(traceback.format_exc(limit=-6))
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if precious.read_text() != PRECIOUS:
            pipe.send("it wrote through a link")
        while seen:
            pipe.send(seen.pop())
    pipe.send("end")
    os._exit(0)


def out_of_time(number: int, frame: FrameType | None) -> None:
    raise OutOfTimeError(f"it took longer than {SECONDS} s of the CPU, or {WAITING} s")


def write_files(files: Files, folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def fuzz(name: str, first: int, last: int, place: Path, kind: Kind = "mutated") -> None:
    """Run some cases of an entrance. A crash or a hang counts as a failure of the last case sent."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=run_cases, args=(name, first, last, str(place), sender, kind))
    process.start()
    sender.close()
    case: object = "none"
    failures = []
    while receiver.poll(6 * SECONDS + (120 if case == "none" else 0)):
        try:
            message = receiver.recv()
        except EOFError:
            break
        if message == "end":
            case = message
            break
        if isinstance(message, int):
            case = message
        else:
            failures.append(f"case {case}: {message}")
    process.kill()
    process.join()
    if case != "end":
        failures.append(f"case {case}: the process ended with {process.exitcode}, or took too long")
    assert not failures, "\n".join([f"{len(failures)} failures in {last - first} cases", *failures[:5]])


@pytest.mark.parametrize("name", ENTRANCES)
def test_mutated_files_are_read_or_refused(name: str, tmp_path: Path) -> None:
    fuzz(name, 0, FEW, tmp_path / "cases")


@pytest.mark.parametrize("name", ENTRANCES)
def test_special_files_are_read_or_refused(name: str, tmp_path: Path) -> None:
    fuzz(name, 0, FEW, tmp_path / "cases", kind="special")


@pytest.mark.slow
@pytest.mark.parametrize("name", ENTRANCES)
def test_many_special_files_are_read_or_refused(name: str, tmp_path: Path) -> None:
    fuzz(name, FEW, FEW + MANY, tmp_path / "cases", kind="special")


@pytest.mark.parametrize("name", SERVED)
def test_files_from_a_slow_server_are_read_or_refused(name: str, tmp_path: Path) -> None:
    fuzz(name, 0, FEW // 5, tmp_path / "cases", kind="slow")


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_many_files_from_a_slow_server_are_read_or_refused(name: str, tmp_path: Path) -> None:
    fuzz(name, FEW, FEW + MANY, tmp_path / "cases", kind="slow")


@pytest.mark.slow
@pytest.mark.parametrize("name", ENTRANCES)
def test_many_mutated_files_are_read_or_refused(name: str, tmp_path: Path) -> None:
    fuzz(name, FEW, FEW + MANY, tmp_path / "cases")


def hang(folder: Path) -> None:
    while True:
        pass


@pytest.mark.parametrize(
    ("read", "sentence"),
    [
        (lambda folder: {}["key"], "case 0: .*KeyError"),
        (hang, "case 0: .*OutOfTimeError"),
        (lambda folder: time.sleep(60), "case 0: .*OutOfTimeError"),
        (lambda folder: Path(f"{folder.parent}-precious").write_text(""), "case 0: it wrote"),
        (lambda folder: bytes(3 << 30), "case 0: .*MemoryError"),
        (lambda folder: folder.parents[1].joinpath("x").write_text(""), "case 0: it wrote to .*outside"),
        (lambda folder: os.system("true"), r"case 0: it called os\.system"),
        (lambda folder: os.kill(os.getpid(), signal.SIGSEGV), "case 0: the process ended with -11"),
    ],
    ids=["another error", "hang", "wait", "link", "memory", "write", "program", "crash"],
)
def test_a_bad_case_is_noticed(
    read: Callable[[Path], object], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_case(folder: Path) -> None:
        if folder.name != "sample":
            read(folder)

    entrance = Entrance(lambda: [{"file": b"x"}], lambda files, chance: files, read_case)
    monkeypatch.setitem(ENTRANCES, "bad", entrance)
    monkeypatch.setattr("tests.test_fuzz.SECONDS", 0.5)
    monkeypatch.setattr("tests.test_fuzz.WAITING", 1)
    with pytest.raises(AssertionError, match=f"(?s){sentence}"):
        fuzz("bad", 0, 1, tmp_path / "cases")
