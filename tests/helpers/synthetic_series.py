"""Series for the tests: run directories and a ledger as the launcher leaves them, their logs written by the real RunLog and rules.

Losses are invented, times come from a clock that the test turns, so that ten runs of an hour cost a second.
"""

from __future__ import annotations

import json
import math
import random
import types
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import synthetic_log

from common import config as configs
from common.paths import ROOT
from common.records import json_lines, ledger
from common.records.rcp import mean_samples
from common.training import mllog
from common.training.mllog import RunLog

ORG, CONFIG, SYSTEM = "Acme", "MI355X_1x8.toml", "MI355X_1x8_pytorch"
SERIES = "20261001-120000-abc123"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
MS = 1_000_000  # ns

# A complete system description that fits the runs; made up, as the runs are.
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


class Clock:
    """Stands in for the module `time` in common/training/mllog.py."""

    def __init__(self) -> None:
        self.now_ns = 1_790_000_000_000 * MS

    def module(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(time_ns=lambda: self.now_ns, monotonic_ns=lambda: self.now_ns)

    def pass_s(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1000) * MS


@dataclass
class Plan:
    """One attempt: at which evaluation it reaches its target, or how it fails."""

    evaluations: int
    seed: int
    fails: str = ""  # "", missed, killed (no run_stop), early (no run_start), unclean
    changes: dict = field(default_factory=dict)  # of versions.json
    org: str = ORG
    platform: str = "1x8 MI355X"
    config_name: str = CONFIG
    shape: int = (
        0  # evaluations to the target, of a run that does not get there; 0: as many as there are
    )


# kind of failure -> exit code, kind and reason in the ledger
FAILURES = {
    "missed": (10, "target_missed", "the target was not reached within 1,000,000 sequences"),
    "killed": (14, "rank_lost", "rank 5 (process 4711) died without a message"),
    "early": (18, "preflight", "the GPU does not answer"),
    "unclean": (20, "check_failed", "the target was reached, but the log is not clean"),
}


def plans(evaluations: list[int], **changes) -> list[Plan]:
    chance = random.Random(len(evaluations) + sum(evaluations))
    return [Plan(count, chance.getrandbits(32), **changes) for count in evaluations]


def evaluations_near_reference(benchmark: synthetic_log.Benchmark) -> list[int]:
    """Of ten runs that pass the RCP test: eight a little slower than the reference's mean, two a little faster."""
    rules, name = benchmark.rules.CLOSED, benchmark.rules.BENCHMARK
    batch = configs.load(ROOT / "configs" / name / CONFIG, benchmark.rules.Config).global_batch_size
    mean = mean_samples(rules, batch)
    assert mean is not None
    slower = math.ceil((mean - rules.first_evaluation(batch)) / rules.eval_interval(batch)) + 1
    return [slower] * 4 + [slower - 1] * 2 + [slower] * 4


def write(
    log_dir: Path,
    benchmark: synthetic_log.Benchmark,
    attempts: list[Plan],
    rules=None,
    series: str = SERIES,
    goal: int = 10,
) -> Path:
    """A series in LOGDIR/<benchmark>; returns that directory."""
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mllog, "time", clock.module())
        patch.setattr(mllog, "STDOUT_FD", -1)
        patch.setattr(json_lines, "write_all", _only_to_files(json_lines.write_all))
        for number, plan in enumerate(attempts, start=1):
            _attempt(folder, benchmark, rules, plan, number, series, clock)
    if good >= goal:
        ledger.append(folder / ledger.NAME, {"event": "closed", "series": series})
    return folder


def _only_to_files(write_all):
    return lambda fd, line: write_all(fd, line) if fd >= 0 else None


def _attempt(
    folder: Path, benchmark, rules, plan: Plan, number: int, series: str, clock: Clock
) -> None:
    name = benchmark.rules.BENCHMARK
    config = configs.load(ROOT / "configs" / name / CONFIG, benchmark.rules.Config)
    run_dir = folder / f"20261001-{number:06}_{Path(CONFIG).stem}_seed{plan.seed}"
    run_dir.mkdir()
    (run_dir / "config.toml").write_text(config.as_toml())
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
    (run_dir / "versions.json").write_text(json.dumps(versions))
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
    samples = _run(run_dir, benchmark, rules, config, plan, clock)
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


