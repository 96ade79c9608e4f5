"""What one sees of a run: on a terminal, and in a pipe."""

import io
import json
import os
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
from pseudo_terminal import PseudoTerminal

from common import config as configs
from common import terminal
from common.benchmarks import config_class, example_config
from common.paths import ROOT
from common.records.tracking import GPU_SAMPLES
from common.training.heartbeat import Heartbeat
from launch.console import mlperf_line
from launch.monitor import screen
from launch.monitor.screen import BARS, SPARKLINE_WIDTH, Screen, sparkline
from llama31_8b.rules import CLOSED, MINIATURE

pytestmark = pytest.mark.quick


def about(device: str = "cuda", miniature: bool = False, gpus: int = 8) -> dict:
    """Description of a run for a Screen."""
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

    def make(columns: int = 120) -> PseudoTerminal:
        made = PseudoTerminal(columns)
        monkeypatch.setattr(sys, "stdout", made.stream)
        monkeypatch.setattr(sys, "stderr", made.stream)
        # pytest's stdout is a file
        monkeypatch.setattr(screen.os, "fstat", lambda descriptor: os.stat(os.devnull))
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
        return made

    return make


def row(lines: list[str], label: str) -> str:
    [found] = [line for line in lines if line.split()[0] == label]
    return found


def test_on_a_terminal_a_few_lines_are_redrawn(tmp_path, terminal_of):
    seen = terminal_of()
    with Screen(tmp_path, **about()) as view:
        view.update()
        assert seen.screen() == ["llama31_8b · H200_1x8 · starting · 0m00"]
        write_events(tmp_path, range(1, 111), evaluation=4.5)
        gpus = [{"power_w": 690.0, "temperature_c": 60}, {"power_w": 700.0, "temperature_c": 61}]
        sample = {"event": "sample", "time_s": 1.0, "gpus": gpus}
        (tmp_path / GPU_SAMPLES).write_text(json.dumps(sample) + "\n")
        view.update()
        lines = seen.screen()
        assert lines[0].startswith("evaluation at 3,520 sequences: loss 4.5000, target 3.3")
        assert lines[1] == "llama31_8b · H200_1x8 · training · 0m00"
        assert "3.3" not in row(lines, "train"), "the target is one of evaluations"
        assert "loss 4.5000 at 3,520 sequences · target 3.3 · next in 9m08" in row(
            lines, "evaluate"
        )
        speed = "16,384 tok/s/GPU · MFU 41.2% · 120.3 GiB · 1,390 W on 2 GPUs"
        assert row(lines, "speed").endswith(speed)
        assert row(lines, "progress").endswith("step 110 · 3,520 sequences")
        # 175,339 sequences more at 2 s a step, and 14 evaluations of 20 s.
        assert "expected in 3h07" in row(lines, "target")
        # 1,196,480 sequences more, and 97 evaluations.
        assert row(lines, "limit").endswith("1,200,000 sequences, in 21h18 at this speed")


@pytest.mark.parametrize(
    ("status", "words"), [("success", "target reached"), ("aborted", "stopped"), (None, "stopped")]
)
def test_the_last_drawing_is_of_the_end(tmp_path, terminal_of, status, words):
    seen = terminal_of()
    with Screen(tmp_path, **about()) as view:
        write_events(tmp_path, range(1, 111), evaluation=4.5)
        view.update()
        if status:
            with (tmp_path / "events.jsonl").open("a") as file:
                file.write(json.dumps({"event": "verdict", "status": status}) + "\n")
    lines = seen.screen()[-5:]
    assert f"· {words} ·" in lines[0]
    assert not {"target", "limit"} & {line.split()[0] for line in lines}
    assert "next in" not in "".join(lines)


def test_a_run_without_a_target_ends_as_finished(tmp_path, terminal_of):
    seen = terminal_of()
    no_target = replace(CLOSED, target_loss=0.0)
    with Screen(tmp_path, **about() | {"rules": no_target}) as view:
        write_events(tmp_path, range(1, 111), evaluation=4.5)
        view.update()
        with (tmp_path / "events.jsonl").open("a") as file:
            file.write(json.dumps({"event": "verdict", "status": "success"}) + "\n")
    lines = seen.screen()
    assert any("finished" in line for line in lines)
    assert not any("reached" in line for line in lines)


def test_a_bar_while_the_base_is_loaded(tmp_path, terminal_of, monkeypatch):
    seen = terminal_of()
    now = 1000.0
    monkeypatch.setattr(screen.time, "monotonic", lambda: now)
    with Screen(tmp_path, **about()) as view:
        Heartbeat(tmp_path, 0).write(0, "loading", 0, 80)
        view.update()
        now += 10
        Heartbeat(tmp_path, 0).write(0, "loading", 20, 80)
        view.update()
        title, bar = seen.screen()
        assert "loading" in title and bar.endswith("20 of 80 layers · 2.0 layers/s · 0m30 left")


