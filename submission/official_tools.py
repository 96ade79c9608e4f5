"""The official tools of mlperf-logging: the compliance checker for a log, four for a submission.

The compliance checker is called in this process, as the official package checker calls it, because
only then its complaints come by key. A crash of it, RecursionError included, counts as a refusal.

The other four run as programs. They exit with 0 whatever they find. A tool therefore succeeded if
its output says so and contains nothing that contradicts it. The programs leave log files in their
working directory, so each runs in a temporary one.

A miniature is checked with a rule file of this project, because the official files fix the sequence
length and the target. So is a run in the open division that is not of an MLPerf benchmark. The rule
file has the closed rules with the numbers of the run's own division.
"""

from __future__ import annotations

import csv
import importlib
import json
import logging
import re
import string
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import ModuleType

from common import benchmarks
from common.benchmarks import OPEN, Rules
from common.errors import PreflightError
from common.packages import pip_install, version_of
from common.paths import ROOT
from common.records.mlperf_log import TOKEN, Event, Log, parse, read
from submission.log_rules import ERROR, WARNING, Finding

CLOSED_RULESETS = ("5.1.0", "6.0.0", "6.1.0")  # the rulesets that contain both benchmarks
RULESETS = ("4.0.0", "4.1.0", "5.0.0", *CLOSED_RULESETS)  # the older ones: llama2_70b_lora only
OLDEST_CHECKER = (4, 1, 68)  # 4.1.59 does not yet demand the nine disclosure keys of 6.1.0
NO_TARGET = 1e9  # a loss that every evaluation reaches
INSTALL = pip_install(f"mlperf-logging=={'.'.join(map(str, OLDEST_CHECKER))}")
LARGE_LOG_BYTES = 16 * 2**20  # from here on the checker gets the records one by one
# Start of the reason that mlperf_log gives for a line that the official parser skips.
UNSEEN = "no blank after the token"

BAD_LINE = re.compile(
    r"\bERROR\b|Traceback|^\w*(Error|Exception)\b|Skipping benchmark|CHECKS FAILED|FOUND ERRORS"
    r"|Compliance check failed in"
)


@dataclass(frozen=True)
class LogVerdict:
    """The verdict of the compliance checker on one log."""

    rules: str  # a ruleset such as 6.1.0, or miniature or open for a rule file of this project
    passed: bool
    # Their rule is missing, repeated, value, target, line_format or broke_off.
    complaints: tuple[Finding, ...] = ()

    @property
    def messages(self) -> tuple[str, ...]:
        """The messages of the complaints that are errors."""
        return tuple(complaint.message for complaint in self.complaints if not complaint.warning)


def closed_verdict(path: Path, ruleset: str, log: Log | None = None) -> LogVerdict:
    """Return the compliance checker's verdict on the log at `path` for a closed ruleset.

    `log`: the contents of the same log, if it has been read already. Raises PreflightError without
    a checker.
    """
    return _verdict(path, ruleset, f"training_{ruleset}/common.yaml", log)


def own_verdict(path: Path, benchmark: str, rules: Rules, log: Log | None = None) -> LogVerdict:
    """Return the compliance checker's verdict by this project's rule file for a division.

    `rules`: those of the miniature, or of a run whose config sets its rules. Raises PreflightError
    without a checker.
    """
    with tempfile.TemporaryDirectory() as folder:
        path_of_rules = Path(folder, f"{rules.division}_{benchmark}.yaml")
        path_of_rules.write_text(rule_file(benchmark, rules))
        return _verdict(path, rules.division, str(path_of_rules), log)


def miniature_verdict(path: Path, benchmark: str, log: Log | None = None) -> LogVerdict:
    """Return `own_verdict` by the rules of a benchmark's miniature."""
    return own_verdict(path, benchmark, benchmarks.divisions(benchmark)["miniature"], log)


def rule_template(benchmark: str, division: str) -> string.Template:
    """Return the rule file common to all miniatures, followed by the division's of `benchmark`."""
    common = Path(__file__).with_name("miniature_common.yaml")
    files = (common, ROOT / benchmark / f"{division}.yaml")
    return string.Template("\n".join(file.read_text() for file in files))


