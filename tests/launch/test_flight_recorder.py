"""Test the analysis of dumps of torch's flight recorder, with the fields of torch's JSON.

tests/training/test_evidence.py writes real dumps.
"""

import json
import re

import pytest

from common.errors import Hang, RunError
from launch import diagnosis, flight_recorder
from launch.flight_recorder import sentence, stuck

pytestmark = pytest.mark.quick


def entry(
    sequence,
    state="completed",
    name="nccl:_all_gather_base",
    sizes=(1024,),
    group=("0", "default_pg"),
    **changes,
):
    """Return an entry as ProcessGroupNCCL records it.

    Entries of gloo stay scheduled and are marked as retired when they are over.
    """
    return {
        **{
            "record_id": sequence,
            "pg_id": 0,
            "process_group": list(group),
            "collective_seq_id": sequence,
            "p2p_seq_id": 0,
            "op_id": sequence,
        },
        **{
            "profiling_name": name,
            "input_sizes": [list(sizes)],
            "output_sizes": [[8 * size for size in sizes]],
        },
        **{
            "input_dtypes": ["BFloat16"],
            "output_dtypes": ["BFloat16"],
            "state": state,
            "retired": state == "completed",
            "is_p2p": False,
        },
        **{
            "timeout_ms": 600000,
            "time_created_ns": 1,
            "time_discovered_started_ns": 0,
            "time_discovered_completed_ns": 0,
        },
        **changes,
    }


def dump(folder, rank, entries, ranks="[0, 1, 2]", group="0"):
    (folder / "ranks").mkdir(exist_ok=True)
    (folder / "ranks" / f"rank_{rank}.heartbeat").write_text("{}")
    if entries is not None:
        found = {
            "version": "2.10",
            "entries": entries,
            "pg_config": {group: {"name": group, "desc": "default_pg", "ranks": ranks}},
        }
        (folder / "ranks" / f"rank_{rank}.collectives.json").write_text(json.dumps(found))


def test_a_rank_that_never_came_is_named_with_the_collective(tmp_path):
    for rank in (0, 2):
        # The host runs ahead of the GPU.
        dump(tmp_path, rank, [entry(40), entry(41, "started"), entry(42, "scheduled")])
    dump(tmp_path, 1, [entry(39), entry(40)])
    (one,) = stuck(tmp_path)
    assert (one["sequence"], one["entered"], one["missing"], one["different"], one["unknown"]) == (
        41,
        [0, 2],
        [1],
        {},
        [],
    )
    assert one["waiting"] == {0: "started", 2: "started"}
    assert re.search(
        r"ranks 0, 2 .*41 .*default_pg.*nccl:_all_gather_base.*BFloat16 \[\[1024\]\] -> "
        r"\[\[8192\]\].*rank 1\b",
        sentence(one),
    )


def test_a_call_that_is_not_the_others_is_shown_beside_theirs(tmp_path):
    for rank, sizes in enumerate([(1024,), (1024,), (512,)]):
        dump(tmp_path, rank, [entry(7), entry(8, "started", sizes=sizes)])
    (one,) = stuck(tmp_path)
    assert (
        one["missing"] == []
        and one["different"].keys() == {2}
        and one["different"][2]["input_sizes"] == [[512]]
    )
    assert re.search(
        r"\[\[1024\]\] -> \[\[8192\]\].*rank 2.*\[\[512\]\] -> \[\[4096\]\]", sentence(one)
    )


def test_where_all_came_the_gpus_are_to_blame(tmp_path):
    for rank in range(3):
        dump(tmp_path, rank, [entry(8), entry(9, "started")])
    (one,) = stuck(tmp_path)
    assert (one["missing"], one["different"]) == ([], {})
    assert "ranks 0, 1, 2 " in sentence(one) and "GPU" in sentence(one)


def test_nothing_is_stuck_where_all_is_complete_or_nothing_was_left(tmp_path):
    assert stuck(tmp_path) == []
    dump(
        tmp_path,
        0,
        [entry(1), entry(2, "scheduled", retired=True), entry(3, "started", is_p2p=True)],
    )
    dump(tmp_path, 1, None)
    # Killed while it wrote.
    (tmp_path / "ranks" / "rank_1.collectives.json").write_text('{"entries": [')
    # Of a torch that writes other fields.
    dump(tmp_path, 2, [{"collective_seq_id": 4, "state": "started"}])
    assert stuck(tmp_path) == []


def test_a_rank_that_left_no_record_is_not_called_missing(tmp_path):
    """Gloo does not list the ranks of a group: all that reported form the default group."""
    dump(
        tmp_path,
        0,
        [entry(5, "scheduled", name="gloo:all_reduce", retired=False)],
        ranks="[]",
        group="",
    )
    dump(tmp_path, 1, None)
    (one,) = stuck(tmp_path)
    assert (one["missing"], one["unknown"]) == ([], [1])
    assert "rank 1 left no record" in sentence(one)


def test_the_group_with_someone_to_blame_comes_first(tmp_path):
    """Rank 1 hangs before collective 3 of the nodes' group, so nobody ends collective 9 of all."""
    nodes = ("3", "replicate")
    dump(
        tmp_path,
        0,
        [entry(9, "scheduled"), entry(2, group=nodes), entry(3, "scheduled", group=nodes)],
    )
    dump(tmp_path, 1, [entry(9, "scheduled"), entry(2, group=nodes)])
    assert [(one["group"], one["missing"]) for one in stuck(tmp_path)] == [
        ("3 replicate", [1]),
        ("0 default_pg", []),
    ]


def test_ranks_of_which_only_newer_entries_are_kept_are_compared_where_all_have_some(tmp_path):
    dump(tmp_path, 0, [entry(number) for number in range(1, 20)])
    dump(tmp_path, 1, [entry(number) for number in range(11, 20)])
    assert stuck(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "said"),
    [(Hang("no progress", "rank 1 stopped"), True), (RunError("boom", "why"), False)],
)
def test_failure_json_of_a_hang_has_the_collectives(tmp_path, error, said):
    dump(tmp_path, 0, [entry(41, "started")])
    dump(tmp_path, 1, [entry(40)])
    diagnosis.write_failure(tmp_path, error, {"rank": 1, "step": 3})
    failure = json.loads((tmp_path / "failure.json").read_text())
    assert ("collectives" in failure) == said and ("collective 41" in failure["why"]) == said
    if said:
        assert failure["collectives"] == json.loads(json.dumps(flight_recorder.stuck(tmp_path)))
        assert failure["why"].startswith("rank 1 stopped; ") and "collective 41" in error.lines()
