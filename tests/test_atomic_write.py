"""Files and folders are written whole, never through a link, and by several processes at once."""

import dataclasses
import errno
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import synthetic_series as synthetic
from killed_writer import leave_behind
from synthetic_run import LORA

from common.atomic_write import (
    FOREIGN_WRITER_S,
    SUFFIX,
    copy_whole,
    in_progress,
    leftovers,
    new_file,
    new_folder,
    write_whole,
)
from common.config import load
from common.data import text_parts
from common.data.indexed_dataset_writer import IndexedDatasetWriter
from common.errors import StorageError, write_record, write_text
from common.measure import report as throughput_report
from common.paths import ROOT
from common.process_identity import this_process
from launch import diagnosis, run_directory
from llama31_8b.rules import Config
from submission import report

PRECIOUS = b"precious"


@pytest.fixture
def victim(tmp_path):
    """A file of the user, outside the folder that is written to."""
    folder = tmp_path / "home"
    folder.mkdir()
    path = folder / ".bashrc"
    path.write_bytes(PRECIOUS)
    yield path
    assert [*folder.iterdir()] == [path] and path.read_bytes() == PRECIOUS


def link(victim, target):
    """Put links to `victim` at a target and at the temporary name of earlier versions."""
    for path in (target, target.with_name(f"{target.name}{SUFFIX}")):
        path.unlink(missing_ok=True)
        path.symlink_to(victim)


WRITERS = {
    "write_whole": lambda path: write_whole(path, b"new"),
    "write_text": lambda path: write_text(path, "new"),
    "write_record": lambda path: write_record(path.parent, path.name, "new"),
    "copy_whole": lambda path: copy_whole(path.with_name("source"), path),
}


@pytest.mark.quick
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_nothing_is_written_through_a_link(tmp_path, victim, write):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "source").write_bytes(b"new")
    link(victim, folder / "file")
    write(folder / "file")
    assert (folder / "file").read_bytes() == b"new" and not (folder / "file").is_symlink()


def test_reports_of_a_hostile_folder_overwrite_nothing_elsewhere(tmp_path, victim):
    series = synthetic.write(tmp_path / "results", LORA, synthetic.plans([5, 5]), goal=2)
    runs = sorted(path.parent for path in series.glob("*/result.txt"))
    for folder in (runs[0], series, series.parent):
        page = folder / "report.html"
        link(victim, page)
        assert report.main([str(folder)]) == 0
        assert page.is_file() and not page.is_symlink()
    page = runs[0] / f"compared_with_{runs[1].name}.html"
    link(victim, page)
    assert report.main([str(run) for run in runs]) == 0
    assert page.is_file() and not page.is_symlink()


def test_a_comparison_or_record_in_a_hostile_folder_overwrites_nothing_elsewhere(tmp_path, victim):
    series = synthetic.write(tmp_path / "results", LORA, synthetic.plans([5]), goal=1)
    (run,) = (path.parent for path in series.glob("*/result.txt"))
    config = load(ROOT / "configs/llama31_8b/H200_1x4.toml", Config)
    out = tmp_path / "out"
    out.mkdir()
    targets = [
        *(run / name for name in ("config.toml", "versions.json", "failure.json")),
        *(out / name for name in ("table.md", "train.bin", "train.idx")),
    ]
    for target in targets:
        link(victim, target)
    run_directory.write_config_and_versions(run, config, {})
    diagnosis.write_failure(run, StorageError("full"), {})
    throughput_report.write(out, "title", [])
    writer = IndexedDatasetWriter(out / "train", 8)
    writer.add([1, 2])
    writer.finish()
    assert not any(target.is_symlink() for target in targets)


def test_six_reports_of_one_run_at_once_all_succeed(tmp_path):
    series = synthetic.write(tmp_path, LORA, synthetic.plans([5]), goal=1)
    (log,) = series.glob("*/result.txt")
    left = leave_behind("new_file", log.with_name("report.html"))
    command = [sys.executable, "-m", "submission.report", str(log.parent)]
    processes = [subprocess.Popen(command, cwd=ROOT) for _ in range(6)]
    assert [process.wait(timeout=120) for process in processes] == [0] * 6
    text = log.with_name("report.html").read_text()
    assert text.rstrip().endswith("</html>") and SUFFIX not in text
    assert not left.exists() and not list(log.parent.glob(f"*{SUFFIX}"))