def rule_file(benchmark: str, rules: Rules) -> str:
    """Return the division's rule file, with the fields of `rules` substituted by name."""
    fields = vars(rules) | {"target_loss": rules.target_loss or NO_TARGET}
    return rule_template(benchmark, rules.division).substitute(
        fields, benchmark=benchmark, init_limit_ms=rules.init_limit_s * 1000
    )


def miniature_rules(benchmark: str) -> str:
    """Return the rule file of a benchmark's miniature."""
    return rule_file(benchmark, benchmarks.divisions(benchmark)["miniature"])


def checker_version() -> str:
    """Return the version of the installed mlperf-logging.

    Raises PreflightError if it is missing, or too old to demand the disclosure keys of 6.1.0.
    """
    if not (version := version_of("mlperf-logging")):
        why = f"{sys.executable} has no mlperf-logging"
        raise PreflightError("the official compliance checker is not installed", why, INSTALL)
    if tuple(int(part) for part in version.split(".")[:3] if part.isdigit()) < OLDEST_CHECKER:
        raise PreflightError(
            f"mlperf-logging {version} is too old",
            "it lets logs pass that lack the keys of 6.1.0",
            INSTALL,
        )
    return version


def _verdict(path: Path, rules: str, config: str, log: Log | None) -> LogVerdict:
    checker_version()
    # Imported here because most commands do not need it.
    from mlperf_logging.compliance_checker import mlp_compliance

    ruleset = rules if rules in RULESETS else CLOSED_RULESETS[-1]
    checker = mlp_compliance.make_checker("training", ruleset, quiet=False, werror=False)
    try:
        with silent(), bounded_memory(path):
            passed = mlp_compliance.main(str(path), config, checker)[0]
    # Any exception means that there is no verdict. The package checker would crash on it as well.
    except Exception as error:
        why = f"{type(error).__name__} {str(error)[:200]}".strip()
        return LogVerdict(
            rules,
            False,
            (
                Finding(
                    0,
                    "broke_off",
                    f"the checker crashed without a verdict: {why}",
                    "CC mlp_compliance.py",
                ),
            ),
        )
    finally:
        # After a crash, rule files are left in this list and would apply to the next log.
        mlp_compliance.enqueued_configs.clear()
    texts = [
        (key, text, ERROR)
        for key, text in (
            *checker.overwritable.items(),
            *((None, text) for text in checker.not_overwritable),
        )
    ]
    texts += [(key, text, WARNING) for key, text in checker.warnings.items()]
    log = log or (read(path) if texts else Log())
    return LogVerdict(
        rules,
        passed,
        tuple(complaint for text in texts for complaint in _complaints(log, rules, *text)),
    )


class RepeatedLines:
    """The records of a log as the official parser makes them, parsed again at each pass."""

    def __init__(self, path: str, parser: ModuleType):
        self.path = path
        self.parser = parser
        self.failed: list[tuple[str, str]] = []
        self.count = sum(1 for _ in self._records(self.failed))

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[object]:
        return self._records([])

    def _records(self, failed: list[tuple[str, str]]) -> Iterator[object]:
        number = 0
        with open(self.path, encoding="latin-1") as file:
            for text in file:
                for line in self.parser.strip_and_dedup([text]):
                    stripped = line.strip()
                    try:
                        yield self.parser.string_to_logline(number, stripped)
                    except ValueError as error:
                        failed.append((stripped, str(error)))
                    number += 1


@contextmanager
def bounded_memory(path: Path) -> Iterator[None]:
    """Let the compliance checker read a large log line by line, by its own parser's functions.

    Its `parse_file` holds every record: 1.8 GB for a log of 233 MB.
    """
    if path.stat().st_size < LARGE_LOG_BYTES:
        yield
        return
    from mlperf_logging.compliance_checker import mlp_parser

    def parse_file(filename: str, ruleset: str) -> tuple[RepeatedLines, list[tuple[str, str]]]:
        name = f"{mlp_parser.__name__}.ruleset_{ruleset.replace('.', '')}"
        lines = RepeatedLines(filename, importlib.import_module(name))
        return lines, lines.failed

    official = mlp_parser.parse_file
    mlp_parser.parse_file = parse_file
    try:
        yield
    finally:
        mlp_parser.parse_file = official


