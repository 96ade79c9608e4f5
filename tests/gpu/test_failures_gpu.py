"""Repeat checks of test_evidence.py and test_memory_profile.py on real GPUs."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from child_path import python_path
from ranks import start_ranks
from toy import wait_until

from common.errors import OutOfMemory
from common.paths import ROOT
from launch.flight_recorder import sentence, stuck

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def test_memory_of_the_miniature(tmp_path):
    environment = os.environ | {"PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "launch",
        "llama31_8b",
        "profile",
        "--device",
        "cuda",
        "--memory",
        "--out",
        str(tmp_path / "out"),
    ]
    command += ["--config", str(ROOT / "configs/llama31_8b/CPU_1x1.toml"), "--set", "gpu=H200"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    made = json.loads((tmp_path / "out" / "memory.json").read_text())
    print(done.stdout)
    assert sum(made["kinds"].values()) == made["peak"] and made["fragmentation"] >= 0
    assert made["peak_by_torch"] / 2 < made["peak"] <= made["peak_by_torch"], (
        "torch counts whole blocks: 512 bytes, 2 MiB and more"
    )
    assert {"weights", "master weights", "AdamW moments", "activations"} <= made["kinds"].keys()
    assert any(row["place"].startswith("common/") for row in made["largest"])
    assert (tmp_path / "out" / "snapshot.pickle").stat().st_size > 1000 and "uPlot" in (
        tmp_path / "out" / "memory.html"
    ).read_text()


FILLS = """
import sys
from pathlib import Path
import torch
from common.training.guard import run_guarded
def body():
    torch.cuda.set_per_process_memory_fraction(0.05)
    held = [torch.empty(2**28, device="cuda") for _ in range(1000)]
run_guarded(Path(sys.argv[1]), 0, body, lambda: None, lambda: 7)
"""


def test_a_full_gpu_leaves_its_allocators_state(tmp_path):
    (rank,) = start_ranks(1, ["-c", FILLS, str(tmp_path)])
    _, err = rank.communicate(timeout=120)
    assert rank.returncode == OutOfMemory.exit_code, err
    record = json.loads((tmp_path / "ranks" / "rank_0.json").read_text())
    assert (
        record["why"].startswith("an allocation of 1.00 GiB failed")
        and "fragmentation" in record["why"]
    ), record
    assert "Allocated memory" in (tmp_path / "ranks" / "rank_0.memory.txt").read_text()
    assert (
        tmp_path / "ranks" / "rank_0.memory.pickle"
    ).stat().st_size > 100 and "memory_viz" in record["do"]


# Rank 1 does not come to the third sum; its GPU stays idle.
HANGS = """
import os, sys, time
from pathlib import Path
import torch
from common.sharding.processes import start_processes
from common.training.guard import run_guarded
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
def body():
    processes = start_processes("cuda", 300.0)
    for _ in range(2):
        processes.sum(torch.ones(1000, device=processes.device)).sum().item()
    (folder / "ranks" / f"rank_{rank}.heartbeat").touch()
    if rank == 0:
        processes.sum(torch.ones(3, 7, device=processes.device)).sum().item()
    else:
        time.sleep(300)
run_guarded(folder, rank, body, lambda: None, lambda: 7)
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_rank_that_nccl_waits_for_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    processes = start_ranks(2, ["-c", HANGS, str(tmp_path)])
    try:
        wait_until(lambda: len(list(tmp_path.glob("ranks/*.heartbeat"))) == 2)
        for process in processes:
            process.send_signal(signal.SIGUSR1)
        wait_until(lambda: len(list(tmp_path.glob("ranks/*.collectives.json"))) == 2)
        found = stuck(tmp_path)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    print((tmp_path / "ranks" / "rank_0.collectives.json").read_text()[-1500:])
    (one,) = found
    assert (one["entered"], one["missing"], one["input_sizes"]) == ([0], [1], [[3, 7]]), found
    assert "nccl:all_reduce of Float [[3, 7]]" in sentence(one)
