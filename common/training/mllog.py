"""RunLog: the MLPerf log of a run, with one method per event.

Only rank 0 writes. On other ranks, a RunLog checks the same order of events but writes nothing, so
that callers need not test the rank. A line goes to the result file in one unbuffered, checked
write, and then to stdout. The file must not exist: no run overwrites or continues the log of
another. Times come from the monotonic clock, anchored once to wall time, so that a clock correction
during a run cannot change its result.

Line format: mlcommons/logging, mllog/mllog.py. Content: MLPerf Training rules, which
`submission.check` verifies. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from common.errors import ConfigError, NonFinite, StorageError
from common.paths import ROOT
from common.records import json_lines
from common.records.mlperf_log import TOKEN

# The RCP checker finds its events by these substrings anywhere in a line, not by key. If the name
# of a file or system contained one, the checker would misread that line. TOKEN is in the list
# because the parser strips a line up to its last token.
RESERVED_SUBSTRINGS = (
    "global_batch_size",
    "submission_benchmark",
    "eval_accuracy",
    "eval_error",
    TOKEN,
)

POINT = "POINT_IN_TIME"
START = "INTERVAL_START"
END = "INTERVAL_END"
# A key of this project, only in logs of runs with an emulated format. `package` refuses such logs.
EMULATED_KEY = "emulated_block_format"
STDOUT_FD = 1

Scalar = bool | int | float | str
Value = Scalar | dict[str, Scalar] | None


class RunLog:
    """The MLPerf log of one run.

    Methods assert the order of events, because a wrong order is a programming error. `samples` is
    always the number of training sequences consumed so far, counted after the optimizer step (steps
    x global batch size). Methods raise StorageError if a line cannot be written, NonFinite if a
    value is NaN or infinite, and ConfigError if a text would mislead the official checkers.
    """

    def __init__(self, path: Path | None, clock: Callable[[], int] | None = None):
        """Create `path`, which must not exist. None: this rank does not write.

        `clock`: returns the milliseconds since the epoch of an invented log, which is not copied to
        stdout. None: the time of this machine.
        """
        self._clock = clock or _steady_clock()
        self._file = None if path is None else LineFile(path)
        # Lines are copied to stdout, unless stdout is closed and the file has got its descriptor.
        self._copies = clock is None and self._file is not None and self._file.fd != STDOUT_FD
        # The states: created, cache_clear, init, submission, seed, hyperparameters, ready, running;
        # then running -> block -> running, running -> eval -> evaluated -> running, and stopped.
        self._state = "created"
        self._samples = 0
        self._run_start_ms = 0

    # Before the clock.

    def cache_clear(self, done: bool) -> None:
        """Log whether the page cache was dropped before this run."""
        self._write(POINT, "cache_clear", done, after="created", enter="cache_clear")

    def init_start(self) -> None:
        """Log the start of initialization, before any model exists."""
        self._write(START, "init_start", after="cache_clear", enter="init")

    def submission(
        self, *, benchmark: str, org: str, platform: str, division: str, status: str
    ) -> None:
        """Log the keys of the submission. Raises ConfigError if one is empty.

        `division`: closed, open, or miniature for the toy model.
        `status`: one of STATUS_WORDS (common/training/log_keys.py).
        """
        pairs = {
            "benchmark": benchmark,
            "org": org,
            "division": division,
            "status": status,
            "platform": platform,
        }
        for name, value in pairs.items():
            if not value.strip():
                raise ConfigError(
                    f"submission_{name} is empty",
                    "the compliance checker refuses an empty text",
                    f"name the {name}",
                )
            self._write(POINT, f"submission_{name}", value, after="init")
        self._state = "submission"

    def seed(self, seed: int) -> None:
        """Log the seed."""
        self._write(POINT, "seed", seed, after="submission", enter="seed")

    def hyperparameters(self, pairs: Iterable[tuple[str, Scalar]]) -> None:
        """Log (key, value) pairs in the given order, because the official checker expects one."""
        for key, value in pairs:
            self._write(POINT, key, value, after="seed")
        self._state = "hyperparameters"

    def resumed(self, samples: int, run: str) -> None:
        """Log that training continues at `samples` from a checkpoint of `run`.

        The key belongs to this project. No checker reads it, and submission.package refuses it.
        """
        self._write(POINT, "resumed", samples, {"run": run}, after="hyperparameters")
        self._samples = samples

    def init_stop(self) -> None:
        """Log the end of initialization, before any token file is opened."""
        self._write(END, "init_stop", after="hyperparameters", enter="ready")

    # On the clock.

    def run_start(self) -> None:
        """Start the clock. From now on, token files may be opened."""
        self._run_start_ms = self._write(START, "run_start", after="ready", enter="running")

    def block_start(self, samples: int) -> None:
        """Log the start of a block: the training up to the next evaluation."""
        self._count(START, "block_start", samples, after="running", enter="block")

    def block_stop(self, samples: int, throughput: float | None = None) -> None:
        """Log the end of a block. `throughput`: its training sequences/s, of all GPUs together."""
        assert type(samples) is int and samples >= self._samples, (
            f"samples went from {self._samples} to {samples}"
        )
        self._samples = samples
        self._count(END, "block_stop", samples, after="block", enter="running")
        if throughput is not None:  # for reviewers; no checker reads it
            self._count(
                POINT, "tracked_stats", samples, {"throughput": throughput}, after="running"
            )

    def eval_start(self, samples: int) -> None:
        """Log the start of an evaluation."""
        self._count(START, "eval_start", samples, after="running", enter="eval")

    def eval_accuracy(self, samples: int, loss: float) -> None:
        """Log the result of an evaluation. Raises NonFinite for NaN and infinity.

        `loss`: mean cross entropy in nats, as the benchmark defines it.
        """
        self._count(POINT, "eval_accuracy", samples, loss, after="eval", enter="evaluated")

    def eval_stop(self, samples: int) -> None:
        """Log the end of an evaluation."""
        self._count(END, "eval_stop", samples, after="evaluated", enter="running")

    def run_stop(self, samples: int, status: str) -> float:
        """Stop the clock and return the minutes since run_start. Call `close` after it.

        This line decides the result of the run. Later failures do not change it.

        `status`: success if the run reached its goal, aborted if it did not, for any reason.
        """
        assert status in ("success", "aborted"), status
        stop_ms = self._count(
            END, "run_stop", samples, after="running", enter="stopped", status=status
        )
        return (stop_ms - self._run_start_ms) / 60_000

    def close(self) -> None:
        """Sync the log to the disk and close it, after its last line. Raises StorageError."""
        file = self._file
        self._file = None
        if file is not None:
            file.close()

    def abort(self, samples: int) -> None:
        """End the log of a failed run: close open intervals and write run_stop aborted.

        Before run_start, nothing is written. Further calls do nothing. If the lines cannot be
        written, a message on stderr says so, and no StorageError is raised: the first failure is
        the one to report.
        """
        try:
            if self._state == "block":
                self.block_stop(max(samples, self._samples))
            if self._state in ("eval", "evaluated"):
                self._count(END, "eval_stop", self._samples, after=self._state, enter="running")
            if self._state == "running":
                self.run_stop(self._samples, "aborted")
            self._state = "stopped"  # also before run_start
            self.close()
        except StorageError as error:
            print(error.lines(), file=sys.stderr, flush=True)

    # Writing.

    def _count(
        self,
        event_type: str,
        key: str,
        samples: int,
        value: Value = None,
        *,
        after: str,
        enter: str = "",
        **metadata: str,
    ) -> int:
        """Write a line with samples_count, which must be the current count. See `_write`."""
        assert samples == self._samples, (
            f"{key} at {samples} samples, but training is at {self._samples}"
        )
        return self._write(
            event_type, key, value, {"samples_count": samples, **metadata}, after=after, enter=enter
        )

    def _write(
        self,
        event_type: str,
        key: str,
        value: Value = None,
        metadata: dict | None = None,
        *,
        after: str,
        enter: str = "",
    ) -> int:
        """Write one line in the state `after` and enter the next one.

        Returns its time in milliseconds since the epoch.
        """
        assert self._state == after, f"the log is in state {self._state}, {key} belongs in {after}"
        time_ms = self._clock()
        record = {
            "namespace": "",
            "time_ms": time_ms,
            "event_type": event_type,
            "key": key,
            "value": value,
        }
        line = _encode({**record, "metadata": {**(metadata or {}), **_caller()}})
        if self._file is not None:
            self._file.write(line)
        # Before the copy to stdout, which may fail: the file has the line.
        self._state = enter or self._state
        if self._copies:
            self._copy_to_stdout(line)
        return time_ms

    def _copy_to_stdout(self, line: bytes) -> None:
        """Copy a line to stdout. If that fails, stop copying: only the file matters."""
        try:
            json_lines.write_all(STDOUT_FD, line)
        except OSError as error:  # the reader exited, or the terminal is closed
            self._copies = False
            note = f"note: cannot write the log to stdout: {error.strerror}; the file is complete"
            with contextlib.suppress(Exception):  # stderr may be closed too
                print(note, file=sys.stderr, flush=True)


def _steady_clock() -> Callable[[], int]:
    """Return a clock of milliseconds since the epoch that later corrections cannot move."""
    offset_ns = time.time_ns() - time.monotonic_ns()
    return lambda: (time.monotonic_ns() + offset_ns) // 1_000_000


class LineFile:
    """A new file to which whole lines are appended. A failed write leaves no partial line."""

    def __init__(self, path: Path):
        """Create the file. Raises StorageError if `path` exists or cannot be created."""
        self.path = path
        try:
            self.fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            raise StorageError(
                f"{path} exists already",
                "a run never overwrites or continues the log of another",
                "give the run a directory of its own",
            ) from None
        except OSError as error:
            raise _storage_error(path, error) from error

    def write(self, line: bytes) -> None:
        """Append a line. Raises StorageError."""
        try:
            json_lines.append(self.fd, line)
        except OSError as error:
            raise _storage_error(self.path, error) from error

    def close(self) -> None:
        """Sync the file to the disk and close it. Raises StorageError."""
        try:
            try:
                os.fsync(self.fd)
            finally:
                os.close(self.fd)
        except OSError as error:
            raise StorageError(
                f"the log {self.path} may not be on the disk",
                f"syncing it failed: {error.strerror} (errno {error.errno})",
                "check that the file is whole, and copy it to another disk",
            ) from error


def _storage_error(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot write the log to {path}",
        f"{error.strerror} (errno {error.errno})",
        "free space, or set LOGDIR to a folder on another disk",
    )


def _encode(record: dict) -> bytes:
    """Return `record` as a line of the log.

    The line is ASCII: JSON escapes newlines and all other characters. Raises NonFinite if a value
    is not finite, and ConfigError if the RCP checker would misread a text.
    """
    value = record["value"]
    parts = value.values() if isinstance(value, dict) else [value]
    for part in parts:
        assert part is None or type(part) in (bool, int, float, str), (
            f"{record['key']}: {type(part).__name__} is not a log value"
        )
        if isinstance(part, float) and not math.isfinite(part):
            raise NonFinite(
                f"{record['key']} is {part}",
                "a number that is not finite cannot be compared with the target",
                "look for the first bad loss or gradient norm in events.jsonl",
            )
    text = json.dumps(record, allow_nan=False)
    for word in RESERVED_SUBSTRINGS:
        if word in text and record["key"] != word:
            raise ConfigError(
                f"the log line of {record['key']} contains {word}",
                "the RCP checker finds its events by this text and would misread the line",
                "rename the file, system or organization",
            )
    return f"{TOKEN} {text}\n".encode("ascii")


def _caller() -> dict[str, str | int]:
    """Return file and line of the first caller outside this module, as mllog does.

    The seed checker of MLCommons compares them.
    """
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
    return {"file": name, "lineno": frame.f_lineno}