@contextmanager
def silent() -> Iterator[None]:
    """Suppress what the official modules write to the root logger, for the duration of the block.

    They would add a handler that prints if the root logger had none.
    """
    root = logging.getLogger()
    handler = logging.NullHandler()
    before = logging.root.manager.disable
    root.addHandler(handler)
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
        root.removeHandler(handler)


def _complaints(
    log: Log, rules: str, key: str | None, text: str, severity: str
) -> Iterator[Finding]:
    """Yield the findings in one complaint of the checker, which concerns `key` if it is given."""
    first = text.splitlines()[0]
    quoted = re.search(r"'(\w+)'", first)
    source = _source(
        rules,
        str(log.value("submission_benchmark")),
        key or (quoted[1] if quoted else "eval_accuracy"),
    )
    events = log.all(key or "")
    if text.startswith("Log lines had parsing errors"):
        for bad in log.bad:
            if not bad.reason.startswith(UNSEEN):
                yield Finding(bad.line, "line_format", bad.reason, "CC mlp_parser/ruleset_610.py")
    elif text.startswith("Required "):
        rule, line = ("repeated", events[1].line) if len(events) > 1 else ("missing", 0)
        yield Finding(
            line, rule, f"{key} is missing" if key and not events else first, source, severity
        )
    elif text.startswith("Failed checks for"):
        last = log.all("eval_accuracy")[-1:]
        yield Finding(
            last[0].line if last else 0,
            "target",
            f"no evaluation reached the target: {first}",
            source,
        )
    else:
        # The checker counts only its own lines, from 0, so the record is found by its quoted time.
        times = _times(text)
        event = next(
            (event for event in events if event.time_ms in times), events[0] if events else None
        )
        test = re.search(
            r"^(?:failed test: (.*)|Failed executing CHECK code:\n(.*))$", text, re.MULTILINE
        )
        message = (
            f"{key} is {_shown(event)}, the rule is: {(test[1] or test[2] or '').strip()}"
            if test and event
            else first
        )
        yield Finding(event.line if event else 0, "value", message, source, severity)


def _times(text: str) -> set[float]:
    """Return the times, in ms, of the records that a complaint quotes."""
    quoted = [parse(0, line) for line in text.splitlines() if line.startswith(TOKEN)]
    return {record.time_ms for record in quoted if isinstance(record, Event)}


def _shown(event: Event) -> str:
    metadata = {
        name: value for name, value in event.metadata.items() if name not in ("file", "lineno")
    }
    return json.dumps(event.value)[:80] + (f" with {json.dumps(metadata)[:80]}" if metadata else "")


@cache
def _source(rules: str, benchmark: str, key: str) -> str:
    """Return the name of the last rule file that names `key`. It overrides the earlier ones."""
    if rules in ("miniature", OPEN):
        return f"submission/miniature_common.yaml, {benchmark}/{rules}.yaml"
    from mlperf_logging import compliance_checker

    folder = Path(compliance_checker.__file__).parent / f"training_{rules}"
    files = [
        folder / f"{name}.yaml"
        for name in ("common", "closed_common", f"closed_{Path(benchmark).name}")
    ]
    entry = re.compile(rf"NAME:\s*{re.escape(key)}\s*$", re.MULTILINE)
    naming = [file.name for file in files if file.is_file() and entry.search(file.read_text())]
    return f"CC training_{rules}/{naming[-1] if naming else 'common.yaml'}"


# Tools for a whole submission.


