"""Progress, messages and tables, on terminals of several widths and in a pipe."""

import io
import sys

import pytest
from pseudo_terminal import PseudoTerminal

from common import terminal
from common.terminal import Progress, duration, print_stderr, table

pytestmark = pytest.mark.quick


@pytest.fixture
def clock(monkeypatch):
    """A list with the time, which tests advance."""
    now = [1000.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    return now


def on_a_terminal(monkeypatch, columns: int) -> PseudoTerminal:
    made = PseudoTerminal(columns)
    monkeypatch.setattr(sys, "stdout", terminal.guarded(made.stream))
    monkeypatch.setattr(sys, "stderr", terminal.guarded(made.stream, drops=True))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    return made


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_one_bar_with_rate_and_remaining_time(monkeypatch, clock, columns):
    seen = on_a_terminal(monkeypatch, columns)
    with Progress("converting", 4e9, "B") as progress:
        for done in (0, 1e9, 2e9):
            progress.at(done)
            clock[0] += 10
        progress.at(2e9)
        [line] = seen.screen()
        assert len(line) <= columns
        assert all(text in line for text in ("2.0 GB of 4.0 GB", "67 MB/s", "0m30 left"))
        print_stderr("note: a message")
        clock[0] += 1
        progress.at(3e9)
        assert seen.screen()[0] == "note: a message" and len(seen.screen()) == 2
        clock[0] += 1
        progress.at(3e9, title="evil \x1b[2J name")
        assert "evil \N{REPLACEMENT CHARACTER}[2J name" in seen.screen()[1]
    assert seen.screen() == ["note: a message"], "the bar is gone"


def test_the_rate_is_that_of_the_last_half_minute(clock):
    rate = terminal.Rate(320, "steps")
    for done in (0, 1):  # the first step compiles
        rate.add(done)
        clock[0] += 11
    for done in range(2, 82):
        rate.add(done)
        clock[0] += 0.5
    assert rate.per_second == pytest.approx(2.0) and rate.text().endswith("1m59 left")


def test_a_slow_rate_is_not_zero(clock):
    rate = terminal.Rate(3e6, "B")
    for done in (0, 3e5):
        rate.add(done)
        clock[0] += 10
    assert rate.text() == "300 kB of 3 MB · 30 kB/s · 1m30 left"


def test_lines_in_a_pipe_and_none_if_quiet(monkeypatch, clock):
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    for quiet in ("", "1"):
        monkeypatch.setenv(terminal.QUIET, quiet)
        with Progress("packing", 100, "rows") as progress:
            for _ in range(90):
                clock[0] += 1
                progress.advance(1)
    first, *others = stderr.getvalue().splitlines()
    assert first == "packing: 30 of 100 rows · 1.0 rows/s · 1m10 left" and len(others) == 2


@pytest.mark.parametrize("columns", [60, 80])
def test_messages_are_folded_between_words(monkeypatch, columns):
    seen = on_a_terminal(monkeypatch, columns)
    text = (
        "config     configs/llama31_8b/CPU_1x1.toml, because no GPU was found " + "and so on " * 9
    )
    print_stderr(text, "error: " + "a sentence about --max-failures " * 4)
    lines = seen.screen()
    assert (
        " ".join(lines).split()
        == (text + "error: " + "a sentence about --max-failures " * 4).split()
    )
    assert max(map(len, lines)) <= columns and lines[1].startswith(" " * 11)


def test_a_long_path_stays_whole():
    path = "results/" + "x" * 48 + ","
    lines = terminal.fold(f"run        {path} seed 1", 60).splitlines()
    assert [line.strip() for line in lines] == ["run", path, "seed 1"]
    assert max(map(len, lines)) <= 60


def test_a_message_in_a_pipe_stays_one_line(capsys):
    print_stderr("x " * 200)
    assert capsys.readouterr().err == "x " * 200 + "\n"


def test_colors_only_where_they_are_wanted(monkeypatch):
    seen = on_a_terminal(monkeypatch, 80)
    print_stderr("error: x")
    assert "\x1b[1;31m" not in seen.read()
    monkeypatch.setenv("NO_COLOR", "")
    print_stderr("error: x")
    assert "\x1b[1;31m" in seen.read()
    monkeypatch.setenv("TERM", "dumb")
    print_stderr("error: x")
    assert "\x1b" not in seen.read()


ROWS = [("run", "minutes", "remark"), ("one", "1.25", "dropped: fastest"), ("two", "12.5", "")]


def test_a_table_is_aligned_and_fits(monkeypatch):
    on_a_terminal(monkeypatch, 80)
    assert table(ROWS, "<><") == [
        "run  minutes  remark",
        "one     1.25  dropped: fastest",
        "two     12.5",
    ]


def test_a_table_too_wide_for_its_words_becomes_blocks(monkeypatch):
    on_a_terminal(monkeypatch, 60)
    rows = [("a", "b"), ("x" * 40, "y" * 40), ("z", "")]
    assert table(rows, "<<") == ["a  " + "x" * 40, "b  " + "y" * 40, "", "a  z"]


def test_a_table_in_a_pipe_is_never_folded(capsys):
    rows = [("a", "b"), ("x y " * 100, "z")]
    assert [len(line) for line in table(rows, "<<")][1] > 400


def test_durations():
    assert [duration(seconds) for seconds in (9.9, 75, 3661)] == ["0m09", "1m15", "1h01"]
