"""Test how a rank ends: the kind of failure, the rank at fault, and a closed log."""

import errno
import json
import os
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch
from ranks import start_ranks
from toy import gone, wait_until

from common import atomic_write, errors
from common.errors import (
    LAUNCHED,
    RESERVE_FILE,
    ConfigError,
    Hang,
    Interrupted,
    NonFinite,
    OutOfMemory,
    RankLost,
    RunError,
    StorageError,
    WeightsError,
    write_rank_record,
)
from common.training import guard
from common.training.guard import classify, is_secondary

# Two ranks add up until rank 1 goes away, as argv[2] says. on_failure fails itself: that must not
# hide the first failure.
TWO_RANKS = """
import os, signal, sys, time
from pathlib import Path
import torch
from common.sharding.processes import start_processes
from common.training.guard import run_guarded

folder, way = Path(sys.argv[1]), sys.argv[2]
rank = int(os.environ["RANK"])

def body():
    (folder / f"imported_{rank}").touch()
    # The time limit below includes this wait for each other.
    while len(list(folder.glob("imported_*"))) < 2:
        time.sleep(0.01)
    processes = start_processes("cpu", 3.0)
    processes.barrier()
    if rank == 1 and way == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        (folder / "asleep").touch()
        time.sleep(60)
    processes.sum(torch.ones(1000))

def on_failure():
    (folder / f"on_failure_{rank}").touch()
    raise OSError("a second failure")

run_guarded(folder, rank, body, on_failure, lambda: 7)
"""


@pytest.fixture(scope="module")
def collectives(tmp_path_factory):
    """Real failures of gloo: {how: (exit codes, folder of the run)}.

    Rank 1 is killed, or sleeps longer than the 3 s of a collective.
    """
    folders = {way: tmp_path_factory.mktemp(way) for way in ("killed", "asleep")}
    groups = {
        way: start_ranks(2, ["-c", TWO_RANKS, str(folder), way]) for way, folder in folders.items()
    }
    found = {}
    try:
        for way, (first, second) in groups.items():
            first.communicate(timeout=60)
            if way == "asleep":
                second.send_signal(signal.SIGTERM)
            second.communicate(timeout=60)
            found[way] = ([first.returncode, second.returncode], folders[way])
    finally:
        for process in (process for group in groups.values() for process in group):
            process.kill()
    return found


def record(folder: Path, rank: int) -> dict:
    return json.loads((folder / "ranks" / f"rank_{rank}.json").read_text())


def test_a_peer_that_dies_is_a_lost_rank_and_the_survivor_says_it_only_watched(collectives):
    codes, folder = collectives["killed"]
    survivor = record(folder, 0)
    assert codes == [RankLost.exit_code, -signal.SIGKILL]
    assert (
        survivor["kind"] == "rank_lost"
        and survivor["outcome"] == "failed"
        and survivor["secondary"] is True
    )
    assert survivor["step"] == 7 and survivor["why"], survivor
    assert not (folder / "ranks" / "rank_1.json").exists()


def test_a_peer_that_is_silent_is_a_hang(collectives):
    codes, folder = collectives["asleep"]
    waiting = record(folder, 0)
    assert codes[0] == Hang.exit_code and waiting["kind"] == "hang" and waiting["secondary"] is True
    assert "imed out" in waiting["why"] or "imeout" in waiting["why"]


def test_sigterm_ends_a_rank_as_interrupted_with_the_shells_exit_code(collectives):
    codes, folder = collectives["asleep"]
    assert codes[1] == 128 + signal.SIGTERM
    stopped = record(folder, 1)
    assert (stopped["kind"], stopped["outcome"], stopped["secondary"]) == (
        "interrupted",
        "interrupted",
        False,
    )


def test_a_failure_of_on_failure_does_not_hide_the_first_failure(collectives):
    for way, rank in (("killed", 0), ("asleep", 0), ("asleep", 1)):
        folder = collectives[way][1]
        assert (folder / f"on_failure_{rank}").exists()
        assert "Traceback" in (folder / "ranks" / f"rank_{rank}.traceback").read_text()


def test_a_known_failure_stays_what_it_is():
    for failure in (NonFinite("loss"), Interrupted(signal.SIGINT), RankLost("rank 3")):
        assert classify(failure) is failure and not is_secondary(failure)


def test_a_full_gpu_is_out_of_memory():
    failure = classify(
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore lines")
    )
    assert (
        isinstance(failure, OutOfMemory)
        and failure.why == "CUDA out of memory. Tried to allocate 20.00 GiB."
    )
    assert not is_secondary(torch.OutOfMemoryError("CUDA out of memory"))