@dataclass(frozen=True)
class Answer:
    """The verdict of one tool on one submission. Result sets are named by (system, benchmark)."""

    tool: str
    passed: bool
    complaints: tuple[str, ...]
    text: str  # everything that it printed
    # From the package checker: "passed", or the first complaint.
    verdicts: dict[tuple[str, str], str] = field(default_factory=dict)
    scores: dict[tuple[str, str], float] = field(default_factory=dict)  # summarizer only; minutes


def system_description(path: Path, ruleset: str) -> Answer:
    """Return the verdict of the system description checker on the file at `path`.

    Raises PreflightError if mlperf-logging is missing or too old, as do the functions below.
    """
    text = run_tool("system_desc_checker", str(path.resolve()), "training", ruleset)
    return _answer("system_desc_checker", text, "System description checker passed" in text)


def package(org_dir: Path, ruleset: str, sets: int, missed: int = 0) -> Answer:
    """Return the verdict of the package checker: number of files, compliance, seeds and RCP.

    `sets`: number of result sets in `org_dir`. `missed`: number of result sets with a run that did
    not converge, which olympic scoring forgives.

    The checker skips whatever it does not know, and forgives any one log. Here every result set
    must have passed its RCP test, and exactly `missed` logs must have been forgiven.
    """
    text = run_tool("package_checker", str(org_dir.resolve()), "training", ruleset)
    parts = re.split(r"Running compliance checks in dir (.+)\n", text)
    verdicts = {}
    for folder, said in zip(parts[1::2], parts[2::2], strict=True):
        bad = [
            line.strip()
            for line in said.splitlines()
            if re.search(r"^ERROR\b|Traceback|^\w*Error\b", line)
        ]
        verdict = "passed"
        if bad or "RCP Test Passed" not in said:
            verdict = (bad or ["no RCP test"])[0][:60]
        verdicts[Path(folder).parent.name, Path(folder).name] = verdict
    passed = (
        "PACKAGE CHECKER FOUND NO ERRORS, SUCCESS !" in text
        and len(verdicts) == sets
        and set(verdicts.values()) == {"passed"}
        and text.count("accepting this under olympic scoring") == missed
    )
    return replace(_answer("package_checker", text, passed), verdicts=verdicts)


def summary(org_dir: Path, ruleset: str, sets: int, missed: int = 0) -> Answer:
    """Return the summarizer's score of each result set, in minutes.

    The package checker must have run before if the scores are to include the RCP factor: it writes
    the factor, and the summarizer reads it. `sets` and `missed` are those of `package`.
    """
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "summary.csv")
        text = run_tool(
            "result_summarizer", str(org_dir.resolve()), "training", ruleset, "--csv", str(table)
        )
        rows = list(csv.DictReader(table.open())) if table.is_file() else []
    scores = {
        (Path(row["details_url"]).stem, name): float(row[name])
        for row in rows
        for name in benchmarks.names()
        if row.get(name)
    }
    forgiven = (
        text.count("Dropping non-converged run(s)")
        == missed
        == text.count("Compliance check failed in")
    )
    return replace(
        _answer("result_summarizer", text, len(scores) == sets and forgiven, missed), scores=scores
    )


def repository(org_dir: Path, ruleset: str) -> Answer:
    """Return the verdict of the repo checker on the files in `org_dir`."""
    text = run_tool("repo_checker", str(org_dir.resolve()), "training", ruleset)
    return _answer("repo_checker", text, "ALL CHECKS PASSED." in text)


def _answer(tool: str, text: str, said_success: bool, forgiven: int = 0) -> Answer:
    bad = [line.strip() for line in text.splitlines() if BAD_LINE.search(line)]
    passed = said_success and len(bad) <= forgiven
    complaints = (
        tuple(bad)
        if bad or passed
        else (f"{tool} did not report success; its output ends with: {text.strip()[-300:]!r}",)
    )
    return Answer(tool, passed, () if passed else complaints, text)


def run_tool(tool: str, *arguments: str) -> str:
    """Run a program of mlperf-logging in an empty directory; return its stdout and stderr."""
    checker_version()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", f"mlperf_logging.{tool}", *arguments]
        return subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder
        ).stdout
