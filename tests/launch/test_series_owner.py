"""Test through run_and_time.sh that no living launcher is taken for a dead one.

The toy of tests/helpers/toy.py runs without flock, in a container, or beside a launcher of another
machine, of which only the lock file is there.
"""

import dataclasses
import json
import os
import shutil
import time

import pytest
from test_series import Running
from toy import TORCHRUN, finish, launch, make_project

from common.lock_files import SILENT_S
from common.process_identity import this_process
from common.records import ledger

# As on a file system that refuses flock.
WITHOUT_FLOCK = """
import errno, fcntl, os
def refuse(*arguments):
    raise OSError(errno.ENOLCK, "No locks available")
if "WITHOUT_FLOCK" in os.environ:
    fcntl.flock = refuse
"""
NO_FLOCK = {"WITHOUT_FLOCK": "1"}
# The host name changes while the launcher runs.
CONTAINER = (
    "exec unshare --uts --pid --fork --kill-child --mount-proc bash -c "
    '\'hostname before; (sleep 1; hostname after) & exec "$@"\' - "$0" "$@"'
)
in_container = pytest.mark.skipif(
    not shutil.which("unshare") or os.geteuid() != 0, reason="needs unshare and root"
)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    root = make_project(tmp_path_factory.mktemp("project"), torchrun=TORCHRUN)
    (root / "common/__init__.py").write_text(WITHOUT_FLOCK)
    return root


def resume(project, cwd, *arguments, **variables):
    code, _, err = finish(launch(project, cwd, "--resume", *arguments, TOY="good", **variables))
    return code, err


def is_alive(running):
    (series,) = running.lines("series")
    return ledger.launcher_is_alive(running.cwd / "out/toy", series["series"])


def kill(running):
    running.process.kill()
    running.process.communicate()


def test_without_flock_a_living_launcher_is_not_taken_over_and_a_killed_one_is(project, tmp_path):
    running = Running(project, tmp_path, held=(2,), NEXP="2", **NO_FLOCK)
    running.run_dir(2)
    code, err = resume(project, tmp_path, "--take-over", **NO_FLOCK)
    assert code == 2 and "still running" in err and str(running.process.pid) in err
    assert len(running.lines("start")) == 2 and len(running.lines("end")) == 1
    assert is_alive(running)
    kill(running)
    assert not is_alive(running)
    code, err = resume(project, tmp_path, **NO_FLOCK)
    assert code == 0 and "3 attempts, 2 of 2 good, 1 failed" in err, err
    assert [line["kind"] for line in running.lines("end")] == ["success", "lost", "success"]
    assert not list(tmp_path.rglob("*.lock"))


def test_a_launcher_of_another_machine_is_asked_for_after_ten_minutes(project, tmp_path):
    """flock is granted here, as on a mount where it is local to each machine."""
    running = Running(project, tmp_path, held=(2,), NEXP="2")
    running.run_dir(2)
    kill(running)
    (series,) = running.lines("series")
    (own,) = (tmp_path / "out/toy").glob("*.lock")
    own.unlink()
    other = dataclasses.replace(this_process(), host="node-7", boot="00000000-0000")
    path = tmp_path / "out/toy" / f"{ledger.lock_name(series['series'])}.0a0b.lock"

    def renewed(seconds_ago):
        record = {"process": str(other), "flock": True, "renewed": time.time() - seconds_ago}
        path.write_text(json.dumps(record))

    for seconds, options in ((20, ()), (20, ("--take-over",)), (SILENT_S - 60, ("--take-over",))):
        renewed(seconds)
        code, err = resume(project, tmp_path, *options)
        assert code == 2 and "still running" in err and "node-7" in err
        assert "--take-over" not in err and is_alive(running)
    renewed(SILENT_S + 60)
    code, err = resume(project, tmp_path)
    assert code == 2 and "--take-over" in err and "node-7" in err
    assert not is_alive(running) and len(running.lines("end")) == 1
    code, err = resume(project, tmp_path, "--take-over")
    assert code == 0 and [line["kind"] for line in running.lines("end")][1] == "lost", err
    assert not path.exists()


@in_container
@pytest.mark.parametrize("flock", [{}, NO_FLOCK])
def test_a_launcher_in_a_container_whose_host_name_changes(project, tmp_path, flock):
    """Only flock can tell that it was killed: its process cannot be examined from outside."""
    running = Running(project, tmp_path, held=(2,), shell=CONTAINER, NEXP="2", **flock)
    running.run_dir(2)
    time.sleep(1)
    code, err = resume(project, tmp_path, **flock)
    assert code == 2 and "still running" in err and is_alive(running)
    assert len(running.lines("end")) == 1
    kill(running)
    code, err = resume(project, tmp_path, **flock)
    if flock:
        assert code == 2 and "still running" in err
    else:
        assert code == 0, err


def test_take_over_is_an_option_of_resume(project, tmp_path):
    code, _, err = finish(launch(project, tmp_path, "--take-over", TOY="good"))
    assert code == 2 and "--resume" in err and not (tmp_path / "out").exists()
