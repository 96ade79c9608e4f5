"""Report on ranks that hang, from torch's flight recorder: the collective and the missing ranks.

Each rank writes ranks/rank_<k>.collectives.json (common/training/evidence.py), the JSON of torch's
C++ FlightRecorder::dump_json (versions 2.x). These fields of `entries` are read:

- process_group: [name, description]
- collective_seq_id: the number of the collective in its group, the same on all of its ranks
- profiling_name, input_sizes, output_sizes, input_dtypes
- state, and retired, which gloo sets in place of the state "completed"
- is_p2p: sends and receives are skipped, because this package uses none

pg_config is {name: {ranks: "[0, 1]"}}. It is empty with gloo.
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

# Fields that describe the call of a collective. They are equal on all ranks, since every shard in
# this package has the same size.
CALL_FIELDS = (
    "profiling_name",
    "input_sizes",
    "output_sizes",
    "input_dtypes",
)
# Fields that an entry must have. An entry of another torch that lacks one of them is skipped.
REQUIRED_FIELDS = {
    "process_group",
    "collective_seq_id",
    "state",
    "retired",
    "is_p2p",
    *CALL_FIELDS,
}
# Sequence number -> entry. A coalesced group of collectives is represented by its last one.
Entries = dict[int, dict]


def stuck(run_dir: Path) -> list[dict]:
    """Return, for each process group, the first collective that some rank waits in.

    Each is a dict as in `_first_open`. Collectives with a missing rank or with different calls come
    first.
    """
    dumps = _dumps(run_dir)
    groups: dict[tuple[str, str], dict[int, Entries]] = {}
    for rank, dump in sorted(dumps.items()):
        for entry in dump.get("entries", []):
            if entry.keys() >= REQUIRED_FIELDS and not entry["is_p2p"]:
                entries_by_rank = groups.setdefault(tuple(entry["process_group"]), {})
                entries = entries_by_rank.setdefault(rank, {})
                entries[entry["collective_seq_id"]] = entry
    heard = {rank for rank, dump in dumps.items() if dump}
    waiting = []
    for name, entries_by_rank in groups.items():
        members = _members(name, dumps) or {*entries_by_rank}
        collective = _first_open(name, entries_by_rank, members, heard)
        if collective:
            waiting.append(collective)

    def is_same_on_all_ranks(collective: dict) -> bool:
        return not collective["missing"] and not collective["different"]

    return sorted(waiting, key=is_same_on_all_ranks)  # False comes before True


def _dumps(run_dir: Path) -> dict[int, dict]:
    """Return rank -> its dump, for every rank that ever reported.

    The dump is {} for a rank without one: it is stopped, or none of its threads can run.
    """
    dumps: dict[int, dict] = {}
    for path in (run_dir / "ranks").glob("rank_*.heartbeat"):
        rank = int(path.stem.removeprefix("rank_"))
        dumps[rank] = {}
        with contextlib.suppress(OSError, ValueError):
            dumps[rank] = json.loads(path.with_suffix(".collectives.json").read_text())
    return dumps


def sentence(collective: dict) -> str:
    """Describe an item of `stuck` in one sentence, for failure.json and the terminal."""
    what = (
        f"collective {collective['sequence']} of group {collective['group']}, {_call(collective)}"
    )
    entered = _named(collective["entered"])
    if collective["missing"]:
        return f"{entered} entered {what}, {_named(collective['missing'])} did not"
    if collective["different"]:
        calls = [f"rank {rank}: {_call(call)}" for rank, call in collective["different"].items()]
        return f"{what} is a different call on {', '.join(calls)}"
    hint = "check the GPUs and the links between them"
    if collective["unknown"]:
        hint = f"{_named(collective['unknown'])} left no record"
    return f"{entered} entered {what}, which does not end; {hint}"


def _call(entry: dict) -> str:
    """Describe the call of a collective: name, dtypes and sizes."""
    sizes = " -> ".join(str(entry[key]) for key in ("input_sizes", "output_sizes"))
    return f"{entry['profiling_name']} of {', '.join(entry['input_dtypes'])} {sizes}"


def _named(ranks: list[int]) -> str:
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {', '.join(map(str, ranks))}"


def _members(name: tuple[str, str], dumps: dict[int, dict]) -> set[int]:
    """Return the ranks of a group, empty if no dump lists them."""
    members: set[int] = set()
    for dump in dumps.values():
        listed = dump.get("pg_config", {}).get(name[0], {}).get("ranks", "")
        members |= set(map(int, re.findall(r"\d+", listed)))
    if not members and name[1] == "default_pg":
        return set(dumps)
    return members


def _first_open(
    name: tuple[str, str], ranks: dict[int, Entries], members: set[int], heard: set[int]
) -> dict | None:
    """Return the first collective of a group that some rank waits in, None if there is none.

    `ranks`: rank -> its entries. `members`: ranks of the group. `heard`: ranks with a dump.

    The dict has the group, the sequence number, CALL_FIELDS, and lists of ranks. The lists are the
    ranks that entered the collective, that are missing, that made a different call, and that wait.
    A last list has the ranks whose state is unknown because they have no dump.
    """
    # The recorder keeps only recent collectives, so start where every rank has entries.
    oldest = max(min(entries) for entries in ranks.values())
    newest = max(max(entries) for entries in ranks.values())
    for sequence in range(oldest, newest + 1):
        entered = {
            rank: entries[sequence] for rank, entries in ranks.items() if sequence in entries
        }
        waiting = [
            rank
            for rank, entry in entered.items()
            if entry["state"] != "completed" and not entry["retired"]
        ]
        if not waiting:
            continue
        calls = {rank: {key: entry[key] for key in CALL_FIELDS} for rank, entry in entered.items()}
        usual = calls[min(entered)]
        return {
            "group": " ".join(name),
            "sequence": sequence,
            **usual,
            "entered": [*entered],
            "missing": sorted(members & heard - {*entered}),
            "different": {rank: call for rank, call in calls.items() if call != usual},
            "waiting": {rank: entered[rank]["state"] for rank in waiting},
            "unknown": sorted(members - heard),
        }
    return None
