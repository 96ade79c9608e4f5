"""Messages to the user on stderr: before a run, after it, and after a series."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from common.benchmarks import Rules, names_mlperf
from common.config import RunConfig
from common.records import ledger, rcp, run_states, windows
from common.records.run_record import RunRecord
from common.terminal import is_quiet, plural, shown
from launch.processes.ranks import parse_cpu_list
from launch.selection.check import Choice

MINIATURE_LINE = "THIS IS THE MINIATURE, a toy model: NOT a benchmark result, not for submission."


def prints_log(benchmark: str, config: RunConfig) -> bool:
    """Return whether a run's MLPerf log and result go to stdout, for programs that read it.

    They do for MLPerf's benchmarks alone, and neither on a terminal nor with --quiet. The log is
    always in result.txt.
    """
    return names_mlperf(benchmark, config) and not sys.stdout.isatty() and not is_quiet()


def mlperf_line(benchmark: str, config: RunConfig, text: str) -> None:
    """Print a line beside the MLPerf log on stdout, if the log is there."""
    if prints_log(benchmark, config):
        print(text, flush=True)


def header(
    benchmark: str,
    selection: Choice,
    rules: Rules,
    directories: tuple[Path, Path] | None,
    cpus: Sequence[str] = (),
) -> list[str]:
    """Return the lines before a run: benchmark, GPUs, config and why it was selected.

    `directories`: of data and results; None for a bench, which uses neither. `cpus`: the CPUs that
    each rank is bound to.
    """
    config = selection.config
    lines = []
    if config.miniature and selection.gpus == "none":
        lines.append("No GPU found.")
    if config.miniature:
        lines.append(MINIATURE_LINE)
    processes = "1 process"
    if config.gpus_per_node > 1:
        processes = f"{config.gpus_per_node} processes"
    if config.context_parallel > 1:
        processes += f", each sequence shared by {config.context_parallel}"
    device = f"device     CPU, {processes}"
    if selection.device == "cuda":
        device = f"GPU        {selection.gpus}; using {processes}"
    lines += [
        f"benchmark  {benchmark}, {rules.division}, sequence length {rules.sequence_length}",
        f"model      {model_size(rules)}",
        device,
        f"config     {selection.derived or shown(selection.path)}, because {selection.reason}",
    ]
    if cpus:
        count = len(parse_cpu_list(cpus[0]))
        lines.append(f"CPUs       {count} for each rank, on the NUMA node of its GPU")
    if directories:
        places = [f"data       {shown(directories[0])}", f"results    {shown(directories[1])}"]
        lines += [*places, f"target     {expectation(selection, rules)}"]
    else:
        lines.append("measures   throughput on synthetic tokens; no data is read")
    return lines + [f"NOTE       {note}" for note in selection.notes]


def model_size(rules: Rules) -> str:
    """Return the number of parameters and layers, and the rank of LoRA's adapters."""
    shape = rules.shape
    if rules.lora_rank:
        return (
            f"{shape.num_parameters:,} frozen parameters in {shape.num_layers} layers;"
            f" LoRA adapters of rank {rules.lora_rank}"
        )
    return f"{shape.num_parameters:,} parameters in {shape.num_layers} layers"


def expectation(selection: Choice, rules: Rules) -> str:
    """Return the target, the mean of the reference runs and the limit of sequences."""
    config = selection.config
    batch = config.global_batch_size
    interval = rules.eval_interval(batch)
    evaluated = f"evaluated every {interval:,} sequences"
    if not rules.target_loss:
        return f"none, {evaluated}; ends after {config.max_samples:,} sequences"
    target = f"loss <= {rules.target_loss}, {evaluated}"
    if config.miniature:
        return f"{target} (a few minutes on two cores)"
    mean = rcp.mean_samples(rules, batch)
    reference = "no MLPerf reference runs at this global batch"
    if mean:
        reference = f"MLPerf reference mean {mean:,.0f} sequences at global batch {batch}"
    return f"{target}; {reference}; limit {config.max_samples:,} sequences"


def closing(run: RunRecord, error_lines: str, checked: bool) -> list[str]:
    """Return the lines after a run: the result first, then where to look.

    `checked`: whether the log passed its check.
    """
    minutes = f" in {run.minutes:.2f} minutes" if run.minutes is not None else ""
    end = run_states.words(run_states.GOOD, run.has_target)
    lines = []
    if run.stands:
        lines.append(f"{end} with {run.trained or 0:,} sequences{minutes}")
    if error_lines:
        lines += [error_lines, f"  see  {shown(run.folder / 'failure.json')}"]
    elif checked:
        lines.append("log check: passed (MLCommons checker and additional checks)")
    if run.is_miniature:
        lines.append("The miniature is NOT a benchmark result.")
    return [*lines, f"results: {shown(run.folder)}"]


def series_closing(
    benchmark: str, path: Path, record: ledger.SeriesRecord, not_for_submission: bool
) -> list[str]:
    """Return the lines after a series: attempts, failures and reasons, ledger, next command."""
    good = record.good
    failed = record.failed
    lines = [
        f"series     {record.id}: {plural(len(record.starts), 'attempt')}, {len(good)} of "
        f"{record.goal} good, {len(failed)} failed"
    ]
    lines += [
        f"  attempt {end['attempt']:>2}  exit code {end['exit_code']} ({end['kind']}): "
        f"{end['reason']}"
        for end in failed
    ]
    lines += [
        f"  attempt {start['attempt']:>2}  running or lost: no end in the ledger"
        for start in record.open_starts
    ]
    lines.append(f"ledger     {shown(path)}")
    if not good and record.goal == 1:
        lines.append("next       start a new run: --resume continues only a series of several runs")
    elif len(good) < record.goal:
        lines.append(
            f"next       ./run_and_time.sh {benchmark} --resume, with the same options, continues "
            "this series"
        )
    elif len(good) >= rcp.SUBMISSION_RUNS and not_for_submission:
        lines.append("next       nothing to do: these runs cannot be submitted")
    elif len(good) >= rcp.SUBMISSION_RUNS and (needed := windows.good_runs_needed(record.outcomes)):
        more = f"NEXP={len(good) + needed} ./run_and_time.sh {benchmark} --resume"
        lines.append(
            f"next       {more}: the median window of ten is not valid yet; it needs "
            f"{plural(needed, 'more good run')}"
        )
    elif len(good) >= rcp.SUBMISSION_RUNS:
        lines.append(
            f"next       ./run_and_time.sh score {shown(path.parent)}, then package (see --help)"
        )
    return lines


def runs_still_needed(good: Sequence[bool]) -> str:
    """Say how many good runs a series needs after its failures, and after one more failure.

    `good`: whether each run that started its clock was good, in order. Return "" while no more than
    windows.MAY_FAIL runs have failed.
    """
    failed = good.count(False)
    if failed <= windows.MAY_FAIL:
        return ""
    needed = windows.good_runs_needed(good)
    after_one_more = windows.good_runs_needed([*good, False])
    standing = "there is already a result"
    if needed:
        standing = f"a result needs {plural(needed, 'more good run')} in a row"
    next_one = {2: "a third", 3: "a fourth"}.get(failed, "one more")
    return (
        f"{failed} runs failed: {standing}; after {next_one} failure, it would need "
        f"{plural(after_one_more, 'more good run')} in a row (the median window of ten must be "
        "valid)"
    )
