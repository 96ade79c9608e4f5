"""Rounds of MLPerf Training: the round that a log shows, and the ruleset that applies to logs.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from common.records.mlperf_log import Log
from submission import own_log
from submission.clock_rules import PLAUSIBLE_MS
from submission.log_rules import DISCLOSURE_KEYS
from submission.official_tools import CLOSED_RULESETS, DEADLINES, RULESETS

UNKNOWN = ""
LATER = f"later than {RULESETS[-1]}"  # a round whose ruleset the official tools do not have yet
ROUNDS = (UNKNOWN, *RULESETS, LATER)  # oldest first


def round_of(log: Log) -> str:
    """Return the newest round that `log` shows, by its keys or by its date: one of ROUNDS.

    Both are lower bounds, because a log may be submitted again in a later round. A log without a
    plausible date and without disclosure keys shows none: UNKNOWN.
    """
    return max(_round_by_keys(log), _round_by_date(log), key=ROUNDS.index)


def _round_by_keys(log: Log) -> str:
    disclosed = [key for key in DISCLOSURE_KEYS if log.all(key)]
    if len(disclosed) == len(DISCLOSURE_KEYS) or own_log.is_ours(log):
        return "6.1.0"
    return "6.0.0" if disclosed else UNKNOWN


def _round_by_date(log: Log) -> str:
    start = log.first("run_start") or log.first("init_start")
    if start is None or not PLAUSIBLE_MS[0] <= start.time_ms <= PLAUSIBLE_MS[1]:
        return UNKNOWN
    for ruleset, deadline in DEADLINES.items():
        end_of_day = datetime.fromisoformat(deadline).replace(tzinfo=UTC) + timedelta(days=1)
        if start.time_ms < end_of_day.timestamp() * 1000:
            return ruleset
    return LATER


def ruleset_of(rounds: Iterable[str]) -> str:
    """Return the ruleset of logs that show `rounds`: the newest round's, if it exists.

    A later round gets the newest ruleset. Unknown rounds get the oldest one with both benchmarks.
    """
    newest = max(rounds, key=ROUNDS.index, default=UNKNOWN)
    return {LATER: RULESETS[-1], UNKNOWN: CLOSED_RULESETS[0]}.get(newest, newest)


def difference(shown_by: Iterable[tuple[str, str]], ruleset: str) -> str:
    """Return a sentence if logs differ in round, or "".

    `shown_by`: the name of each log, and the round that it shows. `ruleset`: ruleset of all logs.
    """
    logs_of: dict[str, list[str]] = {}
    for name, shown in shown_by:
        if shown != UNKNOWN:
            logs_of.setdefault(shown, []).append(name)
    if len(logs_of) < 2:
        return ""
    parts = []
    for shown in sorted(logs_of, key=ROUNDS.index):
        names = logs_of[shown]
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        parts.append(f"{names[0]}{others}: {shown}")
    return f"the logs differ in round ({'; '.join(parts)}); ruleset {ruleset} is applied to all"
