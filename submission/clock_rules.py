"""Rules about the clock of a run: its start, its stop, and its reaching the target.

They apply to the log of any submitter. None of the 212 published result sets of both benchmarks in
rounds v4.0 to v5.1 breaks one of them (docs/submission.md). Their longest time from init_start to
run_start is 1,736 s. Sources are abbreviated as in submission/log_rules.py. Standard library only.
"""

from __future__ import annotations

from collections import defaultdict

from common.benchmarks import Rules
from common.records.mlperf_log import Event, Log
from submission.findings import NOTE, Rule, Violations
from submission.log_rules import reaches

CLOCK_KEYS = ("init_start", "init_stop", "run_start", "run_stop")
PLAUSIBLE_MS = (1e12, 1e13)  # 2001 to 2286, in milliseconds since 1970
LATE_MS = 1000  # tolerance, because several processes may write their lines out of order
SETUP_MS = 60_000  # from init_stop to run_start; up to 253 s in v6.0, up to 4 s before


def stopped_early(log: Log, rules: Rules) -> Violations:
    """Find a run_stop before the evaluation that reached the target, by line or by time.

    Times may differ by LATE_MS.
    """
    stop = log.first("run_stop")
    passing = next((event for event in log.all("eval_accuracy") if reaches(event, rules)), None)
    if stop is None or passing is None:
        return
    if stop.line < passing.line or passing.time_ms - stop.time_ms > LATE_MS:
        late_s = (passing.time_ms - stop.time_ms) / 1000
        message = (
            f"run_stop {late_s:.1f} s before the evaluation that reached the target"
            f" (line {passing.line})"
        )
        yield stop.line, message


def started_twice(log: Log, rules: Rules) -> Violations:
    """Find a second run_start with another time. A repeated line with the same time is accepted."""
    starts = log.all("run_start")
    for event in starts[1:]:
        if event.time_ms != starts[0].time_ms:
            seconds = (event.time_ms - starts[0].time_ms) / 1000
            yield event.line, f"second run_start, {seconds:.1f} s after line {starts[0].line}"
            return


def implausible_time(log: Log, rules: Rules) -> Violations:
    """Find the first record of CLOCK_KEYS whose time is outside PLAUSIBLE_MS."""
    low, high = PLAUSIBLE_MS
    for key in CLOCK_KEYS:
        for event in log.all(key):
            if not low <= event.time_ms <= high:
                message = f"{key}: time_ms {event.time_ms!r} is not in milliseconds since 1970"
                yield event.line, message
                return


def repeated_evaluation(log: Log, rules: Rules) -> Violations:
    """Find an evaluation repeated at the same samples_count until it reached the target."""
    missed: dict[object, list[Event]] = defaultdict(list)
    for event in log.all("eval_accuracy"):
        if type(event.samples) not in (int, float):
            continue
        if not reaches(event, rules):
            missed[event.samples].append(event)
        elif earlier := missed.get(event.samples):
            message = (
                f"evaluated again at {event.samples} samples until the target was reached;"
                f" line {earlier[0].line} missed it"
            )
            yield event.line, message
            return


def late_start(log: Log, rules: Rules) -> Violations:
    """Find a run_start after the maximum initialization time, which begins at any init_start.

    The official checker ends its measurement at init_stop.
    """
    start = log.first("run_start")
    begins = [event.time_ms for event in log.all("init_start")]
    if start and begins and start.time_ms - min(begins) > rules.init_limit_s * 1000:
        seconds = (start.time_ms - min(begins)) / 1000
        message = (
            f"run_start {seconds:.0f} s after the first init_start;"
            f" the clock starts after {rules.init_limit_s:.0f} s at the latest"
        )
        yield start.line, message


def pause_before_start(log: Log, rules: Rules) -> Violations:
    """Find a run_start more than SETUP_MS milliseconds after init_stop."""
    stop = log.first("init_stop")
    start = log.first("run_start")
    if stop and start and start.time_ms - stop.time_ms > SETUP_MS:
        seconds = (start.time_ms - stop.time_ms) / 1000
        yield start.line, f"run_start {seconds:.0f} s after init_stop"


RUN_RESULTS = "TR Run Results"  # name of the source
CLOCK = (
    Rule("run_stop", stopped_early, f"{RUN_RESULTS}: a run ends when the target is reached"),
    Rule("run_start", started_twice, f"{RUN_RESULTS} (the checker warns if the values are equal)"),
    Rule("clock", implausible_time, f"{RUN_RESULTS} (the checker accepts any number)"),
    Rule("repeated", repeated_evaluation, "TR Quality measure: one evaluation at each interval"),
    Rule("late_start", late_start, f"{RUN_RESULTS}: maximum model initialization time"),
    Rule("pause", pause_before_start, f"{RUN_RESULTS} (only the sum is limited)", NOTE),
)
