"""Directory of a run, created once and never overwritten, with the run's config and versions."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from common.atomic_write import write_whole
from common.config import RunConfig
from common.errors import RESERVE_FILE, Hang, StorageError
from common.machine.hardware import Probe
from common.packages import requirements, version_of
from common.repository import changes_of, commit_of
from system_tuning import settings

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


def create(folder: Path, config_stem: str, seed: int) -> Path:
    """Create <folder>/<date>_<config>_seed<seed> and `fill` it. Raises StorageError."""
    return fill(create_new(folder / f"{date()}_{config_stem}_seed{seed}"))


def date() -> str:
    """Return the present date and time in UTC, for names. Runs are ordered by their records."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime())


def create_new(path: Path) -> Path:
    """Create the directory `path`, or `path`-2, -3, ... if it exists, and return its path.

    Raises StorageError if it cannot be written.
    """
    folder = path
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(2):
            try:
                folder.mkdir()
                break
            except FileExistsError:
                folder = path.with_name(f"{path.name}-{number}")
    return folder


def fill(folder: Path) -> Path:
    """Make an empty ranks/ and RESERVE_FILE in `folder`. Raise StorageError if that fails."""
    with _writing(folder):
        (folder / "ranks").mkdir(parents=True, exist_ok=True)
        # Random bytes, so that no file system compresses them.
        write_whole(folder / RESERVE_FILE, os.urandom(RESERVED_BYTES))
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


class ClockWatch:
    """Detector of an initialization that takes longer than the rules allow.

    `limit_s`: from init_start to run_start. The log is read until it has both.
    """

    def __init__(self, log: Path, limit_s: float, clock: Callable[[], float] = time.monotonic):
        self.log = log
        self.limit_s = limit_s
        self.clock = clock
        self.began: float | None = None  # when init_start was first seen
        self.started = False

    def late(self) -> Hang | None:
        """Return an error if the clock has not started within the limit, else None."""
        if not self.started:
            with contextlib.suppress(OSError):
                text = self.log.read_text(errors="replace")
                self.started = '"run_start"' in text
                if self.began is None and '"init_start"' in text:
                    self.began = self.clock()
        if self.started or self.began is None or self.clock() - self.began <= self.limit_s:
            return None
        return Hang(
            f"the initialization takes longer than {self.limit_s / 60:g} minutes",
            "the rules of the closed division limit it, so the run could not be submitted",
            "see the phases in events.jsonl and the stack of every rank in ranks/rank_*.stack",
        )


def require_writable(folder: Path, setting: str = "LOGDIR") -> None:
    """Create `folder` if it is missing. Raise StorageError if that fails.

    `setting`: the variable or option that sets the directory, for the error.
    """
    with _writing(folder, setting):
        folder.mkdir(parents=True, exist_ok=True)


def require_possible(folder: Path) -> None:
    """Raise the error of `require_writable`, but leave no new folder behind."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    require_writable(folder)
    for each in missing:
        with contextlib.suppress(OSError):  # another launcher uses it now
            each.rmdir()


def write_config_and_versions(run_dir: Path, config: RunConfig, versions: dict) -> None:
    """Write config.toml, which the trainer reads, and versions.json. Raises StorageError."""
    with _writing(run_dir):
        write_whole(run_dir / "config.toml", config.as_toml().encode())
        write_whole(run_dir / "versions.json", (json.dumps(versions, indent=1) + "\n").encode())


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
    """Return Python, packages, commit, GPUs, driver and system settings, for versions.json."""
    changes = changes_of(root)
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": package_versions(root),
        "commit": commit_of(root),
        "dirty": None if changes is None else bool(changes),
        "gpus": [str(device) for device in gpus.devices],
        "driver": gpus.driver or None,
        "system_tuning": settings.state(),
    }


def package_versions(root: Path) -> dict[str, str]:
    """Return name -> version of the installed packages that a run may use."""
    names = [name for name, _ in requirements(root / "requirements.txt")] + list(OPTIONAL)
    installed = {name: version_of(name) for name in names}
    return {name: version for name, version in installed.items() if version}
