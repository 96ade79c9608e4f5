"""Conventions of the logs that this project writes, stricter than the MLPerf rules.

They exclude lines that RunLog cannot write, and lines that our submissions must not contain. They
apply to our own logs only. A violation there is an error: RunLog has a bug, or the log was edited.

A log of the open division is ours if its directory has a config of this project. Another log is
ours if its division is miniature, or if its config_filename has the form of the names in configs/.
Standard library only.
"""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path

from common import benchmarks
from common.benchmarks import OPEN, Rules
from common.errors import ConfigError
from common.records import json_lines
from common.records.mlperf_log import TOKEN, Event, Log
from common.records.run_record import EVENTS
from common.training.log_keys import STATUS_WORDS
from common.training.mllog import END, POINT, START
from submission import compliance_checker
from submission.clock_rules import CLOCK_KEYS
from submission.findings import (
    WARNING,
    OnAllRecords,
    RecordTest,
    Rule,
    Violations,
    on_all_records,
    on_records,
    wrong_values,
)
from submission.log_rules import is_positive_int, resumed_at

# For example MI355X_1x8.toml. launch/selection/check.py adds one of CHANGED to the name if needed.
CONFIG_NAME = re.compile(r"\w+_\d+x\d+(\+[a-z]+)*\.toml")
CHANGED = ("+derived", "+modified", "+forced")
# Bash's $RANDOM is below this. So is one of 130,000 random 32-bit seeds, and therefore a small seed
# is only a warning.
SMALL_SEED = 2**15
WELL_KNOWN_SEEDS = frozenset(
    {123456, 1234567, 12345678, 123456789, 1234567890, 2**31 - 1, 2**32 - 1, 0xDEADBEEF, 0xCAFEBABE}
)
SUBMISSION_KEYS = tuple(
    f"submission_{part}" for part in ("benchmark", "org", "division", "status", "platform")
)
EVENT_TYPES = {
    f"{name}_{end}": kind
    for name in ("init", "run", "block", "eval")
    for end, kind in (("start", START), ("stop", END))
}
ONCE_KEYS = ("cache_clear", *CLOCK_KEYS)  # keys of every log, besides the initialization's
COUNTED_KEYS = ("block_start", "block_stop", "eval_start", "eval_accuracy", "eval_stop", "run_stop")
# State -> key -> next state. In each state, the keys that are not listed are out of order.
TRANSITIONS = {
    "nothing": {"cache_clear": "nothing", "init_start": "init"},
    "init": {"init_stop": "ready"},
    "ready": {"run_start": "running"},
    "running": {"block_start": "block", "eval_start": "eval", "run_stop": "stopped"},
    "block": {"block_stop": "running"},
    "eval": {"eval_accuracy": "evaluated", "eval_stop": "evaluation broken off"},
    "evaluated": {"eval_stop": "running"},
    "evaluation broken off": {"run_stop": "stopped"},
}


def is_ours(log: Log) -> bool:
    """Return whether this project wrote `log` (see the top of this file)."""
    name = log.value("config_filename")
    division = log.value("submission_division")
    if division == OPEN:
        return benchmarks.rules_of_log("", OPEN, log.folder) is not None
    return division == "miniature" or (
        isinstance(name, str) and CONFIG_NAME.fullmatch(name) is not None
    )


def init_keys_of(log: Log) -> tuple[str, ...]:
    """Return the keys that our log `log` must have exactly once, during initialization."""
    if log.value("submission_division") == OPEN:
        return init_keys(benchmarks.open_benchmark(), OPEN)
    return init_keys(str(log.value("submission_benchmark")))


@cache
def init_keys(benchmark: str, division: str = "miniature") -> tuple[str, ...]:
    """Return the keys that one of our logs must have exactly once, during initialization.

    They are the keys in the division's rule file, and two that no checker requires.
    """
    template = compliance_checker.rule_template(benchmark, division).template
    keys = []
    for key in re.findall(r"NAME: (\w+)", template):
        if key not in (*ONCE_KEYS, *EVENT_TYPES, "eval_accuracy"):
            keys.append(key)
    return (*keys, "seed", "submission_status")


