"""The official compliance checker of mlperf-logging: its verdict on one log.

The checker is called in this process, as the official package checker calls it. This is the only
way to get its complaints by key. If it crashes, for example with RecursionError, the log is
refused.

A miniature is checked by a rule file of this project, because the official files fix the sequence
length and the target. The same holds for a run in the open division that is not of an MLPerf
benchmark. The rule file has the closed rules, with the numbers of the run's division.
"""

from __future__ import annotations

import importlib
import json
import re
import string
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from common.benchmarks import OPEN, Rules
from common.errors import failure_of
from common.paths import ROOT
from common.records.mlperf_log import TOKEN, Event, Log, parse, read
from submission.findings import ERROR, WARNING, Finding
from submission.official_tools import CLOSED_RULESETS, RULESETS, checker_version, silent

NO_TARGET = 1e9  # target of rules without one: every evaluation reaches it
LARGE_LOG_BYTES = 16 * 2**20  # the checker reads the records of larger logs one by one
# Beginning of the reason that mlperf_log gives for a line that the official parser skips.
SKIPPED = "no blank after the token"


@dataclass(frozen=True)
class LogVerdict:
    """The verdict of the compliance checker on one log."""

    rules: str  # ruleset such as 6.1.0; "miniature" or "open" for a rule file of this project
    passed: bool
    # The rule of a complaint is missing, repeated, value, target, line_format or broke_off.
    complaints: tuple[Finding, ...] = ()

    @property
    def messages(self) -> tuple[str, ...]:
        """The messages of the complaints that are errors."""
        return tuple(complaint.message for complaint in self.complaints if not complaint.warning)


def closed_verdict(path: Path, ruleset: str, log: Log | None = None) -> LogVerdict:
    """Return the compliance checker's verdict on the log at `path` by a closed ruleset.

    `log`: the contents of the log, if it has already been read. Raises PreflightError without the
    checker, and StorageError if the disk fails.
    """
    return _verdict(path, ruleset, f"training_{ruleset}/common.yaml", log)


def own_verdict(path: Path, benchmark: str, rules: Rules, log: Log | None = None) -> LogVerdict:
    """Return the compliance checker's verdict on the log at `path` by this project's rule file.

    `rules`: the rules of the miniature, or of a run whose config sets them. `log`: as in
    `closed_verdict`. Raises PreflightError without the checker, and StorageError if the disk fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"{rules.division}_{benchmark}.yaml")
        file.write_text(rule_file(benchmark, rules))
        return _verdict(path, rules.division, str(file), log)


def rule_template(benchmark: str, division: str) -> string.Template:
    """Return the template of a rule file: the common part, then the part of `benchmark`."""
    common = Path(__file__).with_name("miniature_common.yaml")
    files = (common, ROOT / benchmark / f"{division}.yaml")
    return string.Template("\n".join(file.read_text() for file in files))


def rule_file(benchmark: str, rules: Rules) -> str:
    """Return the text of the rule file, with the fields of `rules` filled in."""
    fields = vars(rules) | {"target_loss": rules.target_loss or NO_TARGET}
    return rule_template(benchmark, rules.division).substitute(
        fields, benchmark=benchmark, init_limit_ms=rules.init_limit_s * 1000
    )


def _verdict(path: Path, rules: str, config: str, log: Log | None) -> LogVerdict:
    """Return the verdict by the rule file `config`, a path or a name in the checker's package."""
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
        if failure := failure_of(error):  # of the disk or memory, which says nothing about the log
            raise failure from error
        message = _no_verdict(error, rules)
        return LogVerdict(rules, False, (Finding(0, "broke_off", message, "CC mlp_compliance.py"),))
    finally:
        # After a crash, rule files are left in this list and would apply to the next log.
        mlp_compliance.enqueued_configs.clear()
    # Key, text and severity of each complaint. The checker keeps one text for a key, and the texts
    # without a key in a list.
    texts: list[tuple[str | None, str, str]] = []
    texts += [(key, text, ERROR) for key, text in checker.overwritable.items()]
    texts += [(None, text, ERROR) for text in checker.not_overwritable]
    texts += [(key, text, WARNING) for key, text in checker.warnings.items()]
    if not texts:
        return LogVerdict(rules, passed)
    log = log or read(path)
    complaints: list[Finding] = []
    for key, text, severity in texts:
        complaints += _complaints(log, rules, key, text, severity)
    return LogVerdict(rules, passed, tuple(complaints))


def _no_verdict(error: Exception, rules: str) -> str:
    """Return the message for a log on which the checker raised `error`."""
    path = Path(getattr(error, "filename", None) or "")
    if isinstance(error, FileNotFoundError) and path.suffix == ".yaml":
        # A log selects two rule files: <division>_common.yaml and <division>_<benchmark>.yaml.
        division, _, benchmark = path.stem.partition("_")
        subject = f"the {division} division"
        if benchmark != "common":
            subject = f"{benchmark} in {subject}"
        return f"no verdict: MLPerf ruleset {rules} has no rules for {subject}"
    why = f"{type(error).__name__} {str(error)[:200]}".strip()
    return f"the checker crashed without a verdict: {why}"


