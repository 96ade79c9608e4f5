"""Test the lock of `prepare` and the build of files by two processes at once."""

import errno
from pathlib import Path

import pytest

from common.data import preparation
from common.data.preparation import Recipe, build_once

RECIPE = Recipe("files", "a test", 7, ("t.bin",), "files.json")


def test_a_failure_to_lock_is_not_called_a_wait(tmp_path, monkeypatch, capsys):
    def flock(file, operation):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(preparation.fcntl, "flock", flock)
    with pytest.raises(OSError, match="Input/output"), preparation.locked(tmp_path / "lock"):
        pass
    assert "waiting" not in capsys.readouterr().err


def test_files_that_another_process_completes_at_this_moment_are_not_foreign(tmp_path, monkeypatch):
    """The other process writes the manifest and removes its lock between two checks."""
    manifest = tmp_path / RECIPE.manifest
    lock = tmp_path / f".{RECIPE.manifest}.lock"
    (tmp_path / "t.bin").write_bytes(b"x")
    lock.touch()
    exists = Path.exists
    checks = []

    def exists_just_before(path):
        answer = exists(path)
        # `_defect` makes the first check of the manifest.
        checks.append(path == manifest)
        if sum(checks) == 2 and path == manifest:
            manifest.write_text("{}")
            lock.unlink()
        return answer

    def build(folder):
        return {}

    monkeypatch.setattr(Path, "exists", exists_just_before)
    build_once(tmp_path, RECIPE, build)
    assert exists(manifest) and not exists(lock)
