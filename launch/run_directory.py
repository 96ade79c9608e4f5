"""Directory of a run, created once and never overwritten, with the run's config and versions."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from common.config import RunConfig
from common.errors import RESERVE_FILE, StorageError
from common.hardware import Probe
from common.packages import requirements, version_of
from launch import system_settings

RESERVED_BYTES = 2**16
PATIENCE_S = 60.0  # with a file system whose requests fail, before a file counts as gone
# Packages that no requirements file lists.
OPTIONAL = (
    "triton",
    "pytorch-triton-rocm",
    "amd-aiter",
    "flash-attn-4",
    "quack-kernels",
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


class DirectoryWatch:
    """Detector of files of a run that were deleted, moved or unmounted while it runs.

    A single error of a remote file system proves nothing. So a file is gone if the file system says
    so, or if it cannot be reached for PATIENCE_S seconds.
    """

    def __init__(self, run_dir: Path, clock: Callable[[], float] = time.monotonic):
        self.run_dir = run_dir
        self.clock = clock
        self.reached = clock()  # when the files were reached last

    def missing(self) -> StorageError | None:
        """Return an error if a file is gone, else None.

        Rank 0 opens result.txt before it writes its first heartbeat.
        """
        ranks = self.run_dir / "ranks"
        do = "keep LOGDIR as it is, then start again"
        try:
            ranks.stat()
            if (ranks / "rank_0.heartbeat").exists():
                (self.run_dir / "result.txt").stat()
        except FileNotFoundError as error:
            return StorageError(
                f"{error.filename} is gone", "it was deleted or moved during the run", do
            )
        except OSError as error:
            silent_s = self.clock() - self.reached
            if silent_s < PATIENCE_S:
                return None
            return StorageError(
                f"{error.filename} cannot be reached for {silent_s:.0f} s: {error.strerror}",
                "its file system or server is away",
                do,
            )
        self.reached = self.clock()
        return None


def require_writable(folder: Path, setting: str = "LOGDIR") -> None:
    """Create `folder` if it is missing. Raise StorageError if that fails.

    `setting`: the variable or option that sets the directory, for the error.
    """
    with _writing(folder, setting):
        folder.mkdir(parents=True, exist_ok=True)


def write_config_and_versions(run_dir: Path, config: RunConfig, versions: dict) -> None:
    """Write config.toml, which the trainer reads, and versions.json. Raises StorageError."""
    with _writing(run_dir):
        (run_dir / "config.toml").write_text(config.as_toml())
        (run_dir / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


@contextlib.contextmanager
def _writing(path: Path, setting: str = "LOGDIR") -> Iterator[None]:
    """Turn an OSError in the block, which writes to `path`, into a StorageError."""
    try:
        yield
    except OSError as error:
        what = f"cannot write to {path}: {error.strerror}"
        do = f"set {setting} to a writable directory with free space"
        raise StorageError(what, "nothing was started, since results must be kept", do) from None


def versions(root: Path, gpus: Probe) -> dict:
    """Return Python, packages, commit, GPUs, driver and system settings, for versions.json.

    Environment variables are left out, since they may hold secrets.
    """
    names = [name for name, _ in requirements(root / "requirements.txt")] + list(OPTIONAL)
    installed = {name: version_of(name) for name in names}
    changes = git(root, "status", "--porcelain")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version for name, version in installed.items() if version},
        "commit": git(root, "rev-parse", "HEAD"),
        "dirty": None if changes is None else bool(changes),
        "gpus": [str(device) for device in gpus.devices],
        "driver": gpus.driver or None,
        "system_tuning": system_settings.state(),
    }


def refusal_reasons(root: Path, environment: Mapping[str, str]) -> list[str]:
    """Return the reasons, as far as known, why `package` would refuse a run of this checkout."""
    reasons = []
    commit = git(root, "rev-parse", "HEAD")
    changes = git(root, "status", "--porcelain")
    if commit is None or changes is None:
        reasons.append(
            f"the commit of {root} is unknown: git is missing, or this is not a repository, or it "
            "belongs to another user (git status says which)"
        )
    elif changes:
        lines = changes.splitlines()
        first = lines[0].split(maxsplit=1)[-1]
        reasons.append(f"{len(lines)} changed or untracked files in the checkout, such as {first}")
    if not environment.get("MLPERF_SUBMISSION_ORG"):
        reasons.append("MLPERF_SUBMISSION_ORG is not set")
    return reasons


def git(root: Path, *arguments: str) -> str | None:
    """Return the output of a git command, None without git or outside a repository."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()
    return None