@pytest.mark.quick
def test_two_writers_of_one_file_do_not_disturb_each_other(tmp_path):
    path = tmp_path / "page.html"
    with new_file(path) as first:
        first.write(b"first")
        write_whole(path, b"second")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first" and [*tmp_path.iterdir()] == [path]


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["new_file", "new_folder"])
def test_the_next_writer_removes_what_a_killed_one_left_and_nothing_else(tmp_path, kind):
    target = tmp_path / "out"
    left = leave_behind(kind, target)
    other = leave_behind(kind, tmp_path / "out.bin")  # of another target with the same beginning
    own = tmp_path / "out.partial"  # no writer in its name
    own.write_bytes(PRECIOUS)
    assert leftovers(target) == [left] and not in_progress(target)
    with new_folder(target) as folder:
        assert not left.exists() and other.exists() and own.read_bytes() == PRECIOUS
        assert in_progress(target) == [folder] and not leftovers(target)
    assert set(tmp_path.iterdir()) == {target, other, own} and not any(target.iterdir())


@pytest.mark.quick
def test_what_a_writer_on_another_host_left_is_removed_after_a_day(tmp_path):
    target = tmp_path / "out"
    writer = dataclasses.replace(this_process(), boot="0-0", host="elsewhere")
    left = tmp_path / f"out.{writer}.00{SUFFIX}"
    left.touch()
    for age_s, exists in ((60, True), (FOREIGN_WRITER_S + 60, False)):
        if left.exists():
            os.utime(left, (time.time() - age_s,) * 2)
        write_whole(target, b"")
        assert left.exists() == exists and not in_progress(target)


@pytest.mark.quick
def test_a_failure_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "page.html"
    path.write_bytes(PRECIOUS)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))  # python ignores SIGXFSZ
    try:
        with pytest.raises(StorageError):
            write_text(path, "x" * 3000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "folder") as folder:
        (folder / "file").touch()
        raise KeyboardInterrupt
    assert [*tmp_path.iterdir()] == [path] and path.read_bytes() == PRECIOUS


@pytest.mark.quick
@pytest.mark.parametrize("name", ["x" * 255, "é" * 127, "a [b]*.json"])
def test_names_and_modes_are_those_of_an_ordinary_file(tmp_path, name):
    path = tmp_path / name
    before = os.umask(0o027)
    try:
        write_whole(path, b"1")
    finally:
        os.umask(before)
    assert path.read_bytes() == b"1" and path.stat().st_mode & 0o777 == 0o640
    path.unlink()
    left = leave_behind("new_file", path)
    assert left.name.startswith(name[:30]) and leftovers(path) == [left]


def part_of_text(path: Path) -> None:
    work = text_parts.Work(path, lambda path: list, 9, "text")
    text_parts.write_part([], path, work, list, lambda size: None)


def token_files(path: Path) -> None:
    writer = IndexedDatasetWriter(path, 9)
    writer.add([1, 2])
    writer.finish()


@pytest.mark.parametrize(
    "name, names", [(part_of_text, 3), (token_files, 2), ("write_whole", 1), ("copy_whole", 1)]
)
def test_a_file_is_on_the_disk_before_it_has_its_name(name, names, tmp_path, monkeypatch):
    synced, renamed = set(), set()
    rename, fsync = Path.rename, os.fsync

    def note_fsync(descriptor):
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def note_rename(self, target):
        renamed.add(str(self))
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "rename", note_rename)
    (tmp_path / "source").write_bytes(b"x")
    WRITERS.get(name, name)(tmp_path / "a.npz")
    assert len(renamed) == names and renamed <= synced


def test_the_files_of_a_folder_are_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced = set()
    fsync = os.fsync

    def note_fsync(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.add(path.name if path.suffix != SUFFIX else "the folder")
        fsync(descriptor)

    with new_folder(tmp_path / "folder") as folder:
        (folder / "part").mkdir()
        (folder / "part" / "a").write_bytes(b"x")
        monkeypatch.setattr(os, "fsync", note_fsync)
    assert synced == {"the folder", "part", "a"}


def test_a_file_system_without_fsync_is_accepted_and_a_full_one_is_named(tmp_path, monkeypatch):
    def fail(number):
        def fsync(descriptor):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", fsync)

    fail(errno.EINVAL)
    write_whole(tmp_path / "a", b"x")
    fail(errno.ENOSPC)
    for write in (write_whole, lambda path, _: token_files(path)):
        with pytest.raises(OSError) as caught:
            write(tmp_path / "b", b"x")
        assert Path(str(caught.value.filename)).stem == "b"
    assert not (tmp_path / "b").exists() and not (tmp_path / "b.idx").exists()