def test_on_a_terminal_the_mlperf_log_goes_to_its_file_only(tmp_path, terminal_of, monkeypatch):
    seen = terminal_of()
    with Screen(tmp_path, **about()) as view:
        os.write(view.stdout.fileno(), b":::MLLOG of a rank\n")
        mlperf_line("llama31_8b", about()["config"], "RESULT")
    assert ":::MLLOG" not in (text := seen.read()) and "RESULT" not in text
    piped = io.StringIO()
    monkeypatch.setattr(sys, "stdout", piped)
    with Screen(tmp_path, **about()) as view:
        assert view.stdout is None, "the ranks inherit ours"
        mlperf_line("llama31_8b", about()["config"], "RESULT")
    assert piped.getvalue() == "RESULT\n"


@pytest.mark.parametrize(("benchmark", "quiet"), [("open_llama", ""), ("llama31_8b", "1")])
def test_only_benchmarks_of_mlperf_log_to_stdout_and_never_quietly(
    tmp_path, monkeypatch, benchmark, quiet
):
    piped = io.StringIO()
    monkeypatch.setattr(sys, "stdout", piped)
    monkeypatch.setenv(terminal.QUIET, quiet)
    config = about()["config"]
    if benchmark == "open_llama":
        config = configs.load(ROOT / example_config(benchmark), config_class(benchmark))
    with Screen(tmp_path, **about() | {"benchmark": benchmark, "config": config}) as view:
        assert view.stdout.name == os.devnull
        mlperf_line(benchmark, config, "RESULT")
    assert piped.getvalue() == ""


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
        first, second = seen.screen()
        assert first == "warning of rank 3" and second.startswith("llama31_8b ·")
        os.write(view.stderr.fileno(), b"line")
    assert seen.screen()[:2] == ["warning of rank 3", "half a line"]
    assert (tmp_path / "stderr.txt").read_text() == "warning of rank 3\nhalf a line"


def test_cpp_stacks_and_repeated_look_ups_of_names_are_in_the_file_only(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    lookup = "[W1128 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved."
    lines = [f"{lookup} err=-3", "[E TCPStore.cpp] recvValue failed", "Exception raised from recv"]
    lines += [
        "frame #0: c10::Error::Error()",
        "<omitting python frames>",
        f"{lookup} err=-2",
        "end",
    ]
    with Screen(tmp_path, **about()) as view:
        for line in lines:
            os.write(view.stderr.fileno(), f"{line}\n".encode())
            view.update()
    assert sys.stderr.getvalue().splitlines() == [lines[0], lines[1], "end"]
    assert (tmp_path / "stderr.txt").read_text().splitlines() == lines


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_lines_fit_the_terminal_and_break_between_words(tmp_path, terminal_of, columns):
    wide = terminal_of(columns=400)
    write_events(tmp_path, range(1, 111), evaluation=4.5)
    with Screen(tmp_path, **about()) as view:
        view.update()
        words = " ".join(wide.screen()).split()
    narrow = terminal_of(columns)
    with Screen(tmp_path, **about()) as view:
        view.update()
        lines = narrow.screen()
        assert max(map(len, lines)) <= columns and " ".join(lines).split() == words


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
        for _ in range(480):  # four minutes without a new step
            view.update()
            now += 0.5
    lines = stderr.getvalue().splitlines()
    assert [line.partition(" ")[0] for line in lines] == [
        "evaluation",
        "step",
    ] and "\x1b" not in stderr.getvalue()


@pytest.mark.parametrize("target", [0.0, 3.3])
def test_lines_in_a_pipe_name_the_target_and_what_the_limit_means(tmp_path, monkeypatch, target):
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(screen, "PLAIN_S", 0.0)
    with Screen(tmp_path, **about() | {"rules": replace(CLOSED, target_loss=target)}) as view:
        write_events(tmp_path, range(1, 111), evaluation=4.5)
        view.update()
    for word in ("target", "gives up in"):
        assert (word in stderr.getvalue()) == bool(target)
    assert ("ends in" in stderr.getvalue()) == (not target)


def test_quiet_leaves_the_messages_of_the_ranks(tmp_path, monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv(terminal.QUIET, "1")
    with Screen(tmp_path, **about()) as view:
        write_events(tmp_path, range(1, 111), evaluation=4.5)
        os.write(view.stderr.fileno(), b"error: no space\n")
        view.update()
    assert stderr.getvalue() == "error: no space\n"


@pytest.mark.parametrize(
    ("broken", "stops"), [("no JSON\n", 0), ('{"event": "step"}\n', 1), ("[]\n", 0)]
)
def test_a_run_does_not_end_for_what_cannot_be_shown(tmp_path, monkeypatch, broken, stops):
    """A line that is no record is skipped. A record without its keys ends the display."""
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    (tmp_path / "events.jsonl").write_text(broken)
    with Screen(tmp_path, **about()) as view:
        os.write(view.stderr.fileno(), b"warning of rank 3\n")
        view.update()
        view.update()
    assert stderr.getvalue().count("display stops") == stops
    assert (tmp_path / "stderr.txt").read_text() == "warning of rank 3\n"


def test_a_sparkline_shows_the_course_behind_the_first_values():
    nan = float("nan")
    assert sparkline([nan, nan]) == "" and len(sparkline([1.0] * 1000)) <= SPARKLINE_WIDTH
    falling = sparkline([12.0, 9.0, *(5.0 - step / 10 for step in range(18))])
    assert falling[:2] == "██" and falling[-1] == "▁" and len(set(falling)) == len(BARS)