def _run(run_dir: Path, benchmark, rules, config, plan: Plan, clock: Clock) -> int:
    """The log and the events of one run; returns its samples."""
    log = RunLog(run_dir / "result.txt")
    log.cache_clear(True)
    log.init_start()
    clock.pass_s(95)
    if plan.fails == "early":
        log.abort(0)
        return 0
    synthetic_log.initialize(
        log, rules, config, plan.config_name, plan.org, plan.platform, plan.seed
    )
    batch, before = config.global_batch_size, 0
    events = _Events(plan, rules, batch)
    for index in range(plan.evaluations):
        samples = rules.first_evaluation(batch) + index * rules.eval_interval(batch)
        log.block_start(before)
        clock.pass_s(events.train(before, samples))
        log.block_stop(samples, throughput=batch / 0.9)
        log.eval_start(samples)
        last = index == plan.evaluations - 1
        loss = events.evaluate(samples, last and plan.fails in ("", "unclean"))
        clock.pass_s(21.5)
        log.eval_accuracy(samples, loss)
        if plan.fails == "killed" and last:
            break
        log.eval_stop(samples)
        before = samples
    if plan.fails != "killed":
        log.run_stop(before, "aborted" if plan.fails == "missed" else "success")
    events.write(run_dir / "events.jsonl")
    return before


class _Events:
    """Plausible curves: a power law down to the target, a little noise, steps of 0.9 s with a tail."""

    def __init__(self, plan: Plan, rules, batch: int):
        self.chance, self.target, self.batch = random.Random(plan.seed), rules.target_loss, batch
        evaluations = max(plan.shape, plan.evaluations)
        self.total = rules.first_evaluation(batch) + (evaluations - 1) * rules.eval_interval(batch)
        self.step_ms = 900 + self.chance.gauss(0, 4)
        self.seconds = {"init": 62.0, "warmup": 33.0, "train": 0.0, "eval": 0.0}
        self.start_loss = 11.8 if self.target > 2 else 1.4
        self.lines: list[dict] = []

    def _loss(self, samples: int) -> float:
        floor = self.target - 0.15 * (self.start_loss - self.target)
        return floor + (self.start_loss - floor) * 0.13 ** min(1.0, (samples / self.total) ** 0.35)

    def train(self, before: int, samples: int) -> float:
        """Seconds that the block takes. Every twentieth step is recorded, and the first five."""
        elapsed = 0.0
        for step in range(before // self.batch + 1, samples // self.batch + 1):
            time_ms = (
                self.step_ms + abs(self.chance.gauss(0, 3)) + (self.chance.random() < 0.01) * 60
            )
            elapsed += time_ms / 1000
            if step % 20 == 0 or step <= 5:
                self._record(step, time_ms, self.seconds["train"] + elapsed)
        self.seconds["train"] += elapsed
        return elapsed

    def _record(self, step: int, time_ms: float, time_s: float) -> None:
        rate = self.batch * 8192 / 8 / time_ms * 1000
        loss = self._loss(step * self.batch) + self.chance.gauss(0, 0.03)
        line = {
            "event": "step",
            "step": step,
            "samples": step * self.batch,
            "loss": loss,
            "grad_norm": 0.4,
            "learning_rate": 4e-4,
        }
        line |= {
            "step_time_ms": time_ms,
            "time_s": time_s,
            "tokens_per_s_per_gpu": rate,
            "tflops_per_gpu": rate * 51.47e-3,
        }
        self.lines.append(
            line | {"mfu": rate * 51.47e-3 / 2516.6, "memory_gib": 214.5 + self.chance.random()}
        )

    def evaluate(self, samples: int, reaches: bool) -> float:
        loss = self._loss(samples) + self.chance.gauss(0, 0.004)
        loss = (
            self.target - abs(self.chance.gauss(0, 0.004))
            if reaches
            else max(loss, self.target + 0.006)
        )
        self.seconds["eval"] += 21.5
        line = {
            "event": "eval",
            "step": samples // self.batch,
            "samples": samples,
            "loss": loss,
            "seconds": 21.5,
        }
        self.lines.append(line | {"time_s": self.seconds["train"]})
        return loss

    def write(self, path: Path) -> None:
        self.lines += [
            {"event": "phase", "name": name, "seconds": seconds, "time_s": 0.0}
            for name, seconds in self.seconds.items()
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
