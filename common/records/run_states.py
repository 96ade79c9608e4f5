"""The states of a run, and the words for each of them in every command. Standard library only.

A state is the `kind` of an attempt in the ledger (common/records/ledger.py), the `kind` in
failure.json, RUNNING or NOT_STARTED. `RunRecord.state` in run_record.py decides it.
"""

from __future__ import annotations

RUNNING = "running"
GOOD = "success"  # the target was reached and the log passed its checks
LOST = "lost"
MISSED = "target_missed"
INTERRUPTED = "interrupted"  # by a signal
UNCLEAN = "check_failed"
NOT_STARTED = "not_started"  # of a log without a ledger, which ends before run_start
# Reason of an attempt that has no end in the ledger.
NO_END = "the ledger has no entry of its end"

WORDS = {
    GOOD: "target reached",
    RUNNING: "running",
    LOST: "lost: its launcher was killed",
    MISSED: "did not converge",
    INTERRUPTED: "interrupted",
    UNCLEAN: "target reached, log not clean",
    NOT_STARTED: "never started its clock",
    "non_finite": "loss not finite",
    "out_of_memory": "out of memory",
    "hang": "hung",
    "rank_lost": "lost a rank",
    "data": "data error",
    "weights": "weights error",
    "storage": "storage error",
    "config": "config error",
    "preflight": "machine not ready",
    "internal": "internal error",
}


def words(state: str, has_target: bool = True) -> str:
    """Return the description of a state, or the state itself if it is unknown.

    `has_target`: whether the run had a target to reach.
    """
    text = WORDS.get(state, state)
    return text if has_target else text.replace(WORDS[GOOD], "finished")
