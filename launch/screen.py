"""What a person reads on stderr before a run, in less than a second, and after it."""

from __future__ import annotations

import sys
from pathlib import Path

from launch.choose import Choice
from launch.verdict import Result
from records import ledger, rcp

MINIATURE_LINE = "THIS IS THE MINIATURE: a toy model on {device}, to see the whole path. NOT a benchmark result, cannot be submitted."


def tell(*lines: str) -> None:
    print("\n".join(lines), file=sys.stderr, flush=True)


def header(benchmark: str, choice: Choice, rules, places: tuple[Path, Path] | None) -> list[str]:
    """The lines before a run: what is going to happen, on what, with which config and why.

    `places` are the directories of data and results; None for a bench, which reads and keeps nothing.
    """
    config = choice.config
    lines = []
    if config.miniature:
        no_gpu = "No GPU found. " if choice.found == "none" else ""
        lines.append(no_gpu + MINIATURE_LINE.format(device="a CPU" if choice.device == "cpu" else "the GPU"))
    where = f"{config.gpus_per_node} process{'es' if config.gpus_per_node > 1 else ''}"
    lines += [
        f"benchmark  {benchmark}, {rules.division}, sequence length {rules.sequence_length}",
        f"GPU        {choice.found}; using {where}",
        f"config     {choice.path}, because {choice.reason}",
    ]
    if places:
        lines += [f"data       {places[0]}", f"results    {places[1]}", f"expect     {expectation(benchmark, choice, rules)}"]
    else:
        lines.append("expect     throughput on synthetic tokens; no data is read")
    return lines + [f"NOTE       {note}" for note in choice.notes]


def expectation(benchmark: str, choice: Choice, rules) -> str:
    batch = choice.config.global_batch_size
    target = f"loss <= {rules.target_loss}, measured every {rules.eval_interval(batch):,} sequences"
    if choice.config.miniature:
        return f"{target}; about two minutes on two cores"
    mean = rcp.mean_samples(benchmark, batch)
    reference = f"the reference needs {mean:,.0f} on average" if mean else "there is no reference for this global batch"
    return f"{target}; at global batch {batch} {reference} (MLPerf RCP); gives up at {choice.config.max_samples:,}"


def closing(result: Result, run_dir: Path, error_lines: str, miniature: bool) -> list[str]:
    """The lines after a run: the verdict first, then where to look."""
    minutes = f" in {result.seconds / 60:.2f} minutes" if result.seconds is not None else ""
    lines = [f"target reached with {result.samples:,} sequences{minutes}"] if result.status == "success" else []
    if error_lines:
        lines += [error_lines, f"  see  {run_dir / 'failure.json'}"]
    else:
        lines.append("the log is clean: official checker and our own checks")
    if miniature:
        lines.append("This was the miniature: NOT a benchmark result.")
    report = run_dir / "report.html"
    return [*lines, f"results: {run_dir}" + (", report.html" if report.is_file() else "")]


def series_closing(benchmark: str, path: Path, record: ledger.Record, not_for_submission: bool) -> list[str]:
    """The lines after a series: how many attempts, what failed and why, where the ledger is, what comes next."""
    good, failed = record.good, record.failed
    lines = [f"series     {record.id}: {len(record.starts)} attempts, {len(good)} of {record.goal} good, {len(failed)} failed"]
    lines += [f"  attempt {end['attempt']:>2}  exit code {end['exit_code']} ({end['kind']}): {end['reason']}" for end in failed]
    lines += [f"  attempt {start['attempt']:>2}  no end in the ledger" for start in record.open_starts]
    lines.append(f"ledger     {path}")
    if len(good) < record.goal:
        lines.append(f"next       ./run_and_time.sh {benchmark} --resume, with the same options, goes on where this ended")
    elif len(good) >= rcp.SUBMISSION_RUNS and not_for_submission:
        lines.append("next       nothing: these runs cannot be submitted")
    elif len(good) >= rcp.SUBMISSION_RUNS:
        lines.append(f"next       ./run_and_time.sh {benchmark} score {path.parent}, then package; --help says more")
    return lines
