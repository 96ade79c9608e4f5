"""The directory of a run with what its report reads: log, events, config, versions, samples of GPUs. All numbers are invented."""

import json
import math
from pathlib import Path

from synthetic_log import records, write_good, write_records


def events(steps: int = 50, interval: int = 12288) -> list[dict]:
    lines: list[dict] = [{"event": "phase", "name": "init", "seconds": 30.0, "time_s": 0.0}]
    for step in range(1, steps + 1):
        measured = {
            "tokens_per_s_per_gpu": 9000.0,
            "tflops_per_gpu": 480.0,
            "mfu": None,
            "memory_gib": 100.5,
        }
        values = {
            "loss": 10 / step**0.3,
            "grad_norm": 1.0,
            "learning_rate": 8e-4,
            "time_s": step,
            "step_time_ms": 900 + step % 7,
        }
        lines.append({"event": "step", "step": step, "samples": step * 1000, **values, **measured})
    lines += [
        {
            "event": "eval",
            "step": n,
            "samples": n * interval,
            "loss": 3.4,
            "seconds": 8.25,
            "time_s": 60.0,
        }
        for n in (1, 2, 3, 4)
    ]
    lines += [
        {"event": "phase", "name": name, "seconds": 100.0, "time_s": 200.0}
        for name in ("train", "eval")
    ]
    lines.append(
        {
            "event": "self_test",
            "attention": "cudnn-of-the-test",
            "seconds": 5.0,
            "ops": 30,
            "worst": "attention: 50.0 dB",
        }
    )
    return [
        *lines,
        {
            "event": "verdict",
            "status": "success",
            "samples": 4 * interval,
            "loss": 3.3,
            "minutes": 5.0,
        },
    ]


def spread(path: Path, milliseconds: int) -> None:
    """So much time between the records of the log; two of these are an evaluation."""
    log = records(path)
    write_records(
        path,
        [
            record | {"time_ms": log[0]["time_ms"] + milliseconds * index}
            for index, record in enumerate(log)
        ],
    )


def write_run(folder: Path, gpus: int = 0) -> Path:
    """A good run in `folder`, which exists; with samples of so many GPUs, one a second for a minute from run_start."""
    write_good(folder / "result.txt")
    spread(folder / "result.txt", 4125)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events()))
    (folder / "config.toml").write_text('gpu = "MI355X"\nglobal_batch_size = 32\n')
    (folder / "versions.json").write_text(
        json.dumps({"commit": "0123abc", "torch": "2.13.0", "gpus": ["MI355X"] * 8})
    )
    if gpus:
        start = (
            next(
                record for record in records(folder / "result.txt") if record["key"] == "run_start"
            )["time_ms"]
            / 1e3
        )
        lines: list[dict] = [
            {
                "event": "start",
                "source": "a test",
                "time": start,
                "gpus": [{"name": "MI355X"}] * gpus,
            }
        ]
        for second in range(60):
            wave = math.sin(second / 9)
            values = [
                {
                    "power_w": 1000 + 10 * gpu + 20 * wave,
                    "temperature_c": 60 + gpu,
                    "clock_mhz": 2000 - gpu,
                }
                for gpu in range(gpus)
            ]
            lines.append(
                {
                    "event": "sample",
                    "time_s": second,
                    "gpus": [each | {"memory_gib": 100.5, "throttle": []} for each in values],
                }
            )
        (folder / "gpu_samples.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )
    return folder
