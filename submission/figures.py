"""Figures of a run for its report: values from its log, its events and its GPU samples.

The pages show them as numbers and curves. The files of a run that ended early may be missing or
truncated, so each figure may be unknown.
"""

from __future__ import annotations

from statistics import fmean

from common.html.page import finite, points
from common.records.intervals import samples_of
from common.text_tables import number
from submission import gpu_samples
from submission.run import Run

# Key of a record of the speed -> name of its figure.
SPEED = {
    "tokens_per_s_per_gpu": "tokens/s/GPU, median",
    "padding": "padding",
    "tflops_per_gpu": "TFLOP/s/GPU",
    "mfu": "MFU",
}
# Name of a figure -> its format.
FORMS = {
    "minutes": ",.3f",
    "samples": ",.0f",
    "epochs": ",.3g",
    "last evaluation": ".4f",
    "init, s": ",.0f",
    "train, s": ",.0f",
    "eval, s": ",.1f",
    "step, ms": ",.1f",
    "tokens/s/GPU": ",.0f",
    "tokens/s/GPU, median": ",.0f",
    "padding": ".1%",
    "TFLOP/s/GPU": ",.4g",
    "MFU": ".1%",
    "GiB, peak": ",.1f",
    "GPU-hours": ",.2f",
    "GPU kWh": ",.3f",
}


def unit_of(runs: list[Run]) -> str:
    """Return "CPU" if all runs are on the CPU, else "GPU"."""
    return "CPU" if all(run.gpu == "CPU" for run in runs) else "GPU"


def of_steps(run: Run, key: str, x: str = "samples") -> list[tuple[float, float]]:
    """Return the pairs of values of `x` and `key` in the step events."""
    steps = (record for record in run.records if record.get("event") == "step")
    return points(steps, x, key)


def evaluations(run: Run) -> list[dict]:
    """Return samples, loss, minutes since run_start, and duration in seconds of each evaluation."""
    seconds = {interval.stop_samples: interval.seconds for interval in run.evaluations}
    start = run.log.first("run_start")
    rows = []
    for event in run.log.all("eval_accuracy"):
        minutes = (event.time_ms - start.time_ms) / 60_000 if start else None
        rows.append(
            {
                "samples": event.samples,
                "loss": event.value,
                "minutes": minutes,
                "seconds": seconds.get(samples_of(event)),
            }
        )
    return rows


def phases(run: Run) -> dict[str, float]:
    """Return the seconds of each phase: init, warmup, train and eval.

    Training and evaluation are taken from the log, which a run that ended early has as well.
    """
    seconds = {"init": 0.0, "warmup": 0.0}
    for record in run.records:
        if record.get("event") != "phase" or record.get("name") not in ("init", "warmup"):
            continue
        if finite(record.get("seconds")):
            seconds[record["name"]] += record["seconds"]
    seconds["train"] = sum(block.seconds for block in run.blocks)
    seconds["eval"] = run.evaluation_s or 0.0
    return seconds


def figures_of(run: Run) -> dict[str, float | None]:
    """Return the figures of a run by their names in FORMS. Unknown figures are None.

    tokens/s/GPU is the mean over all training blocks, as in `runs` and `score`. The other speeds
    are the median of the steps. GPU-hours count the GPUs of all nodes, from run_start to run_stop.
    kWh is the energy in the same time, unknown on several nodes, where only node 0 has samples.
    """
    figures: dict[str, float | None] = dict.fromkeys(FORMS)
    seconds = phases(run)
    figures["minutes"] = run.minutes
    figures["init, s"] = seconds["init"] + seconds["warmup"] or None
    figures["train, s"] = seconds["train"] or None
    figures["eval, s"] = seconds["eval"] or None
    evaluated = points(evaluations(run), "samples", "loss")
    if evaluated:
        figures["samples"], figures["last evaluation"] = evaluated[-1]
        samples_per_epoch = run.log.value("train_samples")
        if finite(samples_per_epoch) and samples_per_epoch > 0:
            figures["epochs"] = evaluated[-1][0] / samples_per_epoch
    figures |= speed(run)
    figures["tokens/s/GPU"] = run.tokens_per_s_per_gpu
    memory = [value for _, value in of_steps(run, "memory_gib")]
    figures["GiB, peak"] = max(memory, default=None)
    if run.gpus and run.gpu != "CPU" and run.minutes is not None:
        figures["GPU-hours"] = run.gpus * run.minutes / 60
    if run.nodes <= 1:
        figures["GPU kWh"] = gpu_samples.energy_kwh(gpu_samples.read_samples(run))
    return figures


def speed(run: Run) -> dict[str, float]:
    """Return step time and the figures of SPEED, by their names. Empty without a record of speed.

    Every tenth step, and the last one before an evaluation, records the mean speed of the steps
    since the record before. All figures are means over the steps of the record with the median
    tokens/s.
    """
    windows: list[tuple[float, list[float], dict]] = []
    times_ms: list[float] = []
    for record in run.records:
        if record.get("event") != "step":
            continue
        if finite(record.get("step_time_ms")):
            times_ms.append(record["step_time_ms"])
        if finite(record.get("tokens_per_s_per_gpu")):
            windows.append((record["tokens_per_s_per_gpu"], times_ms, record))
            times_ms = []
    if not windows:
        return {}
    windows.sort(key=lambda window: window[0])
    _, times_ms, record = windows[len(windows) // 2]
    figures = {name: record[key] for key, name in SPEED.items() if finite(record.get(key))}
    if times_ms:
        figures["step, ms"] = fmean(times_ms)
    return figures


def shown(figures: dict[str, float | None], name: str) -> str:
    """Return the figure `name` as text in its format, or "-" if it is unknown."""
    return number(figures[name], FORMS[name])
