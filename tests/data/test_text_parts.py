"""Parts of tokenized text, and the worker processes that write them."""

import errno
import multiprocessing.synchronize
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from in_this_process import InThisProcess

from common.data import text_parts
from common.data.indexed_dataset import Index
from common.data.preparation import input_states
from common.errors import DataError
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


SPAWN = text_parts.PROCESSES


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


def load(path):
    """A tokenizer of bytes."""
    return lambda texts: [list(text.encode()) for text in texts]


def write(folder, prefixes):
    files = [folder / "a.txt"]
    work = text_parts.Work(folder, load, 256, "text", 0.5, blank_lines=True)
    identity = {"inputs": input_states(files)}
    return text_parts.write_token_files(files, work, prefixes, folder / "parts", identity, 1)


@pytest.fixture
def prefixes(tmp_path, monkeypatch):
    monkeypatch.setattr(text_parts, "PROCESSES", InThisProcess)
    (tmp_path / "a.txt").write_text("\n\n".join(f"document {number}" for number in range(40)))
    return {split: tmp_path / split for split in text_parts.SPLITS}


def test_nothing_is_needed_in_dev_shm(tmp_path, prefixes, monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(multiprocessing.synchronize.SemLock, "__init__", full)
    monkeypatch.setattr(text_parts, "PROCESSES", SPAWN)
    write(tmp_path, prefixes)
    assert all(path.with_suffix(".idx").is_file() for path in prefixes.values())


@pytest.mark.parametrize(
    ("number", "cause"),
    [(signal.SIGKILL, "memory"), (signal.SIGSEGV, "crashed"), (signal.SIGALRM, "backtracked")],
)
def test_the_death_of_a_worker_names_its_cause_and_its_file(
    number, cause, tmp_path, prefixes, monkeypatch
):
    class Killed(InThisProcess):
        exitcode = -number

        def recv(self):
            super().recv()
            raise EOFError  # and the error is not sent

        def send(self, message):
            if message is None:
                super().send(message)

    monkeypatch.setattr(text_parts, "PROCESSES", Killed)
    with pytest.raises(DataError, match=f"exit code -{int(number)}, reading .*a.txt") as caught:
        write(tmp_path, prefixes)
    assert cause in caught.value.why


def test_the_tokens_of_a_part_are_not_held_in_memory(tmp_path, prefixes, monkeypatch):
    """A compressed file is one part of any size."""
    sizes = []

    def documents(*arguments):
        for _ in range(3 * text_parts.BATCH_DOCUMENTS):
            sizes.append(sum(path.stat().st_size for path in (tmp_path / "parts").glob("*.bin*")))
            yield 1000 * "x"

    monkeypatch.setattr(text_parts, "documents", documents)
    with pytest.raises(DataError, match="no document for"):
        write(tmp_path, prefixes)  # equal texts are in one split
    assert sizes[0] == 0 and sizes[-1] > 1900 * text_parts.BATCH_DOCUMENTS


@pytest.mark.parametrize("damage", ["cut off", "removed"])
def test_a_damaged_part_is_refused(tmp_path, prefixes, monkeypatch, damage):
    join = text_parts.join

    def join_damaged(folder, *arguments):
        (tokens,) = folder.glob("*.train.bin")
        if damage == "removed":
            tokens.unlink()
        else:
            tokens.write_bytes(tokens.read_bytes()[:-1])
        return join(folder, *arguments)

    monkeypatch.setattr(text_parts, "join", join_damaged)
    with pytest.raises(DataError):
        write(tmp_path, prefixes)
    assert not list(tmp_path.glob("*.idx"))


def test_the_splits_have_all_documents_in_order(tmp_path, prefixes):
    write(tmp_path, prefixes)
    texts = []
    for prefix in prefixes.values():
        index = Index.read(prefix)
        numbers = []
        with index.open_tokens() as tokens:
            for number, length in enumerate(index.sequence_lengths):
                ids = tokens.read_sequence(number, 0, int(length))
                numbers.append(bytes(ids.astype("u1")).decode())
        assert numbers == sorted(numbers, key=lambda text: int(text.split()[1]))
        texts += numbers
    assert sorted(texts) == sorted(f"document {number}" for number in range(40))
