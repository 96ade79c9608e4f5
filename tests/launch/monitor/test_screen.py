"""What one sees of a run: on a terminal, and in a pipe."""

import fcntl
import io
import json
import os
import pty
import select
import struct
import sys
import termios
from argparse import Namespace
from pathlib import Path

import pytest

from common import terminal
from launch.console import mlperf_line
from launch.monitor import gpu_sampler as sampler
from launch.monitor import screen
from launch.monitor.screen import Screen
from llama31_8b.rules import CLOSED, MINIATURE

pytestmark = pytest.mark.quick

BACK = "\x1b[J"  # clears what the next drawing replaces


class Terminal:
    """A pseudo-terminal of `columns`; `stream` writes to it, `read` tells what arrived."""

    def __init__(self, columns: int = 120):
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.stream = os.fdopen(slave, "w")

    def read(self) -> str:
        self.stream.flush()
        parts = []
        while select.select([self.master], [], [], 0.1)[0]:  # the kernel hands it over in pieces
            parts.append(os.read(self.master, 100_000))
        return b"".join(parts).decode().replace("\r\n", "\n")


def about(device: str = "cuda", miniature: bool = False, gpus: int = 8) -> dict:
    """What a Screen is told of the run."""
    config = Namespace(
        global_batch_size=32, max_samples=1_200_000, miniature=miniature, world_size=gpus
    )
    rules = MINIATURE if miniature else CLOSED
    names = {"benchmark": "llama31_8b", "config_name": "H200_1x8.toml"}
    return names | {"config": config, "rules": rules, "on_gpus": device == "cuda", "leads": True}


def write_events(
    run_dir: Path, steps: range, evaluation: float | None = None, speed: float | None = 16384.0
) -> None:
    (run_dir / "ranks").mkdir(exist_ok=True)
    (run_dir / "ranks" / "rank_0.heartbeat").write_text(
        json.dumps({"rank": 0, "step": steps[-1], "phase": "compute"})
    )
    events = [{"event": "phase", "name": "warmup", "seconds": 9.0, "time_s": 0.0}]
    for step in steps:
        event = {
            "event": "step",
            "step": step,
            "samples": step * 32,
            "loss": 10.0 - step / 20,
            "step_time_ms": 2000.0
            if step % 10
            else 9000.0,  # of one step: the speed is that of ten
            "time_s": step * 2.0,
        }
        rate = {
            "tokens_per_s_per_gpu": speed,
            "tflops_per_gpu": 900.0,
            "mfu": 0.412,
            "memory_gib": 120.34,
        }
        events.append(event | (rate if step % 10 == 0 else {}))
    if evaluation:
        events.append(
            {
                "event": "eval",
                "samples": steps[-1] * 32,
                "loss": evaluation,
                "seconds": 20.0,
                "time_s": 220.0,
            }
        )
    with (run_dir / "events.jsonl").open("a") as file:
        file.write("".join(json.dumps(event) + "\n" for event in events))


@pytest.fixture
def terminal_of(monkeypatch):
    """A terminal as stdout and stderr."""

    def make(columns: int = 120) -> Terminal:
        made = Terminal(columns)
        monkeypatch.setattr(sys, "stdout", made.stream)
        monkeypatch.setattr(sys, "stderr", made.stream)
        monkeypatch.setattr(
            screen.os, "fstat", lambda descriptor: os.stat(os.devnull)
        )  # pytest's stdout is a file
        monkeypatch.setenv("NO_COLOR", "1")
        return made

    return make


def test_on_a_terminal_a_few_lines_rewrite_themselves(tmp_path, terminal_of):
    seen = terminal_of()
    with Screen(tmp_path, **about()) as view:
        view.update()
        assert seen.read() == "llama31_8b · H200_1x8 · starting · 0m00\n"
        write_events(tmp_path, range(1, 111), evaluation=4.5)
        gpus = [{"power_w": 690.0, "temperature_c": 60}, {"power_w": 700.0, "temperature_c": 61}]
        (tmp_path / sampler.NAME).write_text(
            json.dumps({"event": "sample", "time_s": 1.0, "gpus": gpus}) + "\n"
        )
        view.update()
        text = seen.read()
        assert text.startswith(
            "\x1b[1A\r"
            + BACK
            + "evaluation at 3,520 sequences: loss 4.5000, target 3.3, after 3m40"
        )
        shown = text.splitlines()[-5:]
        assert shown[0] == "llama31_8b · H200_1x8 · training · 0m00"
        assert (
            shown[1]
            == "  loss     4.5000 ██▇▇▇▇▆▆▆▆▅▅▅▅▄▄▄▃▃▃▃▂ target 3.3 · last evaluation 4.5000"
        )
        assert shown[2].endswith("16,384 tok/s/GPU · MFU 41.2% · 120.3 GiB · 1,390 W on 2 GPUs")
        assert shown[3].endswith("step 110 · 3,520 sequences · next evaluation in 9m08")
        # 175,339 sequences more at 2 s a step, and 14 evaluations of 20 s; 1,196,480 sequences more, and 97 evaluations.
        outlook = "target in 3h07, at the reference's mean of 178,859 · gives up at 1,200,000 sequences, in 21h18"
        assert shown[4] == f"  outlook  {outlook}"
        view.update()
        assert seen.read().startswith("\x1b[5A\r" + BACK)
        (tmp_path / "ranks" / "rank_0.heartbeat").write_text(json.dumps({"phase": "done"}))
    assert [line.split()[0] for line in seen.read().rpartition(BACK)[2].splitlines()] == [
        "llama31_8b",
        "loss",
        "speed",
    ]