@pytest.mark.parametrize(
    ("error", "kind"),
    [(torch.OutOfMemoryError(), OutOfMemory), (torch.distributed.DistStoreError(), RankLost)],
)
def test_an_error_without_a_message_is_named_by_its_class(error, kind):
    failure = classify(error)
    assert type(failure) is kind and failure.why == type(error).__name__


@pytest.mark.parametrize(
    "number",
    [
        errno.ENOSPC,
        errno.EFBIG,
        errno.EDQUOT,
        errno.EROFS,
        errno.EIO,
        errno.ESTALE,
        errno.ENXIO,
        errno.ENODEV,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
        errno.ETIMEDOUT,
        errno.EHOSTDOWN,
        errno.EREMOTEIO,
    ],
)
def test_a_disk_that_takes_nothing_is_a_storage_error_naming_the_file(number):
    failure = classify(OSError(number, os.strerror(number), "/results/events.jsonl"))
    assert isinstance(failure, StorageError) and "/results/events.jsonl" in failure.what


def test_a_disk_explains_the_error_of_what_was_read_from_it():
    def read(path):
        try:
            Path(path).read_text()
        except OSError as error:
            raise WeightsError("the weights are unreadable", "", "fetch them again") from error

    for path, kind in (("/proc/self/mem", StorageError), ("/nowhere", WeightsError)):  # EIO
        with pytest.raises(WeightsError) as caught:
            read(path)
        assert type(classify(caught.value)) is kind
    assert type(classify(OSError("Input/output error (os error 5)"))) is StorageError  # of Rust
    stale = RuntimeError("unable to open file <m> in read-only mode: Stale file handle (116)")
    assert type(classify(stale)) is StorageError  # of C++
    with pytest.raises(OSError) as caught:
        Path("/proc/self/mem").read_text()
    assert caught.value.filename is None and "/proc/self/mem" in classify(caught.value).what
    try:
        raise OSError(errno.EHOSTUNREACH, "No route to host")
    except OSError:
        with pytest.raises(ConfigError) as caught:
            raise ConfigError("MASTER_ADDR cannot be reached") from None
    assert type(classify(caught.value)) is ConfigError, "a network is no disk"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] data. DefaultCPUAllocator: can't allocate "
            "memory: you tried to allocate 8 bytes."
        ),
        RuntimeError("can't start new thread"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)),  # fork, at the limit of processes
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_host_that_gives_no_more_is_out_of_memory(error):
    failure = classify(error)
    assert (
        type(failure) is OutOfMemory
        and "host" in failure.what
        and failure.why
        and "ulimit" in failure.do
        and not is_secondary(error)
    )


def test_an_exit_in_a_rank_is_a_lost_rank():
    failure = classify(SystemExit(0))
    assert type(failure) is RankLost and "exit code 0" in failure.what