def not_once(log: Log, rules: Rules) -> Violations:
    """Find keys of the clock and of the initialization that are missing or repeated."""
    for key in (*ONCE_KEYS, *init_keys_of(log)):
        events = log.all(key)
        if not events:
            yield 0, f"{key} is missing"
        for event in events[1:]:
            yield event.line, f"{key} is repeated; its first line is {events[0].line}"


def prefixed(event: Event) -> str:
    """Return a message if the line of `event` has text before the token, else ""."""
    if not event.prefix or TOKEN in event.prefix:
        return ""
    return f"{event.prefix[:40]!r} before the token"


def wrong_event_type(event: Event) -> str:
    """Return a message if the event type of `event` does not fit its key, else ""."""
    wanted = EVENT_TYPES.get(event.key, POINT)
    if event.event_type == wanted:
        return ""
    return f"{event.key} is logged as {event.event_type!r}, not {wanted}"


def order_test(log: Log, rules: Rules) -> RecordTest:
    """Return a test that finds records that do not follow TRANSITIONS.

    The initialization comes first. Then every block and every evaluation ends before the next one
    begins, and run_stop is last.
    """
    state = "nothing"
    early = {"target_accuracy", *init_keys_of(log)}

    def out_of_order(event: Event) -> str:
        nonlocal state
        if state == "stopped":
            return f"{event.key} after run_stop"
        if event.key in early:
            return "" if state == "init" else f"{event.key} outside init_start .. init_stop"
        if event.key in TRANSITIONS[state]:
            state = TRANSITIONS[state][event.key]
            return ""
        if event.key in ("cache_clear", *EVENT_TYPES, "eval_accuracy"):
            return f"{event.key} in state {state!r}"
        return ""

    return out_of_order


def time_test(log: Log, rules: Rules) -> RecordTest:
    """Return a test that finds records with an earlier time than the record before them."""
    before = -math.inf

    def back_in_time(event: Event) -> str:
        nonlocal before
        milliseconds = before - event.time_ms
        before = event.time_ms
        if milliseconds > 0:
            return f"{event.key} is {milliseconds} ms before the previous line"
        return ""

    return back_in_time


def wrong_samples(log: Log, rules: Rules) -> Violations:
    """Find a samples_count that is not the number of sequences trained so far.

    RunLog counts after the optimizer step. The number is therefore a multiple of the global batch,
    and grows only at block_stop.
    """
    batch = log.value("global_batch_size")
    last = resumed_at(log)
    for event in log.events:
        if event.key not in COUNTED_KEYS:
            continue
        samples = event.samples
        if type(samples) is not int or samples < 0:
            yield event.line, f"{event.key} has samples_count {samples!r}"
            continue
        if is_positive_int(batch) and samples % batch:
            message = f"{event.key} at {samples}, not a multiple of the global batch of {batch}"
            yield event.line, message
        if samples < last or (samples > last and event.key != "block_stop"):
            yield event.line, f"{event.key} at {samples}, but {last} samples were trained so far"
        last = samples


def unlike_events(log: Log, rules: Rules) -> Violations:
    """Find an evaluation whose loss differs from the one in the run's events.jsonl.

    A run writes the same number to both files. Finds nothing in a folder without events.jsonl, such
    as a result set. Raises ConfigError if events.jsonl cannot be read.
    """
    if log.folder is None:
        return
    path = log.folder / EVENTS
    try:
        records, _ = json_lines.read(path)
    except OSError as error:
        do = "let this user read it, or check a copy of the log in a folder of its own"
        why = error.strerror or str(error)
        raise ConfigError(f"cannot read {path}", why, do) from error
    losses = {
        record["samples"]: record.get("loss")
        for record in records
        if record.get("event") == "eval" and type(record.get("samples")) is int
    }
    for event in log.all("eval_accuracy"):
        if type(event.samples) is not int or event.samples not in losses:
            continue
        loss = losses[event.samples]
        if event.value != loss:
            yield (
                event.line,
                f"eval_accuracy at {event.samples} is {event.value!r}, but {loss!r} in {EVENTS}",
            )


