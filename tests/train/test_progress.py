"""A bar on a terminal, lines in a log, nothing from other ranks, and nothing that a terminal obeys."""

from __future__ import annotations

import io
import re
import threading

import pytest

from covpool.train import progress
from covpool.train.progress import TrainingProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its last number is the time."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[-1])
    return now


def train(tell: TrainingProgress, clock: list[float], seconds: float, done: int = 0) -> None:
    """Two epochs of ten steps, from some step of the first."""
    for epoch in range(2):
        tell.start(epoch, 2, 10, done if epoch == 0 else 0)
        for step in range(done if epoch == 0 else 0, 10):
            clock.append(clock[-1] + seconds)
            tell.step(2 / (step + 1), 0.1 * step, 1234.4, 0.05)


def seen(stream: io.StringIO) -> list[str]:
    """What the bar said, look by look, without what moves the cursor and changes colours."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", stream.getvalue())
    return [line for line in re.sub(r"[━╸╺]\n*", "", plain).replace("\r", "\n").splitlines() if line.strip()]


def test_on_a_terminal(clock: list[float]) -> None:
    with TrainingProgress(stream=(stream := Terminal())) as tell:
        train(tell, clock, 1.0)
    text = " ".join(seen(stream))
    assert "epoch 1/2" in text
    assert "epoch 2/2" in text
    assert "loss 0.200" in text
    assert "top-1 90.0 %" in text
    assert "1,234 img/s" in text
    assert "lr 0.05" in text
    assert "0:10 min left" in text  # after the first epoch
    assert "100 %" in text
    assert stream.getvalue().endswith("\x1b[1A\x1b[2K")  # it is cleared away


def test_the_bar_is_not_drawn_more_often_than_an_eye_can_see(clock: list[float]) -> None:
    with TrainingProgress(stream=(stream := Terminal())) as tell:
        train(tell, clock, 0.051)
    assert 9 <= stream.getvalue().count("img/s") <= 12  # once more at the end


def test_narrow_terminals_keep_the_time_that_is_left(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with TrainingProgress(stream=(stream := Terminal())) as tell:
        train(tell, clock, 1.0)
    text = " ".join(seen(stream))
    assert "0:10 min left" in text
    assert "lr" not in text


def test_in_a_log(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes no terminal of a file
    with TrainingProgress(stream=(stream := io.StringIO())) as tell:
        train(tell, clock, 20.0)
        tell.line("epoch 2: validation top-1 45.0 %")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 11  # every other step, and one
    assert lines[0] == (
        "epoch 1/2, step 2 of 10, loss 1.000, top-1 10.0 %, 1,234 img/s, lr 0.05, 6:00 min left"
    )
    assert lines[-1] == "epoch 2: validation top-1 45.0 %"
    assert "\x1b" not in stream.getvalue()


def test_the_time_left_knows_nothing_of_steps_before_a_restart(clock: list[float]) -> None:
    with TrainingProgress(stream=(stream := io.StringIO())) as tell:
        train(tell, clock, 100.0, done=8)
    assert "step 9 of 10" in stream.getvalue().splitlines()[0]
    assert "18 min left" in stream.getvalue().splitlines()[0]  # 11 steps of 100 s


def test_other_ranks_say_nothing(clock: list[float]) -> None:
    for stream in (Terminal(), io.StringIO()):
        with TrainingProgress(1, stream) as tell:
            train(tell, clock, 60.0)
            tell.line("not said")
        assert stream.getvalue() == ""


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_lines_show_names_as_they_are_and_obey_nothing(stream: io.StringIO) -> None:
    with TrainingProgress(stream=stream) as tell:
        tell.start(0, 1, 10)
        tell.line("bad: [bold]a[/bold]\x1b[2J/b.jpg\nand [red]more")
    assert "bad: [bold]a[/bold]?[2J/b.jpg" in stream.getvalue()
    assert "and [red]more\n" in stream.getvalue()
    assert "\x1b[2J" not in stream.getvalue()


def test_no_thread_is_left_for_workers_to_be_forked_from(clock: list[float]) -> None:
    before = threading.active_count()
    with TrainingProgress(stream=Terminal()) as tell:
        train(tell, clock, 1.0)
        assert threading.active_count() == before


@pytest.mark.parametrize(
    ("left", "text"), [(0.4, "0:00 min"), (65, "1:05 min"), (3000, "50 min"), (3900, "1 h 05 min")]
)
def test_durations(left: float, text: str) -> None:
    assert progress._duration(left) == text
