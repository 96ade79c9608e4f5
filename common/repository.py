"""The git repository of this project: its commit, and the files that differ from it.

Only a repository whose top level is the given directory is asked. A copy of the project inside
another repository, or GIT_DIR in the environment, would give the commit of other code. Standard
library only.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

TIMEOUT_S = 60


class GitError(Exception):
    """git is missing, failed, or found no repository whose top level is the given directory."""


def git(root: Path, *arguments: str) -> bytes:
    """Return the output of a git command in the repository `root`. Raises GitError."""
    top = os.fsdecode(_output(root, "rev-parse", "--show-toplevel")).removesuffix("\n")
    if Path(top) != root.resolve():
        raise GitError(f"{root} has no repository of its own, but is inside the repository {top}")
    return _output(root, *arguments)


def commit_of(root: Path) -> str | None:
    """Return the commit that is checked out in `root`, or None after a GitError."""
    try:
        return git(root, "rev-parse", "HEAD").decode().strip()
    except GitError:
        return None


def remote_name(root: Path) -> str | None:
    """Return host/owner/name of the remote `origin` of `root`, or None if it names no host.

    A user and a password in its address are left out.
    """
    try:
        address = git(root, "remote", "get-url", "origin").decode().strip()
        if "://" not in address:  # user@host:path, or a local path
            host, colon, path = address.partition(":")
            address = f"ssh://{host}/{path}" if colon else ""
        parts = urlsplit(address)
    except (GitError, ValueError):
        return None
    path = parts.path.strip("/").removesuffix(".git")
    return f"{parts.hostname}/{path}" if parts.hostname and path else None


def changes_of(root: Path) -> list[str] | None:
    """Return the lines of `git status --porcelain`, or None after a GitError.

    Each line is a file that differs from the commit or is not tracked.
    """
    try:
        # The user's settings may hide untracked files.
        status = git(root, "status", "--porcelain", "--untracked-files=normal")
    except GitError:
        return None
    return os.fsdecode(status).splitlines()


def _output(root: Path, *arguments: str) -> bytes:
    # GIT_DIR, GIT_WORK_TREE and others, which hooks set, lead to other repositories.
    environment = {key: text for key, text in os.environ.items() if not key.startswith("GIT_")}
    # Without locks: a killed `git status` would leave index.lock behind.
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    try:
        return subprocess.run(
            command, capture_output=True, check=True, env=environment, timeout=TIMEOUT_S
        ).stdout
    except subprocess.CalledProcessError as error:
        raise GitError(os.fsdecode(error.stderr).strip()) from None
    except subprocess.TimeoutExpired:
        raise GitError(f"git {arguments[0]} took more than {TIMEOUT_S} s") from None
    except OSError as error:
        raise GitError(f"git: {error.strerror}") from None
