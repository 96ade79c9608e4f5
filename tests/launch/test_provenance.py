"""Test through run_and_time.sh that the recorded commit is that of this repository, or null."""

import json
import os
import shutil
import subprocess

import pytest
from toy import TORCHRUN, finish, launch, make_project

from common.repository import changes_of


def git(folder, *arguments):
    identity = ["-c", "user.name=T", "-c", "user.email=t@example.org"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder) -> str:
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--allow-empty", "-m", "a state")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the project without a repository."""
    root = make_project(tmp_path_factory.mktemp("project"), torchrun=TORCHRUN)
    (root / "pyproject.toml").write_text('[project]\nname = "toy"\nversion = "7.8"\n')
    (root / ".gitignore").write_text("__pycache__/\n")
    return root


@pytest.fixture
def clone(copy, tmp_path):
    """A repository of the project and its commit."""
    root = shutil.copytree(copy, tmp_path / "clone")
    return root, commit(root)


@pytest.fixture
def outer(tmp_path):
    """A repository of something else, which ignores the folder `clone` in it, and its commit."""
    (tmp_path / ".gitignore").write_text("clone\n")
    return tmp_path, commit(tmp_path)


def version(project, cwd, **variables) -> str:
    code, out, err = finish(launch(project, cwd, "--version", benchmark="", **variables))
    assert code == 0, err
    return out.strip()


def recorded(project, cwd, **variables) -> tuple:
    """Run the toy. Return commit and dirty of versions.json, and the commit in the ledger."""
    code, _, err = finish(launch(project, cwd, TOY="good", **variables))
    assert code == 0, err
    (path,) = (cwd / "out/toy").glob("*/versions.json")
    versions = json.loads(path.read_text())
    lines = (cwd / "out/toy/attempts.jsonl").read_text().splitlines()
    (start,) = [json.loads(line) for line in lines if '"start"' in line]
    return versions["commit"], versions["dirty"], start["commit"]


def test_a_copy_inside_another_repository_has_no_commit(copy, outer, tmp_path):
    inside = shutil.copytree(copy, outer[0] / "clone")
    assert version(inside, tmp_path) == "toy 7.8"
    assert recorded(inside, tmp_path) == (None, None, None)


def test_variables_of_git_do_not_lead_to_another_repository(clone, outer, tmp_path):
    root, own = clone
    leading = {"GIT_DIR": str(outer[0] / ".git"), "GIT_WORK_TREE": str(outer[0])}
    for variables in ({"GIT_DIR": leading["GIT_DIR"]}, leading):
        assert version(root, tmp_path, **variables) == f"toy 7.8, commit {own}"
    (root / "common/paths.py").write_text((root / "common/paths.py").read_text() + "# edited\n")
    assert recorded(root, tmp_path, **leading) == (own, True, own)


def test_untracked_files_count_whatever_the_user_configured(clone, tmp_path):
    root, own = clone
    (tmp_path / ".gitconfig").write_text("[status]\n showUntrackedFiles = no\n")
    home = {"HOME": str(tmp_path)}
    assert version(root, tmp_path, **home) == f"toy 7.8, commit {own}"
    (root / "common/new.py").write_text("")
    assert version(root, tmp_path, **home) == f"toy 7.8, commit {own}, modified"


def test_reading_the_state_of_the_checkout_takes_no_lock(tmp_path):
    """A status that is killed by Ctrl-C would leave the lock behind, and git refuses to work."""
    (tmp_path / "file").write_text("text")
    commit(tmp_path)
    index = tmp_path / ".git" / "index"
    os.utime(tmp_path / "file", (0, 0))  # the index would be refreshed
    before = index.stat().st_mtime_ns
    assert changes_of(tmp_path) == [] and index.stat().st_mtime_ns == before