class StreamedLog:
    """The records of a log, read by the official parser. Each iteration parses the log again.

    `path`: path of the log. `parser`: the parser's module. `failed`: the lines that cannot be
    parsed, and why.
    """

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
        token = self.parser.TOKEN
        with open(self.path, encoding="latin-1") as file:
            for text in file:
                # The parser's regular expression takes ten times as long as its JSON. It returns a
                # line with one token, at its start, unchanged.
                lines = [text]
                if not text.startswith(token) or text.rfind(token) > 0:
                    lines = self.parser.strip_and_dedup(lines)
                for line in lines:
                    stripped = line.strip()
                    try:
                        yield self.parser.string_to_logline(number, stripped)
                    except ValueError as error:
                        failed.append((stripped, str(error)))
                    number += 1


@contextmanager
def bounded_memory(path: Path) -> Iterator[None]:
    """Make the compliance checker read a large log line by line inside the block.

    The functions that parse a line are its own. Its `parse_file` keeps all records in memory:
    1.8 GB for a log of 233 MB.
    """
    if path.stat().st_size < LARGE_LOG_BYTES:
        yield
        return
    from mlperf_logging.compliance_checker import mlp_parser

    def parse_file(filename: str, ruleset: str) -> tuple[StreamedLog, list[tuple[str, str]]]:
        name = f"{mlp_parser.__name__}.ruleset_{ruleset.replace('.', '')}"
        lines = StreamedLog(filename, importlib.import_module(name))
        return lines, lines.failed

    official = mlp_parser.parse_file
    mlp_parser.parse_file = parse_file
    try:
        yield
    finally:
        mlp_parser.parse_file = official


def _complaints(
    log: Log, rules: str, key: str | None, text: str, severity: str
) -> Iterator[Finding]:
    """Yield the findings in the complaint `text` of the checker about `key`, if it names one."""
    first_line = text.splitlines()[0]
    quoted = re.search(r"'(\w+)'", first_line)
    named = quoted[1] if quoted else "eval_accuracy"
    source = _source(rules, str(log.value("submission_benchmark")), key or named)
    events = log.all(key or "")
    if text.startswith("Log lines had parsing errors"):
        for bad in log.bad:
            if not bad.reason.startswith(SKIPPED):
                yield Finding(bad.line, "line_format", bad.reason, "CC mlp_parser/ruleset_610.py")
    elif text.startswith("Required "):
        if len(events) > 1:
            yield Finding(events[1].line, "repeated", first_line, source, severity)
        else:
            message = f"{key} is missing" if key and not events else first_line
            yield Finding(0, "missing", message, source, severity, key or named)
    elif text.startswith("Failed checks for"):
        evaluations = log.all("eval_accuracy")
        line = evaluations[-1].line if evaluations else 0
        yield Finding(line, "target", f"no evaluation reached the target: {first_line}", source)
    else:
        yield _wrong_value(events, key, text, source, severity)


def _wrong_value(
    events: list[Event], key: str | None, text: str, source: str, severity: str
) -> Finding:
    """Return the finding about a record that does not pass a test of the checker.

    `events`: the records of `key`. The checker numbers only its own lines, from 0, so the record is
    found by the time that the complaint quotes.
    """
    if not events:
        return Finding(0, "value", text.splitlines()[0], source, severity)
    times = _times(text)
    event = next((event for event in events if event.time_ms in times), events[0])
    message = text.splitlines()[0]
    test = re.search(
        r"^(?:failed test: (.*)|Failed executing CHECK code:\n(.*))$", text, re.MULTILINE
    )
    if test:
        rule = (test[1] or test[2] or "").strip()
        message = f"{key} is {_shown(event)}, the rule is: {rule}"
    return Finding(event.line, "value", message, source, severity)


def _times(text: str) -> set[float]:
    """Return the times, in ms, of the records that a complaint quotes."""
    quoted = [parse(0, line) for line in text.splitlines() if line.startswith(TOKEN)]
    return {record.time_ms for record in quoted if isinstance(record, Event)}


def _shown(event: Event) -> str:
    """Return the value of `event` and its metadata, shortened, for a message."""
    text = json.dumps(event.value)[:80]
    metadata = dict(event.metadata)
    for name in ("file", "lineno"):
        metadata.pop(name, None)
    if metadata:
        text += f" with {json.dumps(metadata)[:80]}"
    return text


@cache
def _source(rules: str, benchmark: str, key: str) -> str:
    """Return the name of the last rule file that has `key`, which overrides the earlier ones."""
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
