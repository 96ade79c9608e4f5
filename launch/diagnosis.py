"""Diagnosis of how a run ended: what its log says, which rank failed first, and why.

torchrun reports every failure with exit code 1 and usually names a victim. The ranks' own records
(`common.errors.write_rank_record`) say more. If a rank left no record, torchrun.json has its exit
code or signal (torchrun_<n>.json for node n).
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError, Hang, RankLost, RunError, TargetMissed, write_record
from common.records import mlperf_log
from launch import flight_recorder


@dataclass(frozen=True)
class RunResult:
    """Outcome of a run according to `result.txt`."""

    seconds: float | None = None  # from run_start to run_stop; None if one of them is missing
    status: str = ""  # "success", "aborted", or "" without a run_stop
    samples: int = 0
    started: bool = False  # whether the log has a run_start


def read_result(path: Path) -> RunResult:
    """Return what the log at `path` says, an empty Result if it is missing or damaged.

    An unreadable log raises no error, because each attempt needs an end in the ledger.
    """
    try:
        log = mlperf_log.read(path, repeated=())
    except (ConfigError, OSError):
        return RunResult()
    start = log.first("run_start")
    stop = log.first("run_stop")
    if stop is None:
        return RunResult(started=start is not None)
    seconds = (stop.time_ms - start.time_ms) / 1000 if start else None
    status = stop.metadata.get("status")
    return RunResult(
        seconds,
        status if isinstance(status, str) else "",
        stop.samples if type(stop.samples) is int else 0,
        start is not None,
    )


def diagnose(run_dir: Path, world_size: int) -> tuple[RunError, dict]:
    """Return the error of the rank that failed first, with its `rank`, `step` and `time`.

    Values that are not known are missing.
    """
    records = {
        rank: _read_json(run_dir / "ranks" / f"rank_{rank}.json", {}) for rank in range(world_size)
    }
    exits = {
        entry["rank"]: entry
        for path in run_dir.glob("torchrun*.json")
        for entry in _read_json(path, [])
    }

    def earliest(outcome: str, no_victims: bool = False) -> dict | None:
        ended = [
            each
            for each in records.values()
            if each.get("outcome") == outcome and not (no_victims and each.get("secondary"))
        ]
        return min(ended, key=lambda record: record.get("time", 0), default=None)

    if failed := earliest("failed", no_victims=True):
        return _as_error(failed), failed
    # A rank without a record was killed from outside, or died before the trainer handled signals.
    # torchrun ends the other ranks with SIGTERM. If there is another candidate, a rank that died of
    # SIGTERM, or that torchrun does not list, is therefore a victim.
    silent = [
        rank for rank, record in records.items() if not record and (rank in exits or not exits)
    ]
    if silent:
        rank = min(
            silent,
            key=lambda r: (
                exits.get(r, {}).get("exit_code") == -signal.SIGTERM,
                exits.get(r, {}).get("time", 0),
            ),
        )
        beat = _read_json(run_dir / "ranks" / f"rank_{rank}.heartbeat", {})
        return _died_silently(rank, run_dir, exits.get(rank)), {**beat, "rank": rank}
    if other := earliest("interrupted") or earliest("failed"):
        return _as_error(other), other
    what = "the processes ended without reaching the target and without a reason"
    return RunError(
        what,
        "no rank left a record of a failure",
        f"see {run_dir}/torchrun.log, and report this as a defect",
    ), {}


def finished(run_dir: Path, world_size: int) -> bool:
    """Return whether the ranks finished their work after the target was reached.

    Every rank must have ended normally. Ranks other than 0 may also have been interrupted. A rank
    that failed or vanished while it saved the model or a checkpoint counts as finished.
    """
    for rank in range(world_size):
        record, beat = (
            _read_json(run_dir / "ranks" / f"rank_{rank}.{kind}", {})
            for kind in ("json", "heartbeat")
        )
        if record.get("outcome") not in ("done", "interrupted" if rank else "done") and beat.get(
            "phase"
        ) not in ("save", "checkpoint"):
            return False
    return True


def write_failure(run_dir: Path, error: RunError, facts: dict) -> None:
    """Write failure.json: kind, exit_code, what, why, do, and rank, step and time if known.

    `time` is in seconds since 1970. A hang also has its collectives. This function does not raise
    OSError: if the directory is gone, the failure is only on stderr and in the ledger.
    """
    known = {key: facts.get(key) for key in ("rank", "step")}
    if error.kind == Hang.kind and (stuck := flight_recorder.stuck(run_dir)):
        error.why += f"; {flight_recorder.sentence(stuck[0])}"
        known["collectives"] = stuck
    text = json.dumps(
        {**error.as_dict(), **known, "time": facts.get("time", time.time())}, indent=1
    )
    try:
        write_record(run_dir, "failure.json", text + "\n")
    # The failure itself must still be printed and recorded in the ledger.
    except OSError as problem:
        print(f"note: failure.json could not be written: {problem}", file=sys.stderr, flush=True)


def _as_error(record: dict) -> RunError:
    # A missed target concerns all ranks at once.
    who = "" if record["kind"] == TargetMissed.kind else f"rank {record['rank']}: "
    error = RunError(who + record["what"], record.get("why", ""), record.get("do", ""))
    error.kind = record["kind"]
    error.exit_code = record["exit_code"]
    return error


def _died_silently(rank: int, run_dir: Path, ended: dict | None) -> RunError:
    if ended is None:
        lines = [line for line in _read_text(run_dir / "torchrun.log").splitlines() if line.strip()]
        why = (
            f"the last line of torchrun is: {lines[-1][:300]}"
            if lines
            else "torchrun did not see it fail"
        )
        return RankLost(f"rank {rank} ended without a message", why, f"see {run_dir}/torchrun.log")
    who = f"rank {rank} (process {ended['pid']})"
    code = ended["exit_code"]
    if code > 0:
        error = RunError(
            f"{who} ended with exit code {code} and left no record",
            "its own message stands above",
            "correct what that names",
        )
        error.kind = next(
            (family.kind for family in RunError.__subclasses__() if family.exit_code == code),
            error.kind,
        )
        error.exit_code = code
        return error
    if code == -signal.SIGKILL:
        why = (
            "SIGKILL: someone killed it, or the kernel did because the host ran out of memory "
            "(see dmesg)"
        )
        return RankLost(
            f"{who} died without a message", why, "make host memory free, then start again"
        )
    why = (
        f"{signal.Signals(-code).name if code < 0 else 'exit code 0'}: a crash in native code, or "
        "a device that was lost"
    )
    return RankLost(f"{who} died without a message", why, "check the GPU and the kernel log")


def _read_json(path: Path, default):
    with contextlib.suppress(ValueError):
        return json.loads(_read_text(path))
    return default


def _read_text(path: Path) -> str:
    """Return the text of the file, "" if it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""
