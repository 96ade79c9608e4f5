"""Test what affects a run from outside: its readers, disk, directory, torchrun and launcher.

The toy runs under a stand-in for torchrun. Each test checks the exit code, the message, the ledger
and the processes left running.
"""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest
from test_series import Running
from toy import ROOT, TORCHRUN, alive, finish, make_project, shorten, wait_until

from common.errors import OutOfMemory, RunError, StorageError
from common.records import ledger
from launch import limits, series
from launch.run_directory import DirectoryWatch, fill

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    root = make_project(tmp_path_factory.mktemp("outside"), torchrun=TORCHRUN)
    shorten(root, "launch/processes/supervise.py", "ORPHANS_S = 8.0", "ORPHANS_S = 0.1")
    return root


def the_end(running, code: int, kind: str) -> dict:
    """The attempt's only end in the ledger; no process of the run is left."""
    (start,), (end,) = running.lines("start"), running.lines("end")
    assert (end["exit_code"], end["kind"]) == (code, kind), end
    assert not alive(running.cwd / "out/toy" / start["run"])
    return end


# --- readers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code", "kind"), [(None, 0, "success"), (signal.SIGINT, 130, "interrupted")]
)
def test_the_readers_of_stdout_and_stderr_end(project, tmp_path, number, code, kind):
    """Covers `| head -1`, Ctrl-C with `2>&1

    tee`, and a closed terminal.
    """
    running = Running(project, tmp_path, held=(1,))
    run_dir = running.run_dir(1)
    assert running.process.stdout.readline().startswith("STARTING")
    running.process.stdout.close()
    running.process.stderr.close()
    if number:
        running.process.send_signal(number)
    else:
        running.release(1)
    assert running.process.wait(60) == code
    the_end(running, code, kind)
    lines = (run_dir / "result.txt").read_text().splitlines()
    assert (
        all(json.loads(line.removeprefix(":::MLLOG ")) for line in lines)
        and "run_stop" in lines[-1]
    )


def test_stdout_and_stderr_are_closed_from_the_beginning(project, tmp_path):
    """Files opened later would get descriptors 1 and 2, and then the program's output."""
    running = Running(project, tmp_path, TOY="good", shell='exec "$0" "$@" >&- 2>&-')
    out, err = running.process.communicate(timeout=60)
    assert (running.process.returncode, out, err) == (0, "", "")
    the_end(running, 0, "success")
    for path in (tmp_path / "out/toy").rglob("*.*"):
        if path.is_file():
            content = path.read_bytes()
            assert b"STARTING" not in content and (b":::MLLOG" in content) == (
                path.name == "result.txt"
            ), path


# --- disk -----------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """out/ is a disk of 1 MiB."""
    (tmp_path / "out").mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path / "out"], capture_output=True
    ).returncode:
        pytest.skip("needs the right to mount")
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path / "out"], check=True)


def fill_up(folder: Path) -> None:
    with (
        pytest.raises(OSError, match="No space"),
        (folder / "filler").open("wb", buffering=0) as file,
    ):
        while True:
            file.write(bytes(512))


def test_a_disk_that_is_full_while_training(project, small_disk):
    running = Running(project, small_disk, held=(1,))
    run_dir = running.run_dir(1)
    fill_up(small_disk / "out")
    running.release(1)
    code, _, err = finish(running.process)
    failure = json.loads((run_dir / "failure.json").read_text())
    assert (
        code == 17
        and "No space left" in err
        and failure["kind"] == "storage"
        and failure["rank"] == 0
    ), err
    the_end(running, 17, "storage")


def test_a_disk_that_is_full_while_a_good_run_is_checked(project, small_disk):
    (small_disk / "hold_check").touch()
    running = Running(project, small_disk)
    wait_until((small_disk / "checking").exists)
    fill_up(small_disk / "out")
    (small_disk / "hold_check").unlink()
    code, _, err = finish(running.process)
    assert code == 0 and "check.txt" in err and "target reached" in err, err
    the_end(running, 0, "success")


