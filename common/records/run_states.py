"""Descriptions of the states of a run, for screens, pages and tables. Standard library only.

A state is the `kind` of an attempt in the ledger (common/records/ledger.py), the `kind` in
failure.json, or RUNNING.
"""

from __future__ import annotations

RUNNING = "running"
GOOD = "success"  # the target was reached and the log passed its checks
LOST = "lost"
# Reason of an attempt that has no end in the ledger.
NO_END = "its launcher ended without an entry in the ledger"

WORDS = {
    GOOD: "target reached",
    RUNNING: "running",
    LOST: "lost: its launcher was killed",
    "target_missed": "did not converge",
    "interrupted": "interrupted",
    "check_failed": "target reached, log not clean",
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