def resumed(event: Event, rules: Rules) -> str:
    """Return a message about a log that has the key resumed."""
    return (
        f"the run continued from a checkpoint at {event.value!r} samples:"
        " its minutes do not include the earlier run, and package refuses it"
    )


def chosen_seed(event: Event, rules: Rules) -> str:
    """Return a message if the seed was probably chosen by a person or has only 15 bits, else ""."""
    chosen = type(event.value) is int and (
        0 <= event.value < SMALL_SEED or event.value in WELL_KNOWN_SEEDS
    )
    if not chosen:
        return ""
    return f"seed {event.value} looks chosen, or drawn from 15 bits; use 32 random bits"


def own_rules(project_root: Path | None) -> tuple[Rule, ...]:
    """Return the rules for our own logs.

    `project_root`: the directory where the config that a log names must be a file, or None to skip
    that test.
    """

    def wrong_config(log: Log, rules: Rules) -> Violations:
        """Find a config that was changed, or that is not a file of the repository.

        Miniatures are exempt: they may run on any machine and with any change, because they cannot
        be submitted. `CPU_1x1+modified.toml` is a correct name there.
        """
        event = log.first("config_filename")
        if event is None or rules.division != "closed":
            return
        name = str(event.value)
        if any(mark in name for mark in CHANGED):
            yield (
                event.line,
                f"config_filename is {name!r}: derived, changed, or forced onto another GPU",
            )
        elif project_root:
            folder = f"configs/{log.value('submission_benchmark')}"
            is_file = Path(name).name == name and (project_root / folder / name).is_file()
            if not is_file:
                yield event.line, f"config_filename is {name!r}, which is not a file in {folder}/"

    return (*OWN_RULES, Rule("config_filename", wrong_config, "OWN; TR mandatory disclosure (6.1)"))


OWN_RULES = (
    Rule("once", not_once, "OWN; CC common.yaml"),
    Rule(
        "line_format",
        on_all_records(prefixed),
        "OWN (the official parser strips it)",
        WARNING,
        one_cause=True,
    ),
    Rule(
        "event_type", on_all_records(wrong_event_type), "OWN (no checker reads it)", one_cause=True
    ),
    Rule(
        "submission",
        wrong_values(
            lambda value: isinstance(value, str) and value.strip(), "text", *SUBMISSION_KEYS
        ),
        "OWN; CC common.yaml",
    ),
    Rule(
        "submission",
        wrong_values(
            STATUS_WORDS.__contains__, f"one of {' '.join(STATUS_WORDS)}", "submission_status"
        ),
        "OWN; CC common.yaml",
    ),
    Rule("order", OnAllRecords(order_test), "OWN; TR Run Results", one_cause=True),
    Rule("time", OnAllRecords(time_test), "OWN", one_cause=True),
    Rule("samples_count", wrong_samples, "OWN; TR RCP Rules", one_cause=True),
    Rule("events", unlike_events, "OWN; TR Run Results"),
    Rule(
        "resumed",
        on_records(resumed, "resumed"),
        "TR Run Results: a run is timed from run_start to run_stop",
        WARNING,
    ),
    Rule(
        "chosen_seed",
        on_records(chosen_seed, "seed"),
        "TR Random numbers (a constant seed is not allowed)",
        WARNING,
    ),
    Rule(
        "batch",
        wrong_values(
            is_positive_int, "a positive integer", "gradient_accumulation_steps", "train_samples"
        ),
        "OWN",
    ),
)
