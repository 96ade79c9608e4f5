"""Rewrite a synthetic log as other submitters log: accepted by official tools, unlike RunLog.

Accepted submissions contain all of these. `srun -l` puts the rank before the token. mlperf_common
logs the size of a block as its samples_count. NeMo logs accumulation steps as a float, and
train_samples after run_stop. Each rank logs its own init_start. The disclosure keys came later.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from synthetic_run import find, write_records

from submission.log_rules import DISCLOSURE_KEYS

# Benchmark -> keys that RunLog logs and other submitters do not.
OURS = {
    "llama2_70b_lora": (
        "max_sequence_length",
        "opt_name",
        "opt_adamw_beta_1",
        "opt_adamw_beta_2",
        "opt_adamw_epsilon",
        "lora_dropout",
    )
}


def srun(log: list[dict]) -> list[dict]:
    """Drop a record, log blocks by size, a float, an earlier time, and a key after run_stop."""
    benchmark = log[find(log, "submission_benchmark")]["value"]
    changed = [
        dict(record)
        for record in log
        if record["key"] not in (*OURS.get(benchmark, ()), "target_accuracy")
    ]
    last = 0
    for record in changed:
        samples = record["metadata"].get("samples_count")
        if record["key"] in ("block_start", "block_stop"):
            following = changed[changed.index(record) :]
            block_stop = next(other for other in following if other["key"] == "block_stop")
            size = block_stop["metadata"]["samples_count"] - last
            record["metadata"] = {**record["metadata"], "samples_count": size}
        elif record["key"] == "eval_start":
            last = samples
        elif record["key"] == "gradient_accumulation_steps":
            record["value"] = float(record["value"])
        elif record["key"] == "config_filename":
            record["value"] = "config_8x1.sh"
    changed[find(changed, "seed")]["time_ms"] += 5
    changed.append(changed.pop(find(changed, "train_samples")))
    return changed


def older(log: list[dict], day: str = "2025-07-01") -> list[dict]:
    """Rewrite the log as `srun` does, for a round without disclosure keys: of v5.1, by its day."""
    return dated([record for record in srun(log) if record["key"] not in DISCLOSURE_KEYS], day)


def dated(log: list[dict], day: str) -> list[dict]:
    """Move all times of the log so that it begins at noon UTC of `day`."""
    shift = round(datetime.fromisoformat(f"{day}T12:00Z").timestamp() * 1000) - log[0]["time_ms"]
    return [record | {"time_ms": record["time_ms"] + shift} for record in log]


def processes(log: list[dict]) -> list[dict]:
    """Let two ranks log the initialization and each evaluation, at slightly different times."""
    changed = []
    for record in older(log):
        changed.append(record)
        if record["key"] in ("cache_clear", "init_start", "eval_accuracy"):
            changed.append({**record, "time_ms": record["time_ms"] - 3})
    return changed


def write(
    path: Path, log: list[dict], prefix: str = "", newline: str = "\n", noise: str = ""
) -> Path:
    """Write the log with `prefix` before each token, and `noise` as a line before each record."""
    written = ""
    for line in write_records(path, log).read_text().splitlines():
        if noise:
            written += noise + newline
        written += prefix + line + newline
    path.write_bytes(written.encode())
    return path


# name -> (how the records change, how the file is written)
DIALECTS = {
    "ours": (lambda log: log, {}),
    "srun": (srun, {"prefix": "0: "}),
    "older": (older, {"prefix": "[1,0]<stdout>:"}),
    "processes": (processes, {"noise": "step 5\rstep 6"}),
    "crlf": (srun, {"newline": "\r\n"}),
    "cr": (srun, {"newline": "\r"}),
}
