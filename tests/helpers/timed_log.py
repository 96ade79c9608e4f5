"""Logs of whole closed runs for the tests of the score: every line from the real RunLog, its times then set to those of a run."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import synthetic_log


@dataclass(frozen=True)
class Timed:
    """What a run took. Seconds; `minutes` of the whole run, if given, decide what is left after the last evaluation."""

    samples: int  # training sequences to the target
    samples_per_s: float = 30.0
    evaluation_s: float = 10.0
    first_block_s: float = 6.0  # what the first block takes more
    minutes: float | None = None
    converged: bool = True


def write(path: Path, benchmark: synthetic_log.Benchmark, run: Timed, seed: int, rules_=None, global_batch_size: int | None = None) -> Path:
    """The log of one run, with evaluations by the rules up to `run.samples`."""
    rules_ = rules_ or benchmark.rules.CLOSED
    batch = benchmark.run_config(global_batch_size).global_batch_size
    counts = list(range(rules_.first_evaluation(batch), run.samples + 1, rules_.eval_interval(batch)))
    assert counts[-1] == run.samples, f"no evaluation at {run.samples}"
    path.parent.mkdir(parents=True, exist_ok=True)
    records = json.loads(_template(rules_, batch, tuple(counts)))
    records[synthetic_log.find(records, "seed")]["value"] = seed
    if not run.converged:
        records[synthetic_log.find(records, "eval_accuracy", len(counts) - 1)]["value"] = rules_.target_loss + 0.1
        records[-1]["metadata"]["status"] = "aborted"
    set_times(records, run)
    return synthetic_log.write_records(path, records)


@cache
def _template(rules_, batch: int, counts: tuple[int, ...]) -> str:
    """Written once for all runs of the same length: RunLog waits for the disk."""
    with tempfile.TemporaryDirectory() as folder:
        return json.dumps(synthetic_log.records(synthetic_log.write_evaluations(Path(folder) / "log", rules_, list(counts), batch)))


def set_times(records: list[dict], run: Timed) -> None:
    began = records[0]["time_ms"]
    start = now = float(began + 60_000)
    before = 0
    for record in records:
        samples = record["metadata"].get("samples_count", 0)
        if record["key"] == "block_stop":
            now += (samples - before) / run.samples_per_s * 1000 + (run.first_block_s * 1000 if before == 0 else 0)
            before = samples
        elif record["key"] == "eval_accuracy":
            now += run.evaluation_s * 1000
        elif record["key"] == "run_stop" and run.minutes is not None:
            assert start + run.minutes * 60_000 >= now, "the parts of the run take longer than the whole"
            now = start + run.minutes * 60_000
        in_init = before == 0 and samples == 0 and record["key"] not in ("run_start", "block_start")
        record["time_ms"] = began if in_init else round(now)


def write_series(folder: Path, benchmark: synthetic_log.Benchmark, runs: list[Timed], **options) -> Path:
    """result_0.txt, result_1.txt, ... as in a submission."""
    for index, run in enumerate(runs):
        write(folder / f"result_{index}.txt", benchmark, run, seed=1000 + index, **options)
    return folder
