"""Test Ctrl-C at every moment, and standard streams that are closed, full or not read."""

import os
import signal
import subprocess
import sys
import time

import pytest

from common.command_line import exit_code_of
from common.errors import ConfigError
from common.paths import ROOT

SCRIPT = str(ROOT / "run_and_time.sh")


def started(command, **options):
    """Start a command in a process group of its own, as a shell does."""
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        **options,
    )


def interrupted_silently(process, first_screen=False):
    """Return whether it ended by SIGINT without a word, perhaps after its first screen."""
    _, err = process.communicate(timeout=60)
    loud = b"error" in err or b"Traceback" in err if first_screen else err
    # A shell reports 130 for both.
    return process.returncode in (130, -signal.SIGINT) and not loud


def test_ctrl_c_while_python_starts_is_silent():
    """SIGINT is blocked while Python starts, and pending when launch.start runs."""

    def interrupt():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        os.kill(os.getpid(), signal.SIGINT)

    command = [sys.executable, "-m", "launch.start", "launch", "--version"]
    assert interrupted_silently(started(command, preexec_fn=interrupt))
    assert not interrupted_silently(started(command))


def test_ctrl_c_while_python_is_probed_is_silent(tmp_path):
    """Python fails with 1, not with 130, if the signal comes while it imports site."""
    (tmp_path / "python3").write_text("#!/bin/sh\ntrap '' INT\nkill -INT 0\nexit 1\n")
    (tmp_path / "python3").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert interrupted_silently(started([SCRIPT, "runs"], env={**os.environ, "PATH": path}))


@pytest.mark.slow
@pytest.mark.parametrize("words", ["--help", "runs", "plan llama31_8b", "llama31_8b --miniature"])
def test_ctrl_c_in_the_first_half_second(words, tmp_path):
    loud = []
    for moment in range(27):
        environment = {**os.environ, "LOGDIR": str(tmp_path)}
        process = started([SCRIPT, *words.split()], env=environment)
        time.sleep(0.02 * moment)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        sent = time.monotonic()
        is_silent = interrupted_silently(process, first_screen="--miniature" in words)
        # One that was about to end did not receive the signal.
        had_ended = process.returncode == 0 and time.monotonic() - sent < 0.1
        if not is_silent and not had_ended:
            loud.append((moment, process.returncode))
    assert loud == [] and not [*tmp_path.iterdir()]


def test_ctrl_c_is_silent_unless_something_can_be_done(capsys):
    before = signal.getsignal(signal.SIGINT)
    assert exit_code_of(lambda: os.kill(os.getpid(), signal.SIGINT)) == 130
    assert capsys.readouterr().err == "" and signal.getsignal(signal.SIGINT) is before

    def of_a_library():
        raise KeyboardInterrupt

    assert exit_code_of(of_a_library) == 130 and capsys.readouterr().err == ""


NO_READER = "(exec <&-; sleep 1); exit ${PIPESTATUS[0]}"
PROGRAM = """
import sys
from common.command_line import exit_code_of
from common.errors import ConfigError
def work():
    if sys.argv[1:] == ["fail"]:
        raise ConfigError("wrong")
    print("text")
sys.exit(exit_code_of(work))
"""


@pytest.mark.parametrize(
    ("shell", "code", "words"),
    [
        ('"$0" "$@"', 0, ""),
        ('"$0" "$@" >/dev/full', 17, "standard output"),
        ('"$0" "$@" >&-', 17, "standard output"),
        (f'"$0" "$@" | {NO_READER}', 141, "note"),
        ('"$0" "$@" fail', ConfigError.exit_code, "error: wrong"),
        ('"$0" "$@" fail 2>&-', ConfigError.exit_code, ""),
        ('"$0" "$@" fail 2>/dev/full', ConfigError.exit_code, ""),
        (f'"$0" "$@" fail 2>&1 | {NO_READER}', ConfigError.exit_code, ""),
    ],
)
def test_a_stream_that_cannot_be_written(shell, code, words):
    command = ["bash", "-c", shell, sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code and words in done.stderr and "Traceback" not in done.stderr
    assert bool(done.stderr) == bool(words)


def test_another_shell_starts_the_script_and_none_is_replaced_by_it():
    done = subprocess.run(["sh", SCRIPT, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    line = 'source "$1" --version; echo still $?'
    done = subprocess.run(["bash", "-c", line, "bash", SCRIPT], capture_output=True, text=True)
    assert done.stdout == "still 2\n" and len(done.stderr.splitlines()) == 3


FORKED = """
import os, signal, sys
from common.command_line import exit_code_of
from launch.processes.supervise import run_module
from llama2_70b_lora import packed_npy
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
def work():
    {work}
    print("goes on")
sys.exit(exit_code_of(work))
"""


@pytest.mark.parametrize(
    ("work", "is_silent"),
    [
        ('run_module(["this"])', True),
        ("packed_npy._require_loadable(packed_npy.Path(os.devnull))", False),
    ],
)
def test_ctrl_c_during_a_fork_is_not_lost(work, is_silent):
    command = [sys.executable, "-c", FORKED.format(work=work)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stdout) == (130, b"")
    assert (b"Traceback" not in done.stderr) == is_silent
