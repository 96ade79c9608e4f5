"""Directory of a run, created once and never overwritten, with the config and versions that ran."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from common.config import RunConfig
from common.errors import RESERVE_FILE, StorageError
from common.hardware import Probe
from common.packages import requirements, version_of
from launch import tuning

RESERVED_BYTES = 2**16
# Packages that no requirements file lists.
OPTIONAL = (
    "triton",
    "pytorch-triton-rocm",
    "amd-aiter",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "transformer-engine",
)


def create(log_dir: Path, benchmark: str, config_stem: str, seed: int) -> Path:
    """Create LOGDIR/<benchmark>/<date>_<config>_seed<seed> and `fill` it.

    Raise StorageError if it exists or cannot be written.
    """
    folder = log_dir / benchmark / f"{time.strftime('%Y%m%d-%H%M%S')}_{config_stem}_seed{seed}"
    with _writing(folder):
        folder.mkdir(parents=True)
    return fill(folder)


def fill(folder: Path) -> Path:
    """Make an empty ranks/ and RESERVE_FILE in `folder`. Raise StorageError if that fails."""
    with _writing(folder):
        (folder / "ranks").mkdir(parents=True, exist_ok=True)
        # Random bytes, so that no file system compresses them.
        (folder / RESERVE_FILE).write_bytes(os.urandom(RESERVED_BYTES))
    return folder


def missing(run_dir: Path) -> StorageError | None:
    """Return an error if files of a running run were deleted, moved or unmounted, else None.

    result.txt must exist once rank 0 writes heartbeats, because rank 0 opens the log before that.
    """
    for path in (run_dir / "ranks", run_dir / "result.txt"):
        if not path.exists() and (
            path.name == "ranks" or (run_dir / "ranks" / "rank_0.heartbeat").exists()
        ):
            return StorageError(
                f"{path} is gone",
                "it was deleted or moved during the run",
                "keep LOGDIR as it is, then start again",
            )
    return None


def require_writable(folder: Path) -> None:
    """Create `folder` if it is missing. Raise StorageError if that fails."""
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)


def write_facts(run_dir: Path, config: RunConfig, versions: dict) -> None:
    """Write config.toml, which the trainer reads, and versions.json. Raises StorageError."""
    with _writing(run_dir):
        (run_dir / "config.toml").write_text(config.as_toml())
        (run_dir / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"cannot write to {path}: {error.strerror}"
        do = "set LOGDIR to a writable directory with free space"
        raise StorageError(what, "results must be kept, so nothing was started", do) from None


def versions(root: Path, found: Probe) -> dict:
    """Return what is needed to reproduce the software: Python, packages, commit, GPUs and driver.

    Environment variables are left out, since they may hold secrets.
    """
    names = [name for name, _ in requirements(root / "requirements.txt")] + list(OPTIONAL)
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version for name in names if (version := version_of(name))},
        "commit": git(root, "rev-parse", "HEAD"),
        "dirty": None if (status := git(root, "status", "--porcelain")) is None else bool(status),
        "gpus": [str(device) for device in found.devices],
        "driver": found.driver or None,
        "system_tuning": tuning.state(),
    }


def doubts(root: Path, environment: Mapping[str, str]) -> list[str]:
    """Return known reasons why submission.package would refuse a run that is started now."""
    found = []
    commit = git(root, "rev-parse", "HEAD")
    changes = git(root, "status", "--porcelain")
    if commit is None or changes is None:
        found.append(
            f"git names no commit of {root}: there is no git, no repository, or one of another "
            "owner (git status says which)"
        )
    elif changes:
        lines = changes.splitlines()
        found.append(
            f"{len(lines)} changed or untracked in the checkout, such as "
            f"{lines[0].split(maxsplit=1)[-1]}"
        )
    if not environment.get("MLPERF_SUBMISSION_ORG"):
        found.append("MLPERF_SUBMISSION_ORG is not set")
    return found


def git(root: Path, *arguments: str) -> str | None:
    """Return the output of a git command, None without git or outside a repository."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()
    return None
