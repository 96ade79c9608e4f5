"""Rules for a result set: the submitted files result_*.txt of one folder.

Standard library only.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from common.errors import ConfigError
from common.records import mlperf_log
from common.records.rcp import SUBMISSION_RUNS
from submission import rounds
from submission.examined_log import ExaminedLog
from submission.findings import NOTE, Finding
from submission.official_tools import BY_HAND

NAME = re.compile(r"result_.*\.txt")  # the pattern of the official tools
UNREADABLE = "line_format"  # rule of lines that the official parser cannot read


def folders(logs: Iterable[Path]) -> dict[Path, list[ExaminedLog]]:
    """Return an empty list of examined logs for each folder that holds a result set."""
    return {path.parent: [] for path in logs if NAME.fullmatch(path.name)}


def shown_rounds(folder: Path) -> list[str]:
    """Return the rounds that the readable logs of the result set in `folder` show."""
    shown = []
    for path in folder.glob("result_*.txt"):
        with contextlib.suppress(ConfigError):
            shown.append(rounds.round_of(mlperf_log.read(path, ())))
    return shown


def findings(logs: Sequence[ExaminedLog]) -> list[Finding]:
    """Return the findings about the logs as a set: number, round, power, benchmark, batch, seeds.

    The RCP checker refuses a set with different benchmarks or batches. The seed checker must be
    able to read the seeds, and no two logs may have the same one.
    """
    findings = []
    logs = [examined for examined in logs if NAME.fullmatch(examined.path.name)]
    if len(logs) != SUBMISSION_RUNS:
        message = f"{len(logs)} logs; a result set has {SUBMISSION_RUNS}"
        findings.append(Finding(0, "number", message, "TR Benchmark Results"))
    shown = [(examined.path.name, examined.shown_round) for examined in logs]
    if logs and (message := rounds.difference(shown, logs[0].verdict.rules)):
        findings.append(Finding(0, "round", message, "TR Results Resubmission", NOTE))
    for folder in {examined.path.parent for examined in logs}:
        if (folder / "power").exists():
            message = f"{folder / 'power'} is not checked; the official tools read it: {BY_HAND}"
            findings.append(Finding(0, "power", message, "power_measurement.adoc", NOTE))
    for key, values in {
        "submission_benchmark": [examined.benchmark for examined in logs],
        "global_batch_size": [examined.batch for examined in logs],
    }.items():
        others = [value for value in values if value != values[0]]
        if others:
            message = f"the logs differ in {key}: {values[0]} and {others[0]}"
            findings.append(Finding(0, "different", message, "RCP rcp_checker.py"))
    first_with: dict[tuple[str, str, str], str] = {}  # seed as the checker compares it -> log
    for examined in logs:
        log = examined.path.name
        for complaint in examined.verdict.complaints:
            if complaint.rule == UNREADABLE:
                message = f"{log}: the seed checker crashes at line {complaint.line}"
                findings.append(Finding(0, "seed", f"{message}: {complaint.message}", "SEED"))
                break
        for event in examined.seeds:
            file = str(event.metadata.get("file"))
            lineno = str(event.metadata.get("lineno"))
            other = first_with.setdefault((file, lineno, str(event.value)), log)
            if other != log:
                message = f"{other} and {log} have the same seed {event.value!r}"
                source = "SEED; TR Random numbers: the runs are independent"
                findings.append(Finding(0, "seed", message, source))
    return findings
