"""Rules for a result set: the submitted files result_<n>.txt of one folder.

Standard library only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from common.errors import ConfigError
from common.records import mlperf_log
from common.records.rcp import SUBMISSION_RUNS
from common.records.windows import MAY_FAIL
from submission import official_tools, rounds
from submission.examined_log import NOT_CLEAN, ExaminedLog, verdict_of
from submission.findings import ERROR, NOTE, WARNING, Finding
from submission.log_rules import DISCLOSURE_KEYS, seed_identity
from submission.run import NUMBERED_LOG, numbered_logs

UNREADABLE = "line_format"  # rule of lines that the official parser cannot read
READ_BY_RCP = ("submission_benchmark", "global_batch_size")
HYPERPARAMETERS = (
    "opt_base_learning_rate",
    "opt_learning_rate_warmup_steps",
    "opt_learning_rate_warmup_factor",
    "opt_learning_rate_training_steps",
    "gradient_accumulation_steps",
    *DISCLOSURE_KEYS,
)
# Keys that all logs of a set must have with one value, source and severity of the rule. A published
# set of v4.0 differs in its platform, one of v4.1 in its organization.
SAME = (
    (READ_BY_RCP, "RCP rcp_checker.py", ERROR),
    (HYPERPARAMETERS, "TR Benchmark Results: consistent over the runs", ERROR),
    (
        ("submission_org", "submission_platform", "submission_status"),
        "TR Benchmark Results: consistent over the runs",
        WARNING,
    ),
)


def folders(logs: Iterable[Path]) -> dict[Path, list[ExaminedLog]]:
    """Return an empty list of examined logs for each folder that holds a result set."""
    return {path.parent: [] for path in logs if NUMBERED_LOG.fullmatch(path.name)}


def shown_rounds(folder: Path) -> list[str]:
    """Return the rounds that the readable logs of the result set in `folder` show."""
    shown = []
    for path in numbered_logs(folder):
        with contextlib.suppress(ConfigError):
            shown.append(rounds.round_of(mlperf_log.read(path, ())))
    return shown


def findings(logs: Sequence[ExaminedLog]) -> list[Finding]:
    """Return the findings about the logs as a set: number, round, equal values and seeds."""
    logs = [examined for examined in logs if NUMBERED_LOG.fullmatch(examined.path.name)]
    findings = []
    if len(logs) != SUBMISSION_RUNS:
        message = f"{len(logs)} logs; a result set has {SUBMISSION_RUNS}"
        findings.append(Finding(0, "number", message, "TR Benchmark Results"))
    if not logs:
        return findings
    shown = [(examined.path.name, examined.shown_round) for examined in logs]
    if message := rounds.difference(shown, logs[0].verdict.rules):
        findings.append(Finding(0, "round", message, "TR Results Resubmission", NOTE))
    if bypassed := official_tools.bypasses(logs[0].path.parent):
        message = f"{', '.join(sorted(bypassed))}: the package checker leaves out this check"
        findings.append(Finding(0, "bypass", message, "CC package_checker.py", NOTE))
    power = logs[0].path.parent / "power"
    if power.exists():
        message = f"{power} is not checked; the official tools read it: {official_tools.BY_HAND}"
        findings.append(Finding(0, "power", message, "power_measurement.adoc", NOTE))
    for keys, source, severity in SAME:
        for key in keys:
            if message := _difference(logs, key):
                findings.append(Finding(0, "different", message, source, severity))
    return [*findings, *_wrong_seeds(logs)]


def _difference(logs: Sequence[ExaminedLog], key: str) -> str:
    """Return a message if two logs have different values of `key`, else "".

    The RCP checker also refuses a log without a key that it reads.
    """
    first = logs[0]
    for other in logs[1:]:
        values = [first.values.get(key), other.values.get(key)]
        if values[0] != values[1] and (key in READ_BY_RCP or None not in values):
            return (
                f"the logs differ in {key}: {first.path.name} has {values[0]!r},"
                f" {other.path.name} has {values[1]!r}"
            )
        if values[0] is None:
            first = other
    return ""


def _wrong_seeds(logs: Sequence[ExaminedLog]) -> Iterator[Finding]:
    """Yield findings about seeds that the official seed checker refuses or cannot read."""
    first_with: dict[tuple, str] = {}
    for examined in logs:
        log = examined.path.name
        for complaint in examined.verdict.complaints:
            if complaint.rule == UNREADABLE:
                message = f"{log}: the seed checker crashes at line {complaint.line}"
                yield Finding(0, "seed", f"{message}: {complaint.message}", "SEED")
                break
        identities = [seed_identity(event) for event in examined.seeds]
        if not identities or None in identities:
            yield Finding(0, "seed", f"{log} has no seed that the seed checker can read", "SEED")
        for identity in filter(None, identities):
            other = first_with.setdefault(identity, log)
            if other != log:
                message = f"{other} and {log} have the same seed {identity[-1]}"
                source = "SEED; TR Random numbers: the runs are independent"
                yield Finding(0, "seed", message, source)
        if len({*identities}) < len(identities):
            message = f"{log} has the same seed twice, from the same line of code"
            yield Finding(0, "seed", message, "SEED")


def verdict(logs: Sequence[ExaminedLog], werror: bool = False) -> str:
    """Return CLEAN, ACCEPTED or NOT_CLEAN for the set.

    The findings of a run that did not converge do not count, if the rules allow this run.
    """
    if len(not_converged(logs)) > MAY_FAIL:
        return NOT_CLEAN
    counted = findings(logs)
    for examined in logs:
        if examined.converged:
            counted += examined.findings
    return verdict_of(counted, werror)


def not_converged(logs: Sequence[ExaminedLog]) -> list[str]:
    """Return the names of the logs that count as runs that did not converge.

    The official tools count a log that the compliance checker refuses as one of them.
    """
    return [examined.path.name for examined in logs if not examined.converged]
