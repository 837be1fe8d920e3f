"""Progress: a bar on a terminal, lines in a log, neither too often, and names without control sequences."""

from __future__ import annotations

import builtins
import io
import re
import threading
from typing import Any

import pytest

from covpool import terminal
from covpool.terminal import NamedProgress, Progress, running


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list whose last number is the current time."""
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[-1])
    return now


def count(show: Progress, clock: list[float], seconds: float, before: int = 0) -> None:
    """Count from ``before`` to 20, with the figures of a training step."""
    show.begin(before)
    for done in range(before + 1, 21):
        clock.append(clock[-1] + seconds)
        show(done, 20, f"step {done} of 20", "loss 0.200, 1,234 img/s, lr 0.05")


def shown(stream: io.StringIO) -> list[str]:
    """Return the text of each update, without control sequences and bars."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", stream.getvalue())
    return [line for line in re.sub(r"[━╸╺]\n*", "", plain).replace("\r", "\n").splitlines() if line.strip()]


def test_a_terminal_shows_a_bar_and_clears_it(clock: list[float]) -> None:
    with Progress("images", stream := Terminal()) as show:
        for done, now in ((10, 100.05), (20, 101.0), (21, 101.05), (50, 102.5)):
            clock.append(now)
            show(done, 100)
    text = " ".join(shown(stream))
    assert "20 of 100 images, 4 s left" in text
    assert "50 of 100 images, 2 s left" in text
    assert "10 of" not in text
    assert "21 of" not in text
    assert "50 %" in text
    assert "━" in stream.getvalue()
    assert stream.getvalue().endswith("\x1b[1A\x1b[2K")


def test_the_bar_is_not_drawn_more_often_than_an_eye_can_see(clock: list[float]) -> None:
    with Progress(stream=(stream := Terminal())) as show:
        count(show, clock, 0.051)
    assert 9 <= stream.getvalue().count("img/s") <= 12  # rich draws it again at the end


def test_narrow_terminals_keep_the_time_that_is_left(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    with Progress(stream=(stream := Terminal())) as show:
        count(show, clock, 1.0)
    text = " ".join(shown(stream))
    assert "10 s left" in text
    assert "lr" not in text


@pytest.mark.parametrize("color", ["", "1"])
def test_a_log_gets_a_line_every_30_seconds(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, color: str
) -> None:
    monkeypatch.setenv("FORCE_COLOR", color)  # does not turn a file into a terminal
    with Progress("images", stream := io.StringIO()) as show:
        for done, now in ((10, 101.0), (2000, 140.0), (2010, 141.0), (10_000, 540.0), (20_000, 580.0)):
            clock.append(now)
            show(done, 1_000_000)
        show.line("epoch 2: validation top-1 45.0 %")
    assert stream.getvalue() == (
        "2,000 of 1,000,000 images, 5 h 32 min left\n"
        "10,000 of 1,000,000 images, 13 h 45 min left\n"
        "20,000 of 1,000,000 images, 6 h 39 min left\n"  # from the recent speed
        "epoch 2: validation top-1 45.0 %\n"
    )


def test_without_rich_a_terminal_gets_lines_too(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def no_rich(name: str, *more: Any) -> Any:
        if name.startswith("rich"):
            raise ModuleNotFoundError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", no_rich)
    with Progress("images", stream := Terminal()) as show:
        clock.append(140.0)
        show(5, 10)
    assert stream.getvalue() == "5 of 10 images, 40 s left\n"


def test_the_time_left_ignores_steps_before_a_restart(clock: list[float]) -> None:
    with Progress(stream=(stream := io.StringIO())) as show:
        count(show, clock, 100.0, before=8)
    first = stream.getvalue().splitlines()[0]
    assert first == "step 9 of 20, 18 min 20 s left, loss 0.200, 1,234 img/s, lr 0.05"  # 11 steps of 100 s


def test_silent_progress_prints_nothing(clock: list[float]) -> None:
    for stream in (Terminal(), io.StringIO()):
        with Progress(stream=stream, silent=True) as show:
            count(show, clock, 60.0)
            show.line("not printed")
        assert stream.getvalue() == ""


def test_quick_work_leaves_nothing_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("images") as show:
        show(5, 5)
    assert capsys.readouterr() == ("", "")


def test_a_log_shows_the_start_of_a_stage_after_silence(clock: list[float]) -> None:
    stream = io.StringIO()
    with running(quiet=False):
        for seconds, what in ((0.5, "quick"), (2.5, "slow"), (1.0, "next")):
            clock.append(clock[-1] + seconds)
            with Progress(what, stream) as show:
                show(0, 3)
                show(1, 3)
    assert stream.getvalue() == "0 of 3 slow\n"
    with running(quiet=True), Progress("images", stream) as show:
        clock.append(clock[-1] + 100)
        show(0, 3)
    assert stream.getvalue() == "0 of 3 slow\n"


def test_the_bar_is_cleared_after_an_error() -> None:
    stream = Terminal()
    show = Progress("images", stream)
    show(0, 5)
    with pytest.raises(KeyError), show:
        raise KeyError
    assert stream.getvalue().endswith("\x1b[1A\x1b[2K")


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_lines_show_names_as_they_are_and_obey_nothing(stream: io.StringIO) -> None:
    with Progress("images", stream) as show:
        show(0, 10)
        show.line("bad: [bold]a[/bold]\x1b[2J/b.jpg\nand [red]more")
    assert "bad: [bold]a[/bold]?[2J/b.jpg" in stream.getvalue()
    assert "and [red]more\n" in stream.getvalue()
    assert "\x1b[2J" not in stream.getvalue()


def test_no_thread_is_left_for_workers_to_be_forked_from(clock: list[float]) -> None:
    before = threading.active_count()
    with Progress(stream=Terminal()) as show:
        count(show, clock, 1.0)
        assert threading.active_count() == before


def test_each_name_has_its_own_count(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal.sys, "stderr", stream := Terminal())
    with NamedProgress() as show:
        show("images", 0, 4)
        clock.append(102.0)
        show("images", 2, 4)
        show.log("features take 1.00 MB")
        show("heads", 0, 3)
    text = "\n".join(shown(stream))
    assert "0 of 4 images" in text
    assert "2 of 4 images, 2 s left" in text
    assert "features take 1.00 MB\n" in stream.getvalue()
    assert "0 of 3 heads" in text


@pytest.mark.parametrize(("left", "text"), [(0.4, "0 s"), (59.6, "1 min 0 s"), (3599.7, "1 h 0 min")])
def test_durations(left: float, text: str) -> None:
    assert terminal.duration(left) == text
