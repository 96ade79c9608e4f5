"""Report from torch's flight recorder, for ranks that hang: the collective and the missing ranks.

Each rank writes ranks/rank_<k>.collectives.json (common/training/evidence.py), the JSON of torch's
C++ FlightRecorder::dump_json (versions 2.x). These fields of `entries` are read:

- process_group: [name, description]
- collective_seq_id: the number of the collective in its group, the same on all of its ranks
- profiling_name, input_sizes, output_sizes, input_dtypes
- state, and retired, which gloo sets in place of the state "completed"
- is_p2p: sends and receives are left out, because this package makes none

pg_config is {name: {ranks: "[0, 1]"}}; gloo leaves it empty.
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

# Fields that are equal on all ranks, since every shard in this package has the same size.
SAME = (
    "profiling_name",
    "input_sizes",
    "output_sizes",
    "input_dtypes",
)
# Fields that an entry must have. An entry of another torch that lacks one of them is skipped.
READ = {
    "process_group",
    "collective_seq_id",
    "state",
    "retired",
    "is_p2p",
    *SAME,
}
# Sequence number -> entry. A coalesced group of collectives is represented by its last one.
Entries = dict[int, dict]


def stuck(run_dir: Path) -> list[dict]:
    """Return, for each process group, the first collective that some rank waits in.

    Collectives with a missing rank or with different calls come first.
    """
    dumps: dict[int, dict] = {}
    for path in (run_dir / "ranks").glob("rank_*.heartbeat"):
        # A rank without a file is stopped, or stuck where none of its threads can run.
        dumps[int(path.stem.removeprefix("rank_"))] = {}
        with contextlib.suppress(OSError, ValueError):
            dumps[int(path.stem.removeprefix("rank_"))] = json.loads(
                path.with_suffix(".collectives.json").read_text()
            )
    groups: dict[tuple[str, str], dict[int, Entries]] = {}
    for rank, dump in sorted(dumps.items()):
        for entry in dump.get("entries", []):
            if entry.keys() >= READ and not entry["is_p2p"]:
                groups.setdefault(tuple(entry["process_group"]), {}).setdefault(rank, {})[
                    entry["collective_seq_id"]
                ] = entry
    heard = {rank for rank, dump in dumps.items() if dump}
    found = [
        _first_open(name, ranks, _members(name, dumps) or {*ranks}, heard)
        for name, ranks in groups.items()
    ]
    return sorted(filter(None, found), key=lambda one: not (one["missing"] or one["different"]))


def sentence(one: dict) -> str:
    """Describe an item of `stuck` in one sentence, for failure.json and the terminal."""
    what = f"collective {one['sequence']} of group {one['group']}, {_call(one)}"
    entered = _named(one["entered"])
    if one["missing"]:
        return f"{entered} entered {what}, {_named(one['missing'])} did not"
    if one["different"]:
        return f"{what} is another one on " + ", ".join(
            f"rank {rank}: {_call(call)}" for rank, call in one["different"].items()
        )
    silent = (
        f"; {_named(one['unknown'])} left no record"
        if one["unknown"]
        else "; look at the GPUs and at what links them"
    )
    return f"{entered} entered {what}, which does not end{silent}"


def _call(entry: dict) -> str:
    sizes = " -> ".join(str(entry[key]) for key in ("input_sizes", "output_sizes"))
    return f"{entry['profiling_name']} of {', '.join(entry['input_dtypes'])} {sizes}"


def _named(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _members(name: tuple[str, str], dumps: dict[int, dict]) -> set[int]:
    """Return the ranks of a group, empty if no dump lists them."""
    told = [dump.get("pg_config", {}).get(name[0], {}).get("ranks", "") for dump in dumps.values()]
    return {int(rank) for text in told for rank in re.findall(r"\d+", text)} or (
        {*dumps} if name[1] == "default_pg" else set()
    )


def _first_open(
    name: tuple[str, str], ranks: dict[int, Entries], members: set[int], heard: set[int]
) -> dict | None:
    # The recorder keeps only the most recent collectives.
    oldest = max(min(entries) for entries in ranks.values())
    for sequence in range(oldest, max(max(entries) for entries in ranks.values()) + 1):
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
        calls = {rank: {key: entry[key] for key in SAME} for rank, entry in entered.items()}
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
