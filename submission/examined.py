"""The result of examining one log. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from common.records.mlperf_log import Event
from submission.log_rules import ERROR, Finding
from submission.official_tools import LogVerdict


@dataclass(frozen=True)
class Examined:
    """A log with its official verdict and all findings."""

    path: Path
    title: str  # benchmark, division and round
    verdict: LogVerdict  # official
    findings: tuple[Finding, ...]  # official and ours, sorted by line
    seeds: tuple[Event, ...] = ()

    def errors(self, werror: bool = False) -> list[Finding]:
        return errors(self.findings, werror)


def errors(findings: Iterable[Finding], werror: bool = False) -> list[Finding]:
    """Return the findings that fail a log: errors, and with `werror` warnings, but never notes."""
    return [
        finding for finding in findings if finding.severity == ERROR or (werror and finding.warning)
    ]
