"""Test that a lock has at most one owner, and that its file says which."""

import json
import multiprocessing
import threading
import time

import pytest

from common import lock_files
from common.errors import StorageError
from common.process_identity import this_process

pytestmark = pytest.mark.quick


@pytest.fixture(params=[True, False], ids=["flock", "no flock"])
def locks(request, monkeypatch):
    """Run a test with and without flock."""
    if not request.param:
        monkeypatch.setattr(lock_files, "flock", lambda descriptor, operation: None)


def contend(folder, start, winners, end):
    start.wait()
    with lock_files.owned(folder, "x") as other:
        if other is None:
            winners.put(1)
            end.wait()


@pytest.mark.usefixtures("locks")
def test_of_several_that_ask_at_once_one_owns_the_lock(tmp_path):
    context = multiprocessing.get_context("fork")
    start, end, winners = context.Barrier(5), context.Event(), context.Queue()
    processes = [
        context.Process(target=contend, args=(tmp_path, start, winners, end)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    start.wait()
    assert winners.get(timeout=20) == 1
    deadline = time.monotonic() + 20
    while sum(process.is_alive() for process in processes) > 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [process.is_alive() for process in processes].count(True) == 1 and winners.empty()
    assert lock_files.owner(tmp_path, "x") is not None
    end.set()
    for process in processes:
        process.join()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("locks")
def test_the_file_names_its_owner_who_renews_it(tmp_path, monkeypatch):
    monkeypatch.setattr(lock_files, "RENEW_S", 0.01)
    written = threading.Event()
    write = lock_files._write
    monkeypatch.setattr(lock_files.time, "time", lambda: 1_000_000_000)
    with lock_files.owned(tmp_path, "x") as other:
        assert other is None
        (path,) = tmp_path.iterdir()
        before = json.loads(path.read_text())
        assert before["process"] == str(this_process())

        def noted(descriptor, record):
            write(descriptor, record)
            written.set()

        monkeypatch.setattr(lock_files, "_write", noted)
        monkeypatch.setattr(lock_files.time, "time", lambda: 1_000_000_030)
        written.clear()
        assert written.wait(20)
        assert json.loads(path.read_text())["renewed"] - before["renewed"] == 30
    assert lock_files.owner(tmp_path, "x") is None


def test_files_of_other_locks_and_of_processes_that_have_written_nothing_do_not_count(tmp_path):
    (tmp_path / "xy.0.lock").write_text(json.dumps({"process": str(this_process())}))
    for text in ("", "[]", "{", '{"process": 7}', '{"renewed": "x"}'):
        (tmp_path / "x.0.lock").write_text(text)
        assert lock_files.owner(tmp_path, "x") is None, text
    with lock_files.owned(tmp_path, "x") as other:
        assert other is None


def test_a_lock_that_cannot_be_written_is_a_storage_error(tmp_path):
    lock = lock_files.owned(tmp_path / "missing", "x")
    with pytest.raises(StorageError, match="missing"), lock:
        pass
