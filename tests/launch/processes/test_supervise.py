"""Processes are watched, stopped and never left behind."""

import json
import os
import signal
import sys
import textwrap
import time

import pytest
from toy import alive

from common.errors import STOP_SIGNALS
from launch.processes import supervise
from launch.processes.supervise import Grace, HangWatch

pytestmark = pytest.mark.quick

LIMITS = {"startup_s": 8.0, "step_s": 0.6}


def start(tmp_path, script, watch=None, ranks=1, **options):
    """Supervise a parent that starts `ranks` copies of `script` in sessions of their own.

    The argument of a copy is its rank. torchrun starts ranks in the same way.
    """
    (tmp_path / "ranks").mkdir(exist_ok=True)
    prelude = f"""
        import faulthandler, json, os, signal, sys, time
        rank, folder = int(sys.argv[1]), {str(tmp_path)!r}
        faulthandler.register(signal.SIGUSR1, open(f"{{folder}}/ranks/rank_{{rank}}.stack", "w"))
        def beat(step, phase="train", at=None):
            now = at or time.time()
            record = dict(rank=rank, pid=os.getpid(), step=step, phase=phase, time=now)
            open(f"{{folder}}/ranks/rank_{{rank}}.heartbeat", "w").write(json.dumps(record))
    """
    (tmp_path / "rank.py").write_text(textwrap.dedent(prelude) + textwrap.dedent(script))
    parent = f"""
        import subprocess, sys
        children = []
        for rank in range({ranks}):
            command = [sys.executable, {str(tmp_path / "rank.py")!r}, str(rank)]
            children.append(subprocess.Popen(command, start_new_session=True))
        sys.exit(max(abs(child.wait()) for child in children))
    """
    (tmp_path / "parent.py").write_text(textwrap.dedent(parent))
    return supervise.supervise(
        [sys.executable, str(tmp_path / "parent.py")],
        dict(os.environ),
        tmp_path,
        watch,
        poll_s=0.05,
        **options,
    )


def test_end_by_itself(tmp_path):
    assert start(tmp_path, "sys.exit(3 * rank)", ranks=2) == supervise.Ending(3)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signals_are_passed_on_and_stubborn_ranks_are_killed(tmp_path, number):
    script = f"""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill({os.getpid()}, {int(number)})
        time.sleep(60)
    """
    # Another test may have left one of its own.
    began, handler = (
        time.monotonic(),
        signal.getsignal(signal.SIGTERM),
    )
    ending = start(tmp_path, script, grace=Grace(0.5))
    assert ending.signal_number == number
    assert time.monotonic() - began < 8 and not alive(tmp_path)
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_signal_before_the_start_of_the_processes_ends_them(tmp_path):
    """As Ctrl-C while the launcher starts the live screen."""
    began = time.monotonic()
    with supervise.signals_noted() as received:
        os.kill(os.getpid(), signal.SIGINT)
        ending = start(tmp_path, "time.sleep(60)", grace=Grace(0.5))
        assert ending.signal_number == signal.SIGINT and received == []
    assert time.monotonic() - began < 8 and not alive(tmp_path)


@pytest.mark.parametrize("saves", [True, False])
def test_ranks_that_save_in_time_get_no_sigterm(tmp_path, saves):
    script = f"""
        os.kill({os.getpid()}, signal.SIGUSR1)
        while not os.path.exists("{tmp_path}/save"):
            time.sleep(0.02)
        time.sleep(0.2 if {saves} else 60)
        sys.exit(5)
    """

    def save():
        (tmp_path / "save").touch()
        return True

    ending = start(tmp_path, script, grace=Grace(30.0 if saves else 1.0, save))
    assert ending.signal_number == signal.SIGUSR1
    assert (ending.returncode == 5) == saves and not alive(tmp_path)


def test_a_second_signal_ends_a_save_at_once(tmp_path):
    def save():
        os.kill(os.getpid(), signal.SIGUSR1)
        return True

    script = f"""
        os.kill({os.getpid()}, signal.SIGUSR1)
        time.sleep(60)
    """
    began = time.monotonic()
    start(tmp_path, script, grace=Grace(60.0, save))
    assert time.monotonic() - began < 20 and not alive(tmp_path)


def test_signals_of_a_batch_system_to_all_processes_end_only_the_launcher(tmp_path):
    script = """
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU):
            os.kill(os.getppid(), number)
            os.kill(os.getpid(), number)
        time.sleep(0.2)
    """
    assert start(tmp_path, script) == supervise.Ending(0)


def test_the_rank_furthest_behind_is_named(tmp_path):
    script = """
        for step in range(1, 3 if rank == 1 else 4):
            beat(step)
            time.sleep(0.02)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        def wait_for_the_others():
            time.sleep(60)
        wait_for_the_others()
    """
    ending = start(
        tmp_path, script, HangWatch(tmp_path / "ranks", range(3), range(3), **LIMITS), ranks=3
    )
    assert ending.hang and ending.hang.exit_code == 13
    assert ending.failed_rank["rank"] == 1 and "step 2" in ending.hang.why
    assert "wait_for_the_others" in (tmp_path / "ranks" / "rank_0.stack").read_text()
    assert not alive(tmp_path)


def test_of_ranks_at_one_step_the_one_that_gives_no_stack_holds_up_the_others(tmp_path):
    script = """
        beat(3, at=1000.0 + rank)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)
    """
    ending = start(
        tmp_path, script, HangWatch(tmp_path / "ranks", range(3), range(3), **LIMITS), ranks=3
    )
    assert ending.hang and ending.failed_rank["rank"] == 1, (
        "rank 0 reported earlier, but it answers"
    )


def test_hang_limits(tmp_path):
    now = [0.0]
    watch = HangWatch(tmp_path, range(2), range(2), startup_s=100, step_s=10, clock=lambda: now[0])

    def beat(rank, step):
        (tmp_path / f"rank_{rank}.heartbeat").write_text(
            json.dumps({"rank": rank, "pid": os.getpid(), "step": step, "phase": "p", "time": 0})
        )
        os.utime(
            tmp_path / f"rank_{rank}.heartbeat", ns=(int(now[0] * 1e9), int(now[0] * 1e9) + step)
        )

    now[0] = 99
    assert not watch.is_hanging(), "nobody has reported yet: the limit of the start holds"
    now[0] = 101
    assert watch.is_hanging() and "never reported" in watch.explain()[0].why
    beat(0, 1)
    now[0] = 150
    assert not watch.is_hanging(), "rank 1 is still starting"
    assert not watch.started
    beat(1, 1)
    assert watch.started, "a signal right after the first step is not too early to save it"
    assert not watch.is_hanging()
    now[0] = 159
    assert not watch.is_hanging()
    now[0] = 161
    assert watch.is_hanging()
    beat(0, 2)
    assert not watch.is_hanging()
    (tmp_path / "rank_0.heartbeat").write_text("")  # caught while it is being written
    assert not watch.is_hanging() and watch.beats[0]["step"] == 2
