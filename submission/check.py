"""Check MLPerf logs with the official checker and with additional rules.

Each log gets the verdict of the official compliance checker, and the findings of additional rules.
A log with an error is NOT CLEAN. A warning is a violation of the written rules that the official
tools accept: a log with warnings and no errors is ACCEPTED. A log without either is CLEAN, whether
it has notes or not. Each finding names its line, rule and source.

Logs that this project wrote must also follow its conventions (submission/own_log.py). The log names
its benchmark. Without --ruleset, the keys and the date of the log decide the ruleset, and a
miniature is checked by the miniature's rules. With --ruleset, every log is checked by that closed
ruleset. A folder stands for all result*.txt below it. Files named result_*.txt are a result set,
and are also checked together (submission/result_set.py).

Exit code 0 if no log has an error (with --werror: nor a warning), 20 if one has, 2 for wrong usage
or no readable log, 18 without the official checker. Nothing is written.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from common.command_line import Parser, program
from common.errors import CheckFailed, ConfigError
from common.terminal import plural
from submission import official_tools, result_set
from submission.examined_log import (
    ACCEPTED,
    CLEAN,
    NOT_CLEAN,
    ExaminedLog,
    errors,
    examine,
    verdict_of,
)
from submission.findings import ERROR, Finding
from submission.official_tools import RULESETS


def parser() -> Parser:
    """Return the argument parser of `check`."""
    parser = Parser(
        "check",
        __doc__,
        ["check results/llama31_8b/*/result.txt", "check DIR --json"],
    )
    parser.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="LOG_OR_FOLDER",
        help="log, or folder with result*.txt in it or below it",
    )
    parser.add_argument(
        "--ruleset", choices=RULESETS, help="MLPerf ruleset (default: detected from the log)"
    )
    parser.add_argument(
        "--werror",
        action="store_true",
        help="treat warnings as errors, including those of the official checker",
    )
    parser.add_argument(
        "--json", action="store_true", dest="as_json", help="print one JSON object per log"
    )
    return parser


def _check_all(paths: list[Path], ruleset: str | None, werror: bool, as_json: bool) -> int:
    """Check the logs at `paths`, print their verdicts, and return the exit code of the command.

    Raises ConfigError if a folder has no logs, PreflightError without the official checker.
    """
    logs: list[Path] = []
    for path in paths:
        logs += _logs(path)
    sets = result_set.folders(logs) if any(path.is_dir() for path in paths) else {}
    version = official_tools.checker_version()
    if not as_json:
        suffix = ", warnings are errors (--werror)" if werror else ""
        print(f"official checker: mlperf-logging {version}{suffix}")
    codes = []
    verdicts = []
    for path in logs:
        try:
            examined = examine(path, ruleset)
        except ConfigError as error:
            print(error.lines(), file=sys.stderr)
            codes.append(error.exit_code)
            continue
        print(_json_line(examined, werror) if as_json else "\n".join(lines(examined, werror)))
        codes.append(CheckFailed.exit_code if examined.errors(werror) else 0)
        verdicts.append(verdict_of(examined.findings, werror))
        if path.parent in sets:
            sets[path.parent].append(examined)
    for folder, members in sets.items():
        codes.append(_check_set(folder, members, werror, as_json))
    if len(logs) > 1 and not as_json:
        counts = ", ".join(
            f"{verdicts.count(verdict)} {verdict.lower()}"
            for verdict in (CLEAN, ACCEPTED, NOT_CLEAN)
        )
        print(f"\n{len(logs)} logs: {counts}")
    for code in (ConfigError.exit_code, CheckFailed.exit_code):
        if code in codes:
            return code
    return 0


def _check_set(folder: Path, members: list[ExaminedLog], werror: bool, as_json: bool) -> int:
    """Print the findings about the logs of `folder` as a result set; return the exit code."""
    findings = result_set.findings(members)
    if as_json:
        report = {"folder": str(folder), "findings": [_as_dict(finding) for finding in findings]}
        print(json.dumps(report))
    elif findings:
        print(f"\n{folder}", *finding_lines(folder.name, findings, werror), sep="\n")
    return CheckFailed.exit_code if errors(findings, werror) else 0


def _logs(path: Path) -> list[Path]:
    """Return the logs that `path` stands for: itself, or all result*.txt below a folder.

    Raises ConfigError if a folder has none.
    """
    if not path.is_dir():
        return [path]
    logs = [log for log in path.rglob("result*.txt") if log.is_file()]
    if not logs:
        raise ConfigError(
            f"{path}: no log",
            "there is no result*.txt in it or below it",
            "name a log, or the folder of a run or of a result set",
        )
    return sorted(logs, key=lambda log: (log.parent, len(log.name), log.name))


def _json_line(examined: ExaminedLog, werror: bool) -> str:
    """Return the JSON object of --json about one log."""
    verdict = verdict_of(examined.findings, werror)
    report = {
        "path": str(examined.path),
        "title": examined.title,
        "verdict": verdict,
        "clean": verdict != NOT_CLEAN,
        "findings": [_as_dict(finding) for finding in examined.findings],
    }
    return json.dumps(report)


def _as_dict(finding: Finding) -> dict:
    return asdict(finding) | {"warning": finding.warning}


def lines(examined: ExaminedLog, werror: bool) -> list[str]:
    """Return the lines to print about one log: title, official verdict, findings, our verdict."""
    return [
        f"\n{examined.path}",
        f"  {title_line(examined, werror)}",
        *finding_lines(examined.path.name, examined.findings, werror),
        f"  {summary_line(examined, werror)}",
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


main = program(parser, lambda options: _check_all(**vars(options)))

if __name__ == "__main__":
    sys.exit(main())
