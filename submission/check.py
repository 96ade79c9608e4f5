"""`./run_and_time.sh check LOG_OR_FOLDER ... [--ruleset R] [--werror]`

The command prints the official verdict and our own findings about MLPerf logs. An error makes a log
NOT CLEAN. A warning breaks the text of the rules, but the official tools accept it: a log with only
warnings is ACCEPTED. A note is neither. A log without errors and warnings is CLEAN. Each finding
names its line, rule and source.

Logs that this project wrote must also follow its own conventions (submission/own_log.py). The
benchmark comes from the log. Without --ruleset, the round follows from the keys of the log and its
date, and a miniature is checked by the miniature's rules. With --ruleset, every log is checked by
that closed ruleset. A folder means all result*.txt below it. Files named result_*.txt are a result
set and are also checked together (submission/result_set.py).

Exit code: 0 no errors (and no warnings, with --werror), 20 errors, 2 wrong usage or no readable
log, 18 no official checker.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from common import benchmarks
from common.benchmarks import OPEN
from common.command_line import Parser, program
from common.errors import CheckFailed, ConfigError
from common.paths import ROOT
from common.records.mlperf_log import Log, read
from submission import official_tools, own_log, result_set
from submission.clock_rules import CLOCK, PLAUSIBLE_MS
from submission.examined import Examined, errors
from submission.log_rules import DISCLOSURE_KEYS, ERROR, NOTE, RULES, Finding, rules_of
from submission.official_tools import CLOSED_RULESETS, RULESETS
from submission.terminal import plural

CLEAN = "CLEAN"
ACCEPTED = "ACCEPTED"
NOT_CLEAN = "NOT CLEAN"
# Day by which the logs of a round were made. The keys do not identify these rounds, as later ones
# have the same. Sources of the days: submission deadlines and the published logs.
LAST_DAY = {"4.0.0": "2024-07-01", "4.1.0": "2025-01-01", "5.0.0": "2025-05-01"}


def parser(benchmark: str = "") -> Parser:
    parser = Parser(
        "check",
        "Check MLPerf logs with the official checker and with additional rules.",
        ["check results/llama31_8b/*/result.txt", "check DIR --json"],
    )
    parser.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="LOG_OR_FOLDER",
        help="log, or folder that contains result*.txt",
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
    logs = [log for path in paths for log in _logs(path)]
    sets = result_set.folders(logs) if any(path.is_dir() for path in paths) else {}
    title = f"official checker: mlperf-logging {official_tools.checker_version()}"
    if werror:
        title += ", warnings are errors (--werror)"
    if not as_json:
        print(title)
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
        findings = result_set.findings(members)
        codes.append(CheckFailed.exit_code if errors(findings, werror) else 0)
        if as_json:
            facts = {"folder": str(folder), "findings": [_as_dict(each) for each in findings]}
            print(json.dumps(facts))
        elif findings:
            print(f"\n{folder}", *_finding_lines(folder.name, findings, werror), sep="\n")
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


def verdict_of(findings: Sequence[Finding], werror: bool = False) -> str:
    """Return CLEAN, ACCEPTED or NOT_CLEAN. With `werror`, warnings count as errors."""
    if errors(findings, werror):
        return NOT_CLEAN
    return ACCEPTED if any(finding.warning for finding in findings) else CLEAN


def _logs(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    logs = [log for log in path.rglob("result*.txt") if log.is_file()]
    if not logs:
        raise ConfigError(
            f"{path}: no log",
            "there is no result*.txt in it",
            "name a log, or the folder of a run or of a result set",
        )
    return sorted(logs, key=lambda log: (log.parent, len(log.name), log.name))


def examine(
    path: Path,
    ruleset: str | None = None,
    project_root: Path | None = ROOT,
    ours: bool | None = None,
) -> Examined:
    """Return the official verdict and all findings about the log at `path`.

    `ruleset`: ruleset of the closed division, or None to choose by the log's keys. `project_root`:
    directory where the config that a log of ours names must be a file, or None to skip that test.
    `ours`: whether the conventions of this project's logs apply, or None to decide by the log.
    Raises ConfigError if the file is not a readable log, PreflightError without a checker.
    """
    log = read(path)
    if not log.events and not log.bad:
        raise ConfigError(
            f"{path} is not an MLPerf log",
            "it has no line with :::MLLOG",
            "name a log, or the folder of a run or of a result set",
        )
    division = log.value("submission_division")
    benchmark = log.value("submission_benchmark")
    ours = own_log.is_ours(log) if ours is None else ours
    rules = rules_of(log) if ruleset is None else None
    unofficial = division == "miniature" or (
        division == OPEN and benchmark == benchmarks.open_benchmark()
    )
    if rules is not None and unofficial:
        title = "a miniature, not a benchmark result"
        if division == OPEN:
            title = "open division, checked by its config.toml; not an MLPerf benchmark"
        verdict = official_tools.own_verdict(path, str(benchmark), rules, log)
    else:
        applied = ruleset or round_of(log, ours)
        title = f"{division} division, ruleset {applied}"
        if not ruleset:
            title += " (detected)"
        verdict = official_tools.closed_verdict(path, applied, log)
    findings = list(verdict.complaints) + rule_findings(
        log, ours, "closed" if ruleset else None, project_root
    )
    in_order = tuple(sorted(findings, key=lambda finding: finding.line))
    return Examined(path, f"{benchmark}, {title}", verdict, in_order, tuple(log.all("seed")))


def rule_findings(
    log: Log, ours: bool, division: str | None = None, project_root: Path | None = None
) -> list[Finding]:
    """Return the findings of our own rules, which the official checker does not test.

    `division`: division whose rules apply (default: the one that the log names). `ours` and
    `project_root` are those of `examine`.
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
    applied = (*RULES, *CLOCK, *own)
    return [finding for rule in applied for finding in rule.findings(log, rules, ours)]


