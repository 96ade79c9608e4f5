"""The findings about a log, as lines for the screen and as JSON objects."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from common.records.windows import MAY_FAIL
from common.terminal import plural
from submission import result_set
from submission.examined_log import NOT_CLEAN, ExaminedLog, verdict_of
from submission.findings import ERROR, Finding


def json_line(examined: ExaminedLog, werror: bool) -> str:
    """Return the JSON object of --json about one log."""
    verdict = verdict_of(examined.findings, werror)
    report = {
        "path": str(examined.path),
        "title": examined.title,
        "verdict": verdict,
        "clean": verdict != NOT_CLEAN,
        "findings": [as_dict(finding) for finding in examined.findings],
    }
    return json.dumps(report)


def as_dict(finding: Finding) -> dict:
    """Return the JSON object of --json about one finding."""
    return asdict(finding) | {"warning": finding.warning}


def lines(examined: ExaminedLog, werror: bool) -> list[str]:
    """Return the lines to print about one log: title, official verdict, findings, our verdict."""
    return [
        f"\n{examined.path}",
        f"  {title_line(examined, werror)}",
        *finding_lines(examined.path.name, examined.findings, werror),
        f"  {summary_line(examined, werror)}",
    ]


def set_lines(
    folder: Path, members: Sequence[ExaminedLog], werror: bool, as_json: bool
) -> list[str]:
    """Return the lines to print about the result set in `folder`, or its JSON object."""
    findings = result_set.findings(members)
    verdict = result_set.verdict(members, werror)
    failed = result_set.not_converged(members)
    if as_json:
        report = {
            "folder": str(folder),
            "verdict": verdict,
            "not_converged": failed,
            "findings": [as_dict(finding) for finding in findings],
        }
        return [json.dumps(report)]
    counts = ""
    if failed:
        allowed = "which the rules allow" if len(failed) <= MAY_FAIL else f"at most {MAY_FAIL} may"
        number = "counts" if len(failed) == 1 else "count"
        counts = (
            f": {len(failed)} of {len(members)} {number} as not converged, {allowed}"
            f" ({', '.join(failed)})"
        )
    return [
        f"\n{folder}",
        *finding_lines(folder.name, findings, werror),
        f"  result set {verdict}{counts}",
    ]


def title_line(examined: ExaminedLog, werror: bool = False) -> str:
    """Return the title of the log and the verdict of the official checker."""
    official = examined.verdict
    official_warnings = sum(complaint.warning for complaint in official.complaints)
    failed = not official.passed or (werror and official_warnings > 0)
    words = "FAILED" if failed else "passed"
    if official_warnings:
        words += f", {plural(official_warnings, 'warning')}, errors with --werror"
    return f"{examined.title}; official checker: {words}"


def summary_line(examined: ExaminedLog, werror: bool = False) -> str:
    """Return our verdict and the numbers of errors and warnings."""
    verdict = verdict_of(examined.findings, werror)
    error_count = len(examined.errors(werror))
    warning_count = 0  # with --werror, warnings are among the errors
    if not werror:
        warning_count = sum(finding.warning for finding in examined.findings)
    counts = f"{plural(error_count, 'error')}, {plural(warning_count, 'warning')}"
    return f"{verdict}: {counts}"


def finding_lines(name: str, findings: Iterable[Finding], werror: bool = False) -> list[str]:
    """Return a line for each finding about the file `name`: severity, place, rule, message."""
    text = []
    for finding in findings:
        place = f"{name}:{finding.line}" if finding.line else name
        severity = ERROR if werror and finding.warning else finding.severity
        start = f"  {severity:<7}  {place:<18}  {finding.rule:<15}"
        text.append(f"{start}  {finding.message}  [{finding.source}]")
    return text
