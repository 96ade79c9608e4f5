"""`python -m submission.check LOG [--ruleset R]`: the official verdicts and our own findings about one log, as a table.

The official checker is asked for every ruleset we know, side by side. All must let the log pass; with --ruleset the one asked for
decides, and the others are there to see. A log of the miniature is held to the miniature's rules, unless --ruleset asks for the
closed ones. Exit code: 0 clean (warnings allowed), 20 findings, 2 wrong usage, 18 no official checker to ask.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from common.errors import CheckFailed, ConfigError, RunError
from submission import checker, lint


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="submission.check", description="Check one MLPerf log: official rules and our own.")
    parser.add_argument("log", type=Path, help="the result.txt of a run")
    known = ", ".join(checker.CLOSED_RULESETS)
    parser.add_argument("--ruleset", metavar="R", help=f"hold the log to this closed ruleset: {known}; default: to all")
    options = parser.parse_args(arguments)
    try:
        return check(options.log, options.ruleset)
    except RunError as error:
        print(error.lines(), file=sys.stderr)
        return error.exit_code


def check(path: Path, ruleset: str | None) -> int:
    """Print what is to be said about the log at `path`; return the exit code. Raises ConfigError, PreflightError."""
    if ruleset not in (None, *checker.CLOSED_RULESETS):
        why = "the official checker has no rules for these benchmarks there, and would break off"
        raise ConfigError(f"unknown ruleset {ruleset}", why, f"choose one of {', '.join(checker.CLOSED_RULESETS)}")
    if not path.is_file():
        raise ConfigError(f"{path}: no such log", "it is not a file", "name the result.txt in a run's directory")
    log = lint.Log(lint.parse(path)[0])
    division, benchmark = log.value("submission_division"), log.value("submission_benchmark")
    findings = [_as_of(ruleset, finding) for finding in lint.lint(path, division="closed" if ruleset else None)]
    print(f"{path}\n\nofficial checker (mlperf-logging {checker.checker_version()}; it counts lines from 0)")
    if ruleset is None and division == "miniature":
        print("  a miniature: no benchmark result, held to the project's own rule file")
        verdicts = [checker.miniature_verdict(path, str(benchmark))]
    else:
        verdicts = [checker.closed_verdict(path, name) for name in checker.CLOSED_RULESETS]
    print("\n".join(_verdict_lines(verdicts, ruleset)))
    print("\nour own checks")
    print("\n".join(_finding_lines(findings)))
    decisive = [verdict for verdict in verdicts if ruleset in (None, verdict.rules)]
    clean = all(verdict.passed for verdict in decisive) and all(finding.warning for finding in findings)
    print(f"\n{'CLEAN' if clean else 'NOT CLEAN'}")
    return 0 if clean else CheckFailed.exit_code


def _as_of(ruleset: str | None, finding: lint.Finding) -> lint.Finding:
    """What became mandatory with 6.1.0 cannot be missing in a log that is held to an earlier ruleset."""
    earlier = ruleset not in (None, checker.CLOSED_RULESETS[-1])
    new = finding.rule == "missing" and finding.source == lint.DISCLOSURE_SOURCE
    return dataclasses.replace(finding, warning=True) if earlier and new else finding


def _verdict_lines(verdicts: list[checker.Verdict], ruleset: str | None) -> list[str]:
    lines = []
    for verdict in verdicts:
        asked = "  <- asked for" if verdict.rules == ruleset else ""
        lines.append(f"  {verdict.rules:<10} {'passed' if verdict.passed else 'FAILED'}{asked}")
        lines += [f"             {message}" for message in verdict.messages]
    return lines


def _finding_lines(findings: list[lint.Finding]) -> list[str]:
    if not findings:
        return ["  no findings"]
    rows = [("line", "rule", "finding", "where the rule stands")]
    for finding in findings:
        message = f"(warning) {finding.message}" if finding.warning else finding.message
        rows.append((str(finding.line or "-"), finding.rule, message, finding.source))
    widths = [min(max(len(row[column]) for row in rows), limit) for column, limit in enumerate((6, 15, 80))]
    return ["  " + "  ".join((*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1])).rstrip() for row in rows]


if __name__ == "__main__":
    sys.exit(main())