def round_of(log: Log, ours: bool) -> str:
    """Return the latest closed ruleset whose keys `log` has, or that of its date if in doubt.

    Our own logs have the keys of all rounds. The keys of 5.1.0 are optional in 6.0.0 and vice
    versa.
    """
    disclosed = [key for key in DISCLOSURE_KEYS if log.all(key)]
    if ours or len(disclosed) == len(DISCLOSURE_KEYS):
        return CLOSED_RULESETS[-1]
    if disclosed:
        return "6.0.0"
    start = log.first("run_start")
    if start and start.time_ms > PLAUSIBLE_MS[0]:
        for ruleset, end in LAST_DAY.items():
            if start.time_ms < _milliseconds(end):
                return ruleset
    return "5.1.0" if log.all("submission_org") or log.all("submission_platform") else "5.0.0"


def _milliseconds(day: str) -> float:
    return datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp() * 1000


def _json_line(examined: Examined, werror: bool) -> str:
    verdict = verdict_of(examined.findings, werror)
    about = {
        "path": str(examined.path),
        "title": examined.title,
        "verdict": verdict,
        "clean": verdict != NOT_CLEAN,
    }
    return json.dumps(about | {"findings": [_as_dict(finding) for finding in examined.findings]})


def _as_dict(finding: Finding) -> dict:
    return asdict(finding) | {"warning": finding.warning}


def lines(examined: Examined, werror: bool) -> list[str]:
    """Return the lines to print about one log: title, official verdict, findings, our verdict."""
    official = examined.verdict
    warned = sum(complaint.warning for complaint in official.complaints)
    words = "FAILED" if not official.passed or (werror and warned) else "passed"
    if warned:
        words += f", {plural(warned, 'warning')}, errors with --werror"
    text = [f"\n{examined.path}", f"  {examined.title}; official checker: {words}"]
    text += _finding_lines(examined.path.name, examined.findings, werror)
    verdict = verdict_of(examined.findings, werror)
    failed = len(examined.errors(werror))
    warnings = sum(finding.warning for finding in examined.findings) - (failed if werror else 0)
    if verdict == ACCEPTED:
        return [*text, f"  {ACCEPTED}: 0 errors, {plural(warnings, 'warning')}"]
    return [*text, f"  {verdict}: {plural(failed, 'error')}, {plural(max(0, warnings), 'warning')}"]


def _finding_lines(name: str, findings: Iterable[Finding], werror: bool) -> list[str]:
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
