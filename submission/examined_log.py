"""Examine a log: the official verdict, and the findings of all rules.

Standard library only, except for mlperf-logging.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common import benchmarks
from common.benchmarks import OPEN
from common.errors import ConfigError
from common.paths import ROOT
from common.records.mlperf_log import Event, Log, read
from submission import compliance_checker, own_log, rounds
from submission.clock_rules import CLOCK
from submission.compliance_checker import LogVerdict
from submission.findings import ERROR, NOTE, Finding, findings_of
from submission.log_rules import (
    DISCLOSURE,
    DISCLOSURE_KEYS,
    DISCLOSURE_SOURCE,
    RULES,
    rules_of,
    undisclosed,
)
from submission.official_tools import DEADLINES

CLEAN = "CLEAN"
ACCEPTED = "ACCEPTED"
NOT_CLEAN = "NOT CLEAN"


@dataclass(frozen=True)
class ExaminedLog:
    """A log with its official verdict and all findings."""

    path: Path
    title: str  # benchmark, division and ruleset
    verdict: LogVerdict  # of the official compliance checker
    findings: tuple[Finding, ...]  # of the official checker and of our rules, sorted by line
    shown_round: str = ""  # the newest round that the log shows (submission/rounds.py)
    seeds: tuple[Event, ...] = ()  # the records of the key seed
    # Key -> its last value, which the RCP checker reads.
    values: Mapping[str, object] = field(default_factory=dict)
    # Whether the official tools count the run as one that reached the target.
    converged: bool = False

    def errors(self, werror: bool = False) -> list[Finding]:
        """Return the findings that fail the log. See the function of the same name."""
        return errors(self.findings, werror)


def errors(findings: Iterable[Finding], werror: bool = False) -> list[Finding]:
    """Return the findings that fail a log: errors and, with `werror`, also warnings."""
    failing = []
    for finding in findings:
        if finding.severity == ERROR or (werror and finding.warning):
            failing.append(finding)
    return failing


def verdict_of(findings: Sequence[Finding], werror: bool = False) -> str:
    """Return CLEAN, ACCEPTED or NOT_CLEAN. With `werror`, warnings count as errors."""
    if errors(findings, werror):
        return NOT_CLEAN
    return ACCEPTED if any(finding.warning for finding in findings) else CLEAN


def examine(
    path: Path,
    ruleset: str | None = None,
    project_root: Path | None = ROOT,
    ours: bool | None = None,
    set_rounds: Iterable[str] = (),
) -> ExaminedLog:
    """Return the official verdict and all findings about the log at `path`.

    `ruleset`: ruleset of the closed division, or None to choose it by the log's keys and date.
    `set_rounds`: rounds that the other logs of its result set show, which decide the ruleset, too.
    `project_root`: directory of the project, or None. The config that one of our logs names must
    exist in it; None skips that test. `ours`: whether this project wrote the log, so that its
    conventions apply, or None to decide by the log. Raises ConfigError if the file is not a
    readable log, PreflightError without the official checker.
    """
    log = read(path)
    if not log.events and not log.bad:
        raise ConfigError(
            f"{path} is not an MLPerf log",
            "no line contains :::MLLOG",
            "name a log, or the folder of a run or of a result set",
        )
    if ours is None:
        ours = own_log.is_ours(log)
    shown_round = rounds.round_of(log)
    title, verdict = _official_verdict(log, path, ruleset, [shown_round, *set_rounds])
    findings = [*verdict.complaints, *_unread_records(log, verdict), *_undisclosed(log, verdict)]
    findings += rule_findings(log, ours, "closed" if ruleset else None, project_root)
    findings.sort(key=lambda finding: finding.line)
    title = f"{log.value('submission_benchmark')}, {title}"
    return ExaminedLog(
        path,
        title,
        verdict,
        tuple(findings),
        shown_round,
        seeds=tuple(log.all("seed")),
        values={key: log.last(key) for key in log.by_key},
        converged=verdict.passed and _last_status(log) == "success",
    )


def _last_status(log: Log) -> object:
    """Return the status of the last run_stop, or None."""
    stops = log.all("run_stop")
    return stops[-1].metadata.get("status") if stops else None


def _official_verdict(
    log: Log, path: Path, ruleset: str | None, shown_rounds: list[str]
) -> tuple[str, LogVerdict]:
    """Return the division and the ruleset in words, and the official checker's verdict by them.

    `shown_rounds`: rounds that the log and its result set show. For the others see `examine`.
    """
    division = log.value("submission_division")
    benchmark = log.value("submission_benchmark")
    rules = rules_of(log) if ruleset is None else None
    unofficial = division == "miniature" or (
        division == OPEN and benchmark == benchmarks.open_benchmark()
    )
    if rules is not None and unofficial:
        title = "a miniature, not a benchmark result"
        if division == OPEN:
            title = "open division, checked by its config.toml; not an MLPerf benchmark"
        return title, compliance_checker.own_verdict(path, str(benchmark), rules, log)
    applied = ruleset or rounds.ruleset_of(shown_rounds)
    title = f"{division} division, ruleset {applied}"
    if not ruleset and rounds.LATER in shown_rounds:
        title += f" (the newest; the deadline of its round, {DEADLINES[applied]}, is past)"
    elif not ruleset:
        title += " (detected)"
    elif unofficial:
        title += " (without --ruleset: checked by its own rules)"
    return title, compliance_checker.closed_verdict(path, applied, log)


def _unread_records(log: Log, verdict: LogVerdict) -> list[Finding]:
    """Return a finding for each line that our rules cannot read and `verdict` does not name.

    The official parser accepts some of them, for example with the text "123" or NaN as time_ms.
    """
    named = {complaint.line for complaint in verdict.complaints}
    findings = []
    for bad in log.bad:
        if bad.line not in named and not bad.reason.startswith(compliance_checker.SKIPPED):
            findings.append(Finding(bad.line, "line_format", bad.reason, "OWN; CC mlp_parser"))
    return findings


def _undisclosed(log: Log, verdict: LogVerdict) -> list[Finding]:
    """Return a note about missing disclosure keys that the ruleset of `verdict` does not require.

    A log without any of them is of an earlier round.
    """
    missing = undisclosed(log)
    required = {complaint.key for complaint in verdict.complaints}
    if not 0 < len(missing) < len(DISCLOSURE_KEYS) or required & {*missing}:
        return []
    message = f"{len(missing)} of the {len(DISCLOSURE_KEYS)} disclosure keys are missing"
    message += f"; 6.1.0 also requires {', '.join(missing)}"
    return [Finding(0, DISCLOSURE, message, DISCLOSURE_SOURCE, NOTE)]


def rule_findings(
    log: Log, ours: bool, division: str | None = None, project_root: Path | None = None
) -> list[Finding]:
    """Return the findings of the rules that the official checker does not test.

    `division`: division whose rules apply (default: the one that the log names). `ours` and
    `project_root`: as in `examine`.
    """
    rules = rules_of(log, division)
    if rules is None:
        benchmark = log.value("submission_benchmark")
        named = log.value("submission_division")
        message = (
            "checked by the official checker only: no additional rules for"
            f" {benchmark!r} in division {named!r}"
        )
        return [Finding(0, "benchmark", message, "submission/log_rules.py", NOTE)]
    own = own_log.own_rules(project_root) if ours else ()
    return findings_of((*RULES, *CLOCK, *own), log, rules, ours)