def test_on_a_terminal_the_mlperf_log_goes_to_its_file_only(tmp_path, terminal_of, monkeypatch):
    seen = terminal_of()
    with Screen(tmp_path, **about()) as view:
        os.write(view.stdout.fileno(), b":::MLLOG of a rank\n")
        mlperf_line("RESULT")
    assert ":::MLLOG" not in (text := seen.read()) and "RESULT" not in text
    piped = io.StringIO()
    monkeypatch.setattr(sys, "stdout", piped)
    with Screen(tmp_path, **about()) as view:
        assert view.stdout is None, "the ranks inherit ours"
        mlperf_line("RESULT")
    assert piped.getvalue() == "RESULT\n"


def test_quiet_rewrites_nothing_on_a_terminal(tmp_path, terminal_of, monkeypatch):
    seen = terminal_of()
    monkeypatch.setenv(terminal.QUIET, "1")
    with Screen(tmp_path, **about()) as view:
        write_events(tmp_path, range(1, 21), evaluation=4.5)
        view.update()
        os.write(view.stderr.fileno(), b"warning of rank 3\n")
    assert seen.read() == "warning of rank 3\n"


def test_what_the_ranks_say_stands_above_and_is_kept(tmp_path, terminal_of):
    seen = terminal_of()
    with Screen(tmp_path, **about()) as view:
        view.update()
        os.write(view.stderr.fileno(), b"warning of rank 3\nhalf a ")
        view.update()
        assert "\nwarning of rank 3\nllama31_8b ·" in "\n" + seen.read().rpartition(BACK)[2]
        os.write(view.stderr.fileno(), b"line")
    assert "half a line\nllama31_8b" in seen.read()
    assert (tmp_path / "stderr.txt").read_text() == "warning of rank 3\nhalf a line"


def test_no_line_is_wider_than_the_terminal(tmp_path, terminal_of):
    """Else it wraps, and rewriting leaves its upper half standing."""
    seen = terminal_of(columns=40)
    write_events(tmp_path, range(1, 21))
    with Screen(tmp_path, **about()) as view:
        view.update()
        assert [len(line) for line in seen.read().splitlines()][1:] == [39] * 4


def test_colors_only_where_they_are_wanted(tmp_path, terminal_of, monkeypatch):
    seen = terminal_of()
    assert terminal.paint("x", "1") == "x"
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("TERM", "xterm")
    assert terminal.paint("x", "1") == "\x1b[1mx\x1b[0m"
    monkeypatch.setenv("TERM", "dumb")
    assert terminal.paint("x", "1") == "x" and not seen.read()


def test_on_a_cpu_nothing_is_said_of_gpus(tmp_path, terminal_of):
    seen = terminal_of()
    write_events(tmp_path, range(1, 21), evaluation=5.0)
    with Screen(tmp_path, **about("cpu", miniature=True, gpus=1)) as view:
        view.update()
        text = seen.read()
    assert "GPU" not in text and "16,384 tok/s" in text and "reference" not in text


def test_in_a_pipe_lines_are_plain_and_few(tmp_path, monkeypatch):
    stderr, now = io.StringIO(), 1000.0
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(screen.time, "monotonic", lambda: now)
    with Screen(tmp_path, **about()) as view:
        assert view.stdout is None  # the ranks' log goes where that of this process goes
        write_events(tmp_path, range(1, 111), evaluation=4.5)
        for _ in range(240):  # two minutes
            view.update()
            now += 0.5
    lines = stderr.getvalue().splitlines()
    assert [line.partition(" ")[0] for line in lines] == [
        "evaluation",
        "step",
    ] and "\x1b" not in stderr.getvalue()


def test_quiet_leaves_the_messages_of_the_ranks(tmp_path, monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv(terminal.QUIET, "1")
    with Screen(tmp_path, **about()) as view:
        write_events(tmp_path, range(1, 111), evaluation=4.5)
        os.write(view.stderr.fileno(), b"error: no space\n")
        view.update()
    assert stderr.getvalue() == "error: no space\n"


@pytest.mark.parametrize("broken", ["no JSON\n", '{"event": "step"}\n', "[]\n"])
def test_a_run_does_not_end_for_what_cannot_be_shown(tmp_path, monkeypatch, broken):
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    (tmp_path / "events.jsonl").write_text(broken)
    with Screen(tmp_path, **about()) as view:
        os.write(view.stderr.fileno(), b"warning of rank 3\n")
        view.update()
        view.update()
    assert stderr.getvalue().count("nothing is shown, and the run goes on") == 1
    assert (tmp_path / "stderr.txt").read_text() == "warning of rank 3\n"


def test_a_loss_that_is_not_finite_does_not_stop_the_screen():
    nan = float("nan")
    assert (
        terminal.sparkline([nan, nan], 3.3) == ""
        and terminal.sparkline([10.0, nan, 3.0], 3.3) == "█▁"
    )
    assert len(terminal.sparkline([1.0] * 1000, 0.0)) <= terminal.WIDTH
