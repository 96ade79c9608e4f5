"""Findings about a log, and rules that find them.

A rule function yields the line and a message of each violation in a log. `Rule` adds the source and
the severity. `findings_of` applies rules to a log. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from common.benchmarks import Rules
from common.records.mlperf_log import Event, Log

ERROR = "error"  # forbidden by the rules, and absent from every accepted result
WARNING = "warning"  # breaks the written rules, but the official tools accept it
NOTE = "note"  # breaks no rule, but a reviewer may ask about it
# A warning in the logs of others, and an error in our logs, because RunLog never writes it.
WARNING_OF_OTHERS = "warning of others"

# Line (0: the log as a whole) and message of each violation.
Violations = Iterator[tuple[int, str]]
RuleFunction = Callable[[Log, Rules], Violations]
# Returns "" for a correct record, else a message.
RecordTest = Callable[[Event], str]


@dataclass(frozen=True)
class Finding:
    """A problem in a log, or a note about it."""

    line: int  # in the file, from 1; 0 means the log as a whole
    rule: str  # name of the rule
    message: str
    source: str  # of the rule
    severity: str = ERROR  # ERROR, WARNING or NOTE
    key: str = ""  # key that is missing according to the official checker, if that is the problem

    @property
    def warning(self) -> bool:
        return self.severity == WARNING


@dataclass(frozen=True)
class OnAllRecords:
    """A rule that tests every record of a log, including those that are not in memory.

    `new_test`: function that returns a test for one log. The test is called with each record in
    order, so it may have state.
    """

    new_test: Callable[[Log, Rules], RecordTest]


@dataclass(frozen=True)
class Rule:
    """A rule: the function that finds its violations, its source and its severity."""

    name: str
    find: RuleFunction | OnAllRecords
    source: str
    severity: str = ERROR
    # Whether all violations in a log usually have one cause. If so, only the first is reported,
    # with the number of the others.
    one_cause: bool = False


class RuleViolations:
    """The violations of one rule in one log.

    If they have one cause, only the first and the last are kept, because there may be one per line.
    """

    def __init__(self, rule: Rule):
        self.rule = rule
        self.kept: list[tuple[int, str]] = []
        self.count = 0

    def add(self, line: int, message: str) -> None:
        self.count += 1
        if self.rule.one_cause and len(self.kept) == 2:
            self.kept.pop()
        self.kept.append((line, message))

    def findings(self, ours: bool) -> Iterator[Finding]:
        """Yield the findings of the rule. `ours`: whether this project wrote the log."""
        rule = self.rule
        severity = rule.severity
        if severity == WARNING_OF_OTHERS:
            severity = ERROR if ours else WARNING
        reported = self.kept
        if rule.one_cause and self.count > 1:
            line, message = self.kept[0]
            last_line, _ = self.kept[-1]
            others = f"{self.count - 1} more of this kind, the last in line {last_line}"
            reported = [(line, f"{message}; {others}")]
        for line, message in reported:
            yield Finding(line, rule.name, message, rule.source, severity)


def findings_of(applied: Iterable[Rule], log: Log, rules: Rules, ours: bool) -> list[Finding]:
    """Return the findings of the rules `applied` in `log`, rule by rule in their order.

    `rules`: rules of the log's benchmark. `ours`: whether this project wrote the log. All tests of
    every record share one pass, because `Log.every` parses a large file again. For a log of 55 MB
    that takes 9.4 s of CPU time. With a pass for each test, it had not ended after 32 s.
    """
    violations_by_rule = [RuleViolations(rule) for rule in applied]
    record_tests: list[tuple[RecordTest, RuleViolations]] = []
    for violations in violations_by_rule:
        find = violations.rule.find
        if isinstance(find, OnAllRecords):
            record_tests.append((find.new_test(log, rules), violations))
            continue
        for line, message in find(log, rules):
            violations.add(line, message)
    for event in log.every():
        for test, violations in record_tests:
            message = test(event)
            if message:
                violations.add(event.line, message)
    findings: list[Finding] = []
    for violations in violations_by_rule:
        findings += violations.findings(ours)
    return findings


# Functions that make a rule function from a test of one record or of one value.


def on_records(test: Callable[[Event, Rules], str], *keys: str) -> RuleFunction:
    """Return a rule function that applies `test` to each record of `keys`.

    `test`: function that returns "" for a correct record, else a message.
    """

    def find(log: Log, rules: Rules) -> Violations:
        for event in chain.from_iterable(log.all(key) for key in keys):
            message = test(event, rules)
            if message:
                yield event.line, message

    return find


def on_all_records(test: RecordTest) -> OnAllRecords:
    """Return a rule that applies `test`, which has no state, to every record of a log."""
    return OnAllRecords(lambda log, rules: test)


def wrong_values(is_correct: Callable[[object], object], words: str, *keys: str) -> RuleFunction:
    """Return a rule function that finds the records of `keys` with an incorrect value.

    `is_correct`: function that returns whether a value is correct. `words`: description of a
    correct value, for the message.
    """

    def test(event: Event, rules: Rules) -> str:
        return "" if is_correct(event.value) else f"{event.key} is {event.value!r}, not {words}"

    return on_records(test, *keys)
