"""A run as the rules of MLPerf see it: its ruleset, the official verdict, and what it counts for.

The record of the run (common/records/run_record.py) says what happened in it. Standard library
only, except for mlperf-logging, which decides whether a log is accepted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from common import benchmarks
from common.benchmarks import OPEN
from common.errors import ConfigError, disk_reason
from common.records import run_states
from common.records.run_record import RunRecord
from submission import compliance_checker, rcp, rounds

NUMBERED_LOG = re.compile(r"result_\d+\.txt")  # a log in a result set
# How a run counts for a score, as docs/submission.md names it.
GOOD = "good"
FAILED = "did not converge"
LOST = "lost"
NOT_STARTED = run_states.WORDS[run_states.NOT_STARTED]


@dataclass(eq=False)
class Run(RunRecord):
    """A run, and what it counts for."""

    shown_round: str = ""  # the newest round that the log shows (submission/rounds.py)
    ruleset: str = ""  # for its log; in a series, for all logs

    def _fill(self) -> None:
        if self.unreadable and disk_reason(self.unreadable):
            raise self.unreadable  # what a command says of a run must not depend on a disk
        super()._fill()
        self.shown_round = rounds.round_of(self.log)
        self.ruleset = rounds.ruleset_of([self.shown_round])

    @property
    def point(self) -> rcp.ReferencePoint | None:
        """The reference convergence point at the run's global batch.

        None for a miniature, for the open division, and if there is no point at that batch.
        """
        if self.batch is None or self.rules is None or self.rules.division != "closed":
            return None
        return rcp.point_at(self.benchmark, self.batch, self.ruleset)

    @cached_property
    def refused(self) -> tuple[str, ...]:
        """Reasons why the official compliance checker refuses the log.

        Empty for a log without official rules: of a miniature, or of no MLPerf benchmark.
        """
        unofficial = self.division == OPEN and self.benchmark == benchmarks.open_benchmark()
        if self.is_miniature or unofficial:
            return ()
        return compliance_checker.closed_verdict(self.path, self.ruleset).messages

    @property
    def state(self) -> str:
        """The state of the record. The official checker is asked about a log without a ledger.

        The launcher has asked it about the others.
        """
        state = super().state
        unasked = state == run_states.GOOD and not (self.start or self.failure.get("kind"))
        return run_states.UNCLEAN if unasked and self.refused else state

    @cached_property
    def counts_as(self) -> str:
        """How the run counts for a score: GOOD, FAILED, LOST or NOT_STARTED.

        The log decides, because the ledger has no end of a run whose launcher was killed.
        """
        if not self.clock_started:
            if self.was_chosen:
                return FAILED
            lost_in_ledger = not self.end or self.end.get("kind") == run_states.LOST
            if self.start and lost_in_ledger and not self.log.events:
                return LOST  # nothing says that its clock never started
            return LOST if self.clock_started_in_ledger else NOT_STARTED
        if self.was_killed:
            return LOST
        return GOOD if self.has_result and not self.refused else FAILED

    @property
    def outcome(self) -> str:
        """The words of `state`, and how the run counts for a score where they do not tell it."""
        text = self.state_words
        good = self.state == run_states.GOOD and not self.converged
        not_started = self.counts_as == NOT_STARTED and not self.running
        if text != self.counts_as and (good or not_started):
            text += f"; for the score: {self.counts_as}"
        return text

    @property
    def converged(self) -> bool:
        return self.counts_as == GOOD

    @property
    def z(self) -> float | None:
        """Distance of `samples` from the reference mean, in standard deviations (`z_score`)."""
        return self.point.z_score(self.samples) if self.point and self.samples else None

    def describe(self) -> str:
        """Return one line about the run: number, outcome, and its result or why it is not good."""
        result = self.reason
        if self.converged:
            result = f"{self.minutes:.2f} min, {self.samples:,} samples"
        line = f"attempt {self.number:>2}  {self.outcome}"
        return f"{line}, {result}" if result else line

    @property
    def reason(self) -> str:
        """Why the run does not count as good, or what failed after run_stop, or "". One line."""
        if self.has_result and not self.running and self.refused:
            return f"the official checker refuses its log: {self.refused[0]}"
        return self.cause


def numbered_logs(folder: Path) -> list[Path]:
    """Return the logs of the result set in `folder`, by number: result_0.txt, result_1.txt, ...

    Other files, such as an official tool's result_summarizer_6.1.0.txt, are no logs.
    """
    logs = [path for path in folder.glob("result_*.txt") if NUMBERED_LOG.fullmatch(path.name)]
    return sorted(logs, key=lambda path: (len(path.name), path.name))


def read_run(path: Path) -> Run:
    """Return the run in the log at `path`.

    Raises ConfigError if it is not an MLPerf log of one of our benchmarks.
    """
    run = Run.read(path)
    if run.unreadable:
        raise run.unreadable
    if run.benchmark not in benchmarks.names():
        raise ConfigError(
            f"{path} is not a log of {' or '.join(benchmarks.names())}",
            f"its submission_benchmark is {run.benchmark or 'missing'}",
            "name MLPerf result logs",
        )
    return run