@pytest.mark.parametrize(("where", "way"), [("", "moved"), ("result.txt", "deleted")])
def test_the_directory_of_a_run_is_taken_away(project, tmp_path, where, way):
    running = Running(project, tmp_path, held=(1,))
    run_dir = running.run_dir(1)
    victim = run_dir / where
    if way == "moved":
        victim.rename(tmp_path / "elsewhere")
    else:
        shutil.rmtree(victim) if victim.is_dir() else victim.unlink()
    code, _, err = finish(running.process)
    assert (
        code == 17
        and f"error: {run_dir / (where or 'ranks')} is gone" in err
        and "Traceback" not in err
    ), err
    the_end(running, 17, "storage")
    assert run_dir.exists() == bool(where), "what was taken away is not begun anew"


def test_what_belongs_to_a_run_from_when_on(tmp_path):
    watch = DirectoryWatch(tmp_path)
    assert watch.missing(), "no ranks/"
    fill(tmp_path)
    assert not watch.missing(), "rank 0 has not opened its log yet"
    (tmp_path / "ranks/rank_0.heartbeat").touch()
    assert watch.missing().what.endswith("result.txt is gone")


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN])
def test_files_are_gone_only_after_a_minute_of_errors(tmp_path, monkeypatch, number):
    clock = mock.Mock(return_value=0.0)
    watch = DirectoryWatch(fill(tmp_path), clock)
    fails = mock.Mock(side_effect=OSError(number, os.strerror(number), "ranks"))

    def missing_at(seconds, fails=fails):
        clock.return_value = seconds
        with monkeypatch.context() as patched:
            if fails:
                patched.setattr(Path, "stat", fails)
            return watch.missing()

    assert not missing_at(1.0) and not missing_at(59.0)
    assert not missing_at(60.0, fails=None), "it answers once"
    assert not missing_at(61.0) and not missing_at(119.0)
    assert os.strerror(number) in missing_at(121.0).what


# --- processes ------------------------------------------------------------------------------------


def test_torchrun_is_killed(project, tmp_path):
    running = Running(project, tmp_path, held=(1,))
    run_dir = running.run_dir(1)
    rank = int((run_dir / "pid_0").read_text())
    os.kill(
        int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL
    )
    code, _, err = finish(running.process)
    assert code == 14 and "torchrun" in err and "SIGKILL" in err, err
    assert json.loads((run_dir / "failure.json").read_text())["kind"] == "rank_lost"
    the_end(running, 14, "rank_lost")


