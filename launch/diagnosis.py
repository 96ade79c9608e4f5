"""Diagnosis of a run that ended: the result in its log, which rank failed first, and why.

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
from collections.abc import Iterable
from pathlib import Path

from common.errors import (
    Hang,
    Interrupted,
    RankLost,
    RunError,
    StorageError,
    TargetMissed,
    disk_reason,
    write_record,
)
from common.records.run_record import RunRecord
from launch import flight_recorder
from launch.run_directory import PATIENCE_S

RETRY_S = 0.5  # between attempts to read the log


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL. Real-time signals have only numbers."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def read_result(path: Path) -> RunRecord:
    """Return the run in the log at `path`.

    An unreadable log raises no error, because every attempt needs an entry in the ledger. Reading
    is tried again for PATIENCE_S seconds if the disk fails.
    """
    end = time.monotonic() + PATIENCE_S
    run = RunRecord.read(path)
    while disk_error(run) and time.monotonic() <= end:
        time.sleep(RETRY_S)
        run = RunRecord.read(path)
    return run


def disk_error(run: RunRecord) -> str:
    """Return why the log of `run` cannot be read, if the disk is the cause, else ""."""
    return disk_reason(run.unreadable)


def diagnose(run_dir: Path, world_size: int) -> tuple[RunError, dict]:
    """Return the error of the rank that failed first, and a dict with `rank`, `step` and `time`.

    The dict lacks values that are unknown.
    """
    records = {
        rank: _read_json(run_dir / "ranks" / f"rank_{rank}.json", {}) for rank in range(world_size)
    }
    exits: dict[int, dict] = {}  # torchrun's entries by rank
    for path in run_dir.glob("torchrun*.json"):
        for entry in _read_json(path, []):
            exits[entry["rank"]] = entry
    # A rank whose failure is secondary only noticed that another one was gone.
    primary = [record for record in records.values() if not record.get("secondary")]
    if failed := _earliest(primary, "failed"):
        return _as_error(failed), failed
    silent = _first_silent_rank(records, exits)
    if silent is not None:
        beat = _read_json(run_dir / "ranks" / f"rank_{silent}.heartbeat", {})
        return _died_silently(silent, run_dir, exits.get(silent)), {**beat, "rank": silent}
    if other := _earliest(records.values(), "interrupted") or _earliest(records.values(), "failed"):
        return _as_error(other), other
    return RunError(
        "the processes ended for an unknown reason",
        "no rank left a failure record",
        f"please report this with {run_dir}/torchrun.log",
    ), {}


def _earliest(records: Iterable[dict], outcome: str) -> dict | None:
    """Return the earliest record with this outcome, None if there is none."""
    chosen = [record for record in records if record.get("outcome") == outcome]
    return min(chosen, key=lambda record: record.get("time", 0), default=None)


def _first_silent_rank(records: dict[int, dict], exits: dict[int, dict]) -> int | None:
    """Return the rank without a record that died first, None if every rank has a record.

    Such a rank was killed from outside, or died before the trainer handled signals. torchrun ends
    the other ranks with SIGTERM. Where there is another candidate, a rank that died of SIGTERM, or
    that torchrun does not list, is therefore a victim.
    """
    silent = [rank for rank, record in records.items() if not record]
    if exits:
        silent = [rank for rank in silent if rank in exits]

    def victims_last(rank: int) -> tuple[bool, float]:
        entry = exits.get(rank, {})
        return entry.get("exit_code") == -signal.SIGTERM, entry.get("time", 0)

    return min(silent, key=victims_last, default=None)


def ended_normally(run_dir: Path) -> bool:
    """Return whether rank 0, which writes all files of a run, wrote its last one."""
    return _read_json(run_dir / "ranks" / "rank_0.json", {}).get("outcome") == "done"


def after_the_run(failure: RunError, run_dir: Path) -> RunError:
    """Return `failure` of the processes as a late error, after a run whose result stands.

    If rank 0 did not end normally, a file is missing or incomplete, such as the model of --save.
    The error is then a StorageError.
    """
    if ended_normally(run_dir) or isinstance(failure, Interrupted):
        return failure
    if failure.kind == StorageError.kind:
        return failure
    return StorageError(
        f"a model, adapter or checkpoint may be missing: {failure.what}", failure.why, failure.do
    )


def write_failure(run_dir: Path, error: RunError, failed_rank: dict) -> None:
    """Write failure.json: kind, exit_code, what, why, do, and rank, step and time if known.

    `failed_rank`: the dict that `diagnose` returns, {} if no rank is known. `time` is in seconds
    since 1970. The record of a hang also lists the collectives that hang. No OSError is raised:
    without the directory, the failure is only on stderr and in the ledger.
    """
    known = {key: failed_rank.get(key) for key in ("rank", "step")}
    if error.kind == Hang.kind and (stuck := flight_recorder.stuck(run_dir)):
        error.why += f"; {flight_recorder.sentence(stuck[0])}"
        known["collectives"] = stuck
    text = json.dumps(
        {**error.as_dict(), **known, "time": failed_rank.get("time", time.time())}, indent=1
    )
    try:
        write_record(run_dir, "failure.json", text + "\n")
    except OSError as problem:  # the failure itself must still be printed and recorded
        print(f"note: failure.json could not be written: {problem}", file=sys.stderr, flush=True)


def _as_error(record: dict) -> RunError:
    """Return the error that a rank recorded, with the rank in front."""
    # A missed target concerns all ranks at once.
    who = "" if record["kind"] == TargetMissed.kind else f"rank {record['rank']}: "
    error = RunError(who + record["what"], record.get("why", ""), record.get("do", ""))
    error.kind = record["kind"]
    error.exit_code = record["exit_code"]
    return error


def _died_silently(rank: int, run_dir: Path, entry: dict | None) -> RunError:
    """Return the error of a rank that left no record.

    `entry`: torchrun's entry for the rank, None if torchrun does not list it.
    """
    if entry is None:
        lines = [line for line in _read_text(run_dir / "torchrun.log").splitlines() if line.strip()]
        why = "torchrun reported no failure of this rank"
        if lines:
            why = f"the last line of torchrun.log is: {lines[-1][:300]}"
        return RankLost(f"rank {rank} ended without a message", why, f"see {run_dir}/torchrun.log")
    who = f"rank {rank} (process {entry['pid']})"
    code = entry["exit_code"]
    if code > 0:
        error = RunError(
            f"{who} ended with exit code {code} and left no record",
            "its message is above",
            "fix the cause that the message names",
        )
        for family in RunError.__subclasses__():
            # A family without its own code, such as Interrupted, has RunError's.
            if family.exit_code == code != RunError.exit_code:
                error.kind = family.kind
        error.exit_code = code
        return error
    if code == -signal.SIGKILL:
        return RankLost(
            f"{who} died without a message",
            "SIGKILL: a user killed it, or the kernel did because the host, container or job ran "
            "out of memory (see dmesg)",
            "free host memory, or raise the limit of the container or job; then start again",
        )
    end = signal_name(-code) if code < 0 else "exit code 0"
    return RankLost(
        f"{who} died without a message",
        f"{end}: a crash in native code, or a lost device",
        "check the GPU and the kernel log",
    )


def _read_json(path: Path, default):
    with contextlib.suppress(ValueError):
        return json.loads(_read_text(path))
    return default


def _read_text(path: Path) -> str:
    """Return the text of the file, "" if it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""
