"""Write series for the tests: run directories and a ledger as the launcher writes them.

The real RunLog and rules write the logs. The losses are invented. The test advances the clock, so
that ten runs of an hour take a second.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

from synthetic_run import COMMIT, CONFIG, MS, ORG, Benchmark, Clock, Plan, write_attempt

from common import config as configs
from common.paths import ROOT
from common.records import ledger
from common.records.rcp import mean_samples

SYSTEM = "MI355X_1x8_pytorch"
SERIES = "20261001-120000-abc123"

# A complete system description that fits the runs. Both are invented.
DESCRIPTION = {
    **dict.fromkeys(
        (
            "hw_notes",
            "sw_notes",
            "host_processor_frequency",
            "host_processor_caches",
            "accelerator_frequency",
        ),
        "",
    ),
    **dict.fromkeys(
        (
            "host_processor_interconnect",
            "accelerator_on-chip_memories",
            "accelerator_interconnect_topology",
        ),
        "",
    ),
    "submitter": ORG,
    "division": "closed",
    "status": "Available on-premise",
    "system_name": SYSTEM,
    "number_of_nodes": "1",
    "host_processors_per_node": "2",
    "host_processor_model_name": "AMD EPYC 9575F 64-Core Processor",
    "host_processor_core_count": "64",
    "host_processor_vcpu_count": "256",
    "host_memory_capacity": "3072 GB",
    "host_storage_type": "NVMe SSD",
    "host_storage_capacity": "8 x 3.84 TB",
    "host_networking": "8 x InfiniBand 400 Gb/sec",
    "host_networking_topology": "N/A (single node)",
    "host_memory_configuration": "24 x 128 GB DDR5",
    "accelerators_per_node": "8",
    "accelerator_model_name": "AMD Instinct MI355X",
    "accelerator_host_interconnect": "PCIe Gen5 x16",
    "accelerator_memory_configuration": "HBM3e",
    "accelerator_memory_capacity": "288 GB",
    "accelerator_interconnect": "AMD Infinity Fabric (XGMI)",
    "cooling": "liquid",
    "framework": "PyTorch 2.13.0",
    "other_software_stack": "ROCm 7.0",
    "operating_system": "Ubuntu 24.04",
    "system_type": "datacenter",
    "system_type_detail": "bare metal",
    "host_network_card_count": "8",
}


# kind of failure -> exit code, kind and reason in the ledger
FAILURES = {
    "missed": (10, "target_missed", "the target was not reached within 1,000,000 sequences"),
    "killed": (14, "rank_lost", "rank 5 (process 4711) died without a message"),
    "early": (18, "preflight", "the GPU does not answer"),
    "unclean": (20, "check_failed", "the target was reached, but the log failed the checks"),
}


def plans(evaluations: list[int], **changes) -> list[Plan]:
    chance = random.Random(len(evaluations) + sum(evaluations))
    return [Plan(count, chance.getrandbits(32), **changes) for count in evaluations]


def evaluations_near_reference(benchmark: Benchmark) -> list[int]:
    """Return evaluations of ten runs that pass the RCP test.

    Eight are a little slower than the reference's mean and two a little faster.
    """
    rules, name = benchmark.rules.CLOSED, benchmark.rules.BENCHMARK
    batch = configs.load(ROOT / "configs" / name / CONFIG, benchmark.rules.Config).global_batch_size
    mean = mean_samples(rules, batch)
    assert mean is not None
    slower = math.ceil((mean - rules.first_evaluation(batch)) / rules.eval_interval(batch)) + 1
    return [slower] * 4 + [slower - 1] * 2 + [slower] * 4


def write(
    log_dir: Path,
    benchmark: Benchmark,
    attempts: list[Plan],
    rules=None,
    series: str = SERIES,
    goal: int = 10,
) -> Path:
    """Write a series to LOGDIR/<benchmark>, and return that directory."""
    rules, name = rules or benchmark.rules.CLOSED, benchmark.rules.BENCHMARK
    folder, clock = log_dir / name, Clock()
    folder.mkdir(parents=True, exist_ok=True)
    good = sum(not plan.fails for plan in attempts)
    begun = {
        "event": "series",
        "series": series,
        "started": "2026-10-01T12:00:00Z",
        "goal": goal,
        "facts": {"config": CONFIG},
    }
    ledger.append(folder / ledger.NAME, begun)
    for number, plan in enumerate(attempts, start=1):
        _attempt(folder, benchmark, rules, plan, number, series, clock)
    if good >= goal:
        ledger.append(folder / ledger.NAME, {"event": "closed", "series": series})
    return folder


def _attempt(
    folder: Path, benchmark, rules, plan: Plan, number: int, series: str, clock: Clock
) -> None:
    name = benchmark.rules.BENCHMARK
    config = configs.load(ROOT / "configs" / name / CONFIG, benchmark.rules.Config)
    run_dir = folder / f"20261001-{number:06}_{Path(CONFIG).stem}_seed{plan.seed}"
    run_dir.mkdir()
    versions = {
        "python": "3.12.3",
        "packages": {"torch": "2.13.0", "numpy": "2.4.6"},
        "commit": COMMIT,
        "dirty": False,
    }
    versions |= {
        "gpus": ["AMD Instinct MI355X, gfx950, 288 GiB"] * 8,
        "driver": "6.14",
    } | plan.changes
    start = {
        "event": "start",
        "series": series,
        "attempt": number,
        "run": run_dir.name,
        "seed": plan.seed,
    }
    start |= {
        "started": "2026-10-01T12:00:00Z",
        "config": plan.config_name,
        "modified": "+" in plan.config_name,
        "commit": versions["commit"],
    }
    ledger.append(folder / ledger.NAME, start)
    began = clock.now_ns
    samples = write_attempt(run_dir, benchmark, rules, config, plan, versions, clock)
    code, kind, reason = FAILURES.get(plan.fails, (0, "success", ""))
    if plan.fails:
        failure = {
            "kind": kind,
            "exit_code": code,
            "what": reason,
            "why": "a test",
            "do": "nothing",
        }
        (run_dir / "failure.json").write_text(json.dumps(failure))
    minutes = None if plan.fails in ("killed", "early") else (clock.now_ns - began) / MS / 60_000
    end = {
        "exit_code": code,
        "kind": kind,
        "reason": reason,
        "minutes": minutes,
        "samples": samples,
        "cache": "fadvise",
    }
    ledger.append(folder / ledger.NAME, start | {"event": "end"} | end)
    clock.pass_s(60)