@pytest.mark.parametrize(
    "error",
    [
        KeyError("x"),
        ZeroDivisionError("division by zero"),
        FileNotFoundError(errno.ENOENT, "No such file", "a"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("timeout of the oven"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_unknown_error_is_an_internal_error_of_this_rank_with_its_name(error):
    failure = classify(error)
    assert (
        type(failure) is RunError
        and failure.exit_code == 1
        and type(error).__name__ in failure.what
    )
    assert not is_secondary(error)


# The texts that torch 2.13 and 2.9 give, with NCCL too, which no test here can provoke.
@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error "
            "[127.0.0.1]:17049: Connection reset by peer.",
            RankLost,
        ),
        (
            "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out "
            "waiting 2000ms for recv operation to complete",
            Hang,
        ),
        (
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer "
            "[127.0.0.1]:22334",
            RankLost,
        ),
        (
            "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, "
            "OpType=ALLREDUCE) ran for 600000 ms",
            Hang,
        ),
        (
            "NCCL error in: ProcessGroupNCCL.cpp:3699, remote process exited or there was a "
            "network error",
            RankLost,
        ),
    ],
)
def test_the_texts_of_gloo_and_nccl_are_known(text, kind):
    assert type(classify(RuntimeError(text))) is kind and is_secondary(RuntimeError(text))
    assert type(classify(torch.distributed.DistBackendError(text))) is kind


def test_an_undisturbed_rank_leaves_the_record_done(tmp_path):
    code = "import sys; from pathlib import Path; from common.training.guard import run_guarded\n"
    code += "run_guarded(Path(sys.argv[1]), 0, lambda: None, lambda: 1 / 0, lambda: 3)"
    (process,) = start_ranks(1, ["-c", code, str(tmp_path)])
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert {key: record(tmp_path, 0)[key] for key in ("rank", "outcome", "step")} == {
        "rank": 0,
        "outcome": "done",
        "step": 3,
    }


def test_a_signal_while_a_failure_is_reported_does_not_hide_it(tmp_path):
    """torchrun sends SIGTERM at about the time when a rank notices that another one died."""
    code = (
        "import errno, os, signal, sys; from pathlib import Path; from common.training import "
        "guard\n"
    )
    code += "classify, send = guard.classify, lambda: os.kill(os.getpid(), signal.SIGTERM)\n"
    code += "guard.classify = lambda *about: send() or classify(*about)\n"
    code += "def body(): raise OSError(errno.ENOSPC, 'full')\n"
    code += "guard.run_guarded(Path(sys.argv[1]), 0, body, send, lambda: send() or 3)"
    (process,) = start_ranks(1, ["-c", code, str(tmp_path)])
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == StorageError.exit_code, stderr
    assert (record(tmp_path, 0)["outcome"], record(tmp_path, 0)["kind"]) == (
        "failed",
        StorageError.kind,
    )


def test_a_signal_after_the_work_is_done_does_not_change_the_result(tmp_path):
    """torchrun and batch systems send SIGTERM to what is still there; the result stands by then."""
    code = (
        "import os, signal, sys; from pathlib import Path; from common.training.guard import "
        "run_guarded\n"
    )
    code += (
        "run_guarded(Path(sys.argv[1]), 0, lambda: None, lambda: None, lambda: "
        "os.kill(os.getpid(), signal.SIGTERM) or 3)"
    )
    (process,) = start_ranks(1, ["-c", code, str(tmp_path)])
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0 and record(tmp_path, 0)["outcome"] == "done", stderr


# --- where the record cannot go, and nobody waits for it


def test_a_record_of_a_full_disk_takes_the_room_that_was_set_aside(tmp_path, monkeypatch):
    (tmp_path / "ranks").mkdir()
    (tmp_path / RESERVE_FILE).write_bytes(bytes(4096))
    create = atomic_write.create

    def full(target):
        if (tmp_path / RESERVE_FILE).exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(target)

    monkeypatch.setattr(atomic_write, "create", full)
    write_rank_record(tmp_path, 0, "failed", StorageError("full"))
    assert record(tmp_path, 0)["kind"] == "storage" and not (tmp_path / RESERVE_FILE).exists()


@pytest.mark.parametrize(
    ("launched", "full", "told"), [(False, False, True), (True, False, False), (True, True, True)]
)
def test_a_failure_is_told_on_stderr_where_no_launcher_reads_the_record(
    tmp_path, monkeypatch, capfd, launched, full, told
):
    (tmp_path / "ranks").mkdir()
    monkeypatch.setattr(errors, "TRIES", 2)
    monkeypatch.setenv(LAUNCHED, "run")
    if not launched:
        monkeypatch.delenv(LAUNCHED)
    if full:
        monkeypatch.setattr(
            atomic_write, "create", mock.Mock(side_effect=OSError(errno.ENOSPC, "full"))
        )
    monkeypatch.setattr(os, "_exit", mock.Mock(side_effect=InterruptedError))
    with pytest.raises(InterruptedError):
        guard.exit_with_failure(
            tmp_path,
            0,
            OSError(errno.ENOSPC, "No space left on device", "events.jsonl"),
            lambda: None,
            lambda: 3,
        )
    os._exit.assert_called_with(StorageError.exit_code)
    stderr = capfd.readouterr().err
    assert ("No space left on device" in stderr and "  do:  free space" in stderr) == told, stderr
    assert (tmp_path / "ranks/rank_0.json").exists() != full


# torchrun: starts a rank and is killed. The rank sleeps; or waits in native code, deaf to signals,
# as for a collective of ranks that are gone.
ORPHAN = """
import os, signal, sys, time
from pathlib import Path
from common.training import guard
def body():
    if sys.argv[2] == "deaf":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    (Path(sys.argv[1]) / "pid").write_text(str(os.getpid()))
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
guard.SECONDS_TO_FINISH = 0.5
folder = Path(sys.argv[1])
guard.run_guarded(folder, 0, body, lambda: (folder / "run_stop").touch(), lambda: 3)
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"


@pytest.mark.parametrize("way", [pytest.param("asleep", marks=pytest.mark.slow), "deaf"])
def test_a_rank_ends_by_itself_when_torchrun_is_killed(tmp_path, monkeypatch, way):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    (parent,) = start_ranks(1, ["-c", PARENT, "-c", ORPHAN, str(tmp_path), way])
    parent.communicate(timeout=60)  # the rank holds its pipes
    assert parent.returncode == -signal.SIGKILL
    wait_until(lambda: gone((tmp_path / "pid").read_text()))
    assert (tmp_path / "run_stop").exists() == (way == "asleep")
    if way == "asleep":
        assert record(tmp_path, 0)["outcome"] == "interrupted"
