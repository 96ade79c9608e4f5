"""`python -m submission.check LOG [--ruleset R]`: the official verdicts and our own findings about one log, as a table.

Exit code: 0 clean, 20 findings, 2 wrong usage, 18 no official checker to ask. A log of the miniature is held to the
miniature's rules, unless --ruleset asks for the closed ones.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from common.errors import CheckFailed, ConfigError, RunError
from submission import checker, lint


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="submission.check", description="Check one MLPerf log: official rules and our own.")
    parser.add_argument("log", type=Path, help="the result.txt of a run")
    parser.add_argument("--ruleset", choices=checker.CLOSED_RULESETS, help="only this closed ruleset; default: all of them")
    options = parser.parse_args(arguments)
    try:
        return check(options.log, options.ruleset)
    except RunError as error:
        print(error.lines(), file=sys.stderr)
        return error.exit_code


def check(path: Path, ruleset: str | None) -> int:
    """Print what is to be said about the log at `path`; return the exit code. Raises ConfigError, PreflightError."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such log", "it is not a file", "name the result.txt in a run's directory")
    log = lint.Log(lint.parse(path)[0])
    division, benchmark = log.value("submission_division"), log.value("submission_benchmark")
    findings = lint.lint(path, division="closed" if ruleset else None)
    print(f"{path}\n\nofficial checker (mlperf-logging {checker.checker_version()}; it counts lines from 0)")
    if ruleset is None and division == "miniature":
        print("  a miniature: no benchmark result, held to the project's own rule file")
        verdicts = [checker.miniature_verdict(path, str(benchmark))]
    else:
        verdicts = [checker.closed_verdict(path, name) for name in ([ruleset] if ruleset else checker.CLOSED_RULESETS)]
    print("\n".join(_verdict_lines(verdicts)))
    print("\nour own checks")
    print("\n".join(_finding_lines(findings)))
    clean = all(verdict.passed for verdict in verdicts) and all(finding.warning for finding in findings)
    print(f"\n{'CLEAN' if clean else 'NOT CLEAN'}")
    return 0 if clean else CheckFailed.exit_code


def _verdict_lines(verdicts: list[checker.Verdict]) -> list[str]:
    lines = []
    for verdict in verdicts:
        lines.append(f"  {verdict.rules:<10} {'passed' if verdict.passed else 'FAILED'}")
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
