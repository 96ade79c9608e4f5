"""The verdict and the findings of one log. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from common.records.mlperf_log import Event
from submission.compliance_checker import LogVerdict
from submission.findings import ERROR, Finding


@dataclass(frozen=True)
class ExaminedLog:
    """A log with its official verdict and all findings."""

    path: Path
    title: str  # benchmark, division and ruleset
    verdict: LogVerdict  # of the official compliance checker
    findings: tuple[Finding, ...]  # of the official checker and of our rules, sorted by line
    seeds: tuple[Event, ...] = ()  # the records of the key seed

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
