"""Worker processes that tokenize text: they end with the process that started them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from common.paths import ROOT

# The tokenizer is a pipe, whose opening never ends.
TOKENIZE = """
import sys
from pathlib import Path
from common.data.preparation import input_states
from common.data.text_parts import Work, write_token_files
folder = Path(sys.argv[1])
files = [folder / "a.txt"]
work = Work(folder / "pipe", open, 300, "text")
identity = {"inputs": input_states(files)}
write_token_files(files, work, {"train": folder / "train"}, folder / "parts", identity, 1)
"""


def command_of(pid: str) -> str:
    """Return the command line of a process, "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def workers_of(pid: int) -> list[str]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [child for child in children if "spawn_main" in command_of(child)]


def wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_worker_ends_when_its_parent_is_killed(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    os.mkfifo(tmp_path / "pipe")
    process = subprocess.Popen([sys.executable, "-c", TOKENIZE, str(tmp_path)], cwd=ROOT)
    try:
        wait_for(lambda: workers_of(process.pid))
        (worker,) = workers_of(process.pid)
        time.sleep(1)  # the worker has probably begun to open the pipe
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_for(lambda: not command_of(worker))