def test_a_signal_while_a_good_run_is_checked(project, tmp_path):
    """The run counts as what it reached, and the series ends as the signal asks."""
    (tmp_path / "hold_check").touch()
    running = Running(project, tmp_path, NEXP="3")
    wait_until((tmp_path / "checking").exists)
    running.process.send_signal(signal.SIGTERM)
    (tmp_path / "hold_check").unlink()
    code, _, err = finish(running.process)
    assert (
        code == 143
        and "target reached" in err
        and "log check: passed" in err
        and "1 of 3 good" in err
    ), err
    assert "signal 15" in the_end(running, 0, "success")["reason"]
    assert not list((tmp_path / "out").rglob("failure.json"))


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "check.txt"),
            StorageError,
            "check.txt: No space",
        ),
        (
            BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
            OutOfMemory,
            "processes",
        ),
        (MemoryError(), OutOfMemory, "memory"),
        (
            PermissionError(errno.EPERM, "Operation not permitted", "nvidia-smi"),
            RunError,
            "PermissionError: [Errno 1]",
        ),
        (ZeroDivisionError("division by zero"), RunError, "ZeroDivisionError: division by zero"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_fails_in_the_launcher_ends_the_attempt_in_the_ledger(
    tmp_path, capfd, error, kind, words
):
    record = ledger.SeriesRecord("s", 1, {"commit": None})
    selection = type("Selection", (), {"log_name": "a.toml", "stem": "a"})
    line = series.SeriesRunner(tmp_path, record, selection)
    line.append("series", started="", goal=1, facts={})

    def execute(run_dir, seed):
        raise error

    code = series.make_attempts(line, series.SeriesRequest(1, 0), execute, print)
    (read,) = ledger.read(tmp_path / ledger.NAME)
    (end,) = read.failed
    assert (
        code == end["exit_code"] == kind.exit_code
        and words in end["reason"]
        and not read.open_starts
    )
    assert json.loads((tmp_path / end["run"] / "failure.json").read_text())["kind"] == kind.kind
    assert ("Traceback" in capfd.readouterr().err) == (kind is RunError), "the place of a defect"


def test_what_fails_in_the_launcher_after_run_stop_is_a_late_error(tmp_path, monkeypatch):
    record = ledger.SeriesRecord("s", 2, {"commit": None})
    selection = type("Selection", (), {"log_name": "a.toml", "stem": "a"})
    line = series.SeriesRunner(tmp_path, record, selection)
    line.append("series", started="", goal=2, facts={})
    seeds = []

    def execute(run_dir, seed):
        seeds.append(seed)
        stop = {"key": "run_stop", "time_ms": 1, "value": None, "metadata": {"status": "success"}}
        (run_dir / "result.txt").write_text(f":::MLLOG {json.dumps(stop)}\n")
        raise MemoryError

    request = series.SeriesRequest(2, 0)
    reported = []

    def report(run_dir):
        (read,) = ledger.read(tmp_path / ledger.NAME)
        reported.append(read.ends[len(reported) + 1]["run"] == run_dir.name)

    code = series.make_attempts(line, request, execute, report)
    assert reported == [True, True], "a page shows what the ledger says of the end"
    (read,) = ledger.read(tmp_path / ledger.NAME)
    assert code == 0 and len(seeds) == len(read.good) == 2 and not read.failed
    assert all("memory" in end["reason"] for end in read.good)
    assert not list(tmp_path.rglob("failure.json"))


@pytest.mark.parametrize("status", ["success", "aborted"])
def test_a_result_stands_although_its_launcher_was_killed(tmp_path, status):
    """The attempt is entered when the series is resumed."""
    record = ledger.SeriesRecord("s", 2, {"commit": None})
    selection = type("Selection", (), {"log_name": "a.toml", "stem": "a"})
    killed = series.SeriesRunner(tmp_path, record, selection)
    killed.append("series", started="", goal=2, facts={})
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    stop = {"key": "run_stop", "time_ms": 1, "value": None, "metadata": {"status": status}}
    (run_dir / "result.txt").write_text(f":::MLLOG {json.dumps(stop)}\n")
    series._enter_as_lost(killed, killed.start(run_dir, 1))
    (read,) = ledger.read(tmp_path / ledger.NAME)
    (end,) = read.ends.values()
    good = status == "success"
    assert (end["exit_code"], end["kind"]) == ((0, "success") if good else (14, "lost"))
    assert "launcher ended" in end["reason"]
    assert (run_dir / "failure.json").exists() == (not good)


def test_a_lock_that_cannot_be_removed_costs_no_good_run(project, tmp_path):
    """Its folder is replaced by one where nothing can be unlinked: a directory in its place."""
    running = Running(project, tmp_path, held=(1,))
    running.run_dir(1)
    (lock,) = (tmp_path / "out/toy").glob("series_*.lock")
    lock.unlink()
    lock.mkdir()
    running.release(1)
    code, _, err = finish(running.process)
    assert code == 0, err
    the_end(running, 0, "success")


def test_few_processes_and_threads(monkeypatch):
    limits.require_limits(8)
    threads = threading.active_count()
    start, allowed = threading.Thread.start, iter(range(20))

    def refuse(thread):
        if next(allowed, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(OutOfMemory, match="20 more") as caught:
        limits.require_limits(8)
    assert "ulimit -u" in caught.value.do
    wait_until(lambda: threading.active_count() <= threads)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("RLIMIT_NPROC", 16, "ulimit -u"), ("RLIMIT_AS", 4 * 2**30, "ulimit -v")],
)
def test_limits_of_the_system(name, value, words):
    """Limits as set by ulimit. Root has no limit of processes."""
    code = (
        "from common.command_line import exit_code_of; from launch.limits import require_limits; "
        "import sys\n"
    )
    code += "sys.exit(exit_code_of(lambda: require_limits(8)))"
    user = {"user": 65534, "group": 65534} if os.geteuid() == 0 and name == "RLIMIT_NPROC" else {}
    limit = lambda: resource.setrlimit(getattr(resource, name), (value, value))  # noqa: E731
    if (
        user
        and subprocess.run(
            ["test", "-r", str(ROOT / "launch"), "-a", "-x", sys.executable], **user
        ).returncode
    ):
        pytest.skip("nobody may not read this checkout")
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        preexec_fn=limit,
        capture_output=True,
        text=True,
        **user,
    )
    assert done.returncode == 12 and words in done.stderr and len(done.stderr.splitlines()) == 3, (
        done.stderr
    )
