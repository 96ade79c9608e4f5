"""The states of a run in words: the same on screens, on pages and in tables. Standard library only.

A state is the `kind` of an attempt's end in the ledger (common/records/ledger.py), the `kind` of
failure.json, or RUNNING.
"""

from __future__ import annotations

RUNNING = "running"
GOOD = "success"  # the target was reached and the log passed its checks
LOST = "lost"

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


def words(state: str) -> str:
    """Return the words for a state; an unknown state is returned as it is."""
    return WORDS.get(state, state)
