"""What a rank leaves of a full GPU and of a hang: numbers, what to try, files."""

import json
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from ranks import start_ranks
from toy import wait_until

from common.errors import OutOfMemory
from common.training import evidence, guard
from common.training.guard import classify
from launch.flight_recorder import sentence, stuck

pytestmark = pytest.mark.quick

# As torch words it (c10/cuda/CUDACachingAllocator.cpp).
FULL = (
    "CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 139.81 GiB of "
    "which 402.00 MiB is free. Including "
    "non-PyTorch memory, this process has 139.40 GiB memory in use. Of the allocated memory "
    "130.00 GiB is allocated by PyTorch, and {gaps} "
    "is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try "
    "setting PYTORCH_ALLOC_CONF=expandable_segments"
    ":True to avoid fragmentation.  See documentation for Memory Management  "
    "(https://docs.pytorch.org/docs/stable/notes/cuda.html)"
)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in evidence.SETTINGS:
        monkeypatch.delenv(name, raising=False)


def full(asked: str, gaps: str) -> OutOfMemory:
    found = classify(torch.OutOfMemoryError(FULL.format(asked=asked, gaps=gaps)))
    assert isinstance(found, OutOfMemory)
    return found


def test_an_out_of_memory_error_states_the_gaps_and_what_to_try():
    found = full("20.00 GiB", "512.00 MiB")
    assert "0.50 GiB (0.4%" in found.why
    assert "documentation" not in found.why and found.do.startswith(
        "use a smaller micro_batch_size"
    )


def test_expandable_segments_are_advised_first_if_the_gaps_are_large_enough(monkeypatch):
    assert full("2.00 GiB", "6.00 GiB").do.startswith(
        "set PYTORCH_ALLOC_CONF to expandable_segments:True"
    )
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert full("2.00 GiB", "6.00 GiB").do.startswith("use a smaller micro_batch_size"), (
        "they are set"
    )


def test_on_rocm_expandable_segments_are_not_advised(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert full("2.00 GiB", "6.00 GiB").do.startswith("use a smaller micro_batch_size")


def test_an_allocation_that_fails_before_any_other_is_out_of_memory_too():
    text = FULL.replace("130.00 GiB is allocated", "0 bytes is allocated")
    failure = classify(torch.OutOfMemoryError(text.format(asked="200.00 GiB", gaps="0 bytes")))
    assert isinstance(failure, OutOfMemory) and "200.00 GiB" in failure.why


def test_out_of_memory_saves_the_allocators_state_in_the_run(tmp_path, monkeypatch):
    """The guard handles the failure to its end, with a simulated GPU."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_summary", lambda: "| allocated 130 GiB |")
    monkeypatch.setattr(
        torch.cuda.memory, "_dump_snapshot", lambda name: Path(name).write_bytes(b"torch's own")
    )
    monkeypatch.setattr(guard.os, "_exit", lambda code: ended.append(code))
    (tmp_path / "ranks").mkdir()
    ended: list[int] = []
    error = torch.OutOfMemoryError(FULL.format(asked="20.00 GiB", gaps="1.00 GiB"))
    guard.exit_with_failure(tmp_path, 3, error, lambda: None, lambda: 7)
    record = json.loads((tmp_path / "ranks" / "rank_3.json").read_text())
    assert (
        ended == [12]
        and record["kind"] == "out_of_memory"
        and record["step"] == 7
        and "130.00 GiB" in record["why"]
    )
    assert (tmp_path / "ranks" / "rank_3.memory.txt").read_text() == "| allocated 130 GiB |"
    assert (
        tmp_path / "ranks" / "rank_3.memory.pickle"
    ).read_bytes() == b"torch's own" and "rank_3.memory.pickle" in record["do"]


def test_a_failed_snapshot_does_not_hide_the_out_of_memory_error(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    found = classify(
        torch.OutOfMemoryError(FULL.format(asked="20.00 GiB", gaps="1.00 GiB")),
        tmp_path / "gone",
        0,
    )
    assert found.exit_code == 12 and "130.00 GiB" in found.why and "pickle" not in found.do


# Rank 1 does not come to the third sum.
HANGS = """
import os, sys, time
from pathlib import Path
import torch
from common.sharding.processes import start_processes
from common.training.guard import run_guarded
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
def body():
    processes = start_processes("cpu", 60.0)
    for _ in range(2):
        processes.sum(torch.ones(1000))
    (folder / "ranks" / f"rank_{rank}.heartbeat").touch()
    processes.sum(torch.ones(3, 7)) if rank == 0 else time.sleep(60)
run_guarded(folder, rank, body, lambda: None, lambda: 7)
"""


def test_after_sigusr1_the_rank_missing_from_a_collective_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    processes: list[subprocess.Popen] = start_ranks(2, ["-c", HANGS, str(tmp_path)])
    try:
        wait_until(lambda: len(list(tmp_path.glob("ranks/*.heartbeat"))) == 2)
        assert list(tmp_path.glob("ranks/*.json")) == []
        for process in processes:
            process.send_signal(signal.SIGUSR1)
        wait_until(lambda: len(list(tmp_path.glob("ranks/*.collectives.json"))) == 2)
        (one,) = stuck(tmp_path)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert (one["sequence"], one["entered"], one["missing"], one["input_sizes"]) == (
        3,
        [0],
        [1],
        [[3, 7]],
    )
    assert "all_reduce of Float [[3, 7]]" in sentence(one)
