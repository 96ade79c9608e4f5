"""Command line of `run`, `bench`, `profile` and `tune`:
`python -m launch.commands COMMAND BENCHMARK`.

NEXP=10 makes ten good runs. A run is good if it reaches the target and its log passes the checks.
After a failed attempt another one starts, until more than --max-failures have failed. Every attempt
has its own directory and a random seed, and starts with an empty page cache. SEED sets the seed of
a single run, for debugging. LOGDIR/<benchmark>/attempts.jsonl records the start and end of every
attempt. No result is ever overwritten.

--checkpoint saves the training state in checkpoints/ of the run's directory and keeps the newest
one. --continue resumes from there in a new directory, with the same seed and config, on any number
of GPUs. The clock starts again from zero, so `package` refuses the run. See docs/checkpoints.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
from pathlib import Path

from common.benchmarks import config_keys, example_config, names_mlperf, require_layers
from common.command_line import (
    PROGRAM,
    Parser,
    add_set_option,
    complete,
    count,
    exit_code_of,
    minutes,
    refuse_without,
)
from common.known_issues import installed
from common.machine.hardware import config_names
from common.measure.defaults import PROFILED_STEPS, STEPS, WARMUP
from common.paths import ROOT
from common.records.trackers import TRACKERS
from common.repository import refusal_reasons
from common.terminal import inform, outlive_readers
from common.training.log_keys import submission_status
from launch import cli, profilers, series, system_settings
from launch.bench import bench, bench_command, profile, profile_directory
from launch.console import header
from launch.job import AUTO, Job, job_from, note_on_one_node, trainer_command
from launch.processes.supervise import raise_at_signals
from launch.run import run_all
from launch.selection.check import MEASURED_ANYWAY
from launch.torch_build import missing_compiler, require_fitting_torch
from launch.tune.command import print_candidates, tune

EXAMPLES = {
    "run": ("{}", "{} --set max_samples=2048", "{} --config {} --print"),
    "bench": ("{} bench", "{} bench --steps 20 --layers 4"),
    "profile": (
        "{} profile --steps 3 --out profile",
        "{} profile --memory",
        "{} profile --with nsys",
    ),
    "tune": ("{} tune", "{} tune --minutes 60", "{} tune --resume --minutes 90"),
}


def parser(name: str, benchmark: str) -> Parser:
    """Return the argument parser of command `name`."""
    _, _, details = (__doc__ or "").partition("\n\n")
    about = {
        "run": f"Train to the target, then check the log.\n\n{details}",
        "bench": "Measure training throughput on synthetic tokens. No data is read.",
        "profile": "Measure throughput like `bench`, then profile some steps.",
        "tune": "Search for the fastest config on this machine. Keys that decide convergence and "
        "the format of the linear layers stay as they are.",
    }
    shipped = _ships_configs(benchmark)
    if name == "run":
        others = [
            each
            for each, command in cli.COMMANDS.items()
            if each != "run" and command.benchmark != cli.NEVER and cli.has_command(benchmark, each)
        ]
        about[name] += f"\n\nOther commands of {benchmark}, each with --help: {', '.join(others)}."
    parser = Parser(
        f"{benchmark} {name}",
        about[name],
        _examples(name, benchmark),
    )
    which = parser.add_mutually_exclusive_group()
    default = "required; relative paths in it start at the current directory"
    if shipped:
        default = "default: selected for the GPUs found"
    which.add_argument("--config", metavar="FILE", help=f"config file ({default})")
    which.add_argument(
        "--miniature",
        action="store_true",
        help="use the toy model, on one GPU of any kind or on the CPU"
        if shipped
        else argparse.SUPPRESS,  # only a benchmark with configs has one
    )
    note = "; such a run cannot be submitted" if name == "run" and shipped else ""
    add_set_option(parser, config_keys(benchmark), note)
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="device to use (default: the GPUs if there are any; cuda includes ROCm)",
    )
    text = "print the name of the config and the command, and start nothing"
    if name == "tune":
        text = "print the name of the config and the values to try, and measure nothing"
    parser.add_argument("--print", action="store_true", help=text)
    if name == "run":
        _add_run_options(parser, shipped)
    elif name == "tune":
        _add_tune_options(parser)
    else:
        _add_bench_options(parser, name)
    if name == "profile":
        _add_profile_options(parser)
    return parser


def _ships_configs(benchmark: str) -> bool:
    """Return whether the benchmark has configs, or else each run needs one of the user's own."""
    return bool(config_names(ROOT, benchmark))


def _examples(name: str, benchmark: str) -> list[str]:
    """Return the examples of a help. A benchmark without configs needs --config in each line."""
    shipped = _ships_configs(benchmark)
    config = example_config(benchmark, "CPU_1x1", "stdlib_10m")
    lines = []
    for example in EXAMPLES[name]:
        line = example.format(benchmark, config)
        if not shipped and "--config" not in line:
            line += f" --config {config}"
        lines.append(line)
    return lines


def _add_run_options(parser: Parser, shipped: bool) -> None:
    parser.add_argument(
        "--max-failures",
        type=int,
        metavar="N",
        help="end the series after more than N failed attempts "
        f"(default: {series.MAX_FAILURES}; 0 for a single run)",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue the last unfinished series in LOGDIR, with the same config, code, data and "
        "GPUs; a larger NEXP adds runs",
    )
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="with --resume, also if the series' launcher is on another machine or in another "
        "container and has not been heard of for ten minutes",
    )
    parser.add_argument(
        "--save",
        action="store_true",
        help="after the clock stops, save the trained model for transformers in model/ of the "
        "run's directory"
        if shipped
        else argparse.SUPPRESS,  # such a run always saves it
    )
    parser.add_argument(
        "--tune",
        action="store_true",
        help="apply the settings of `tuning apply` for the duration of the run (needs sudo) and "
        "restore them afterwards",
    )
    parser.add_argument(
        "--track",
        action="append",
        default=[],
        choices=TRACKERS,
        help="send losses, speed, GPU samples and config to this package during the run",
    )
    parser.add_argument(
        "--checkpoint",
        metavar="WHEN",
        help="save the training state: 2 for every second evaluation, 600s for every ten minutes",
    )
    parser.add_argument(
        "--continue",
        dest="continues",
        type=_run_to_continue,
        metavar="RUN",
        help="resume from the checkpoint in this run's directory; auto: from that of the last "
        "unfinished run with this config, if there is one (for research only; cannot be "
        "submitted)",
    )


def _run_to_continue(run: str) -> Path:
    """Parse the value of --continue: the path of a run, or AUTO."""
    return AUTO if run == str(AUTO) else Path(run).absolute()


def _add_bench_options(parser: Parser, name: str) -> None:
    steps = STEPS
    text = "number of timed steps"
    if name == "profile":
        steps = PROFILED_STEPS
        text += ", and then of profiled steps"
    parser.add_argument(
        "--steps", type=count, metavar="N", default=steps, help=f"{text} (default: {steps})"
    )
    parser.add_argument(
        "--warmup",
        type=count,
        metavar="N",
        default=WARMUP,
        help=f"number of untimed steps before them (default: {WARMUP})",
    )
    parser.add_argument("--layers", type=count, metavar="N", help="use only the first N layers")
    parser.add_argument(
        "--eval-sequences", type=count, metavar="N", help="also time an evaluation of N sequences"
    )


def _add_tune_options(parser: Parser) -> None:
    parser.add_argument(
        "--minutes",
        type=minutes,
        default=20.0,
        metavar="N",
        help="longest time of all measurements, those before --resume included (default: 20)",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue the newest search in LOGDIR with the same config, commit, packages and GPUs",
    )


def _add_profile_options(parser: Parser) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="directory of the profile (default: a new one in LOGDIR/profiles)",
    )
    other = parser.add_mutually_exclusive_group()
    other.add_argument(
        "--memory",
        action="store_true",
        help="record the GPU memory allocations at the peak instead of times",
    )
    tool = other.add_argument(
        "--with",
        dest="tool",
        metavar="TOOL",
        help=f"run rank 0 under {', '.join(profilers.TOOLS)}; quote the name to add options of "
        "the tool",
    )
    complete(tool, profilers.TOOLS)


def main(arguments: list[str]) -> int:
    """Run the command NAME BENCHMARK OPTIONS in `arguments`, and return its exit code."""
    outlive_readers()
    raise_at_signals()
    name, benchmark, *rest = arguments

    def work() -> int:
        options = parser(name, benchmark).parse_args(rest)
        options.command = shlex.join([PROGRAM, benchmark, name, *rest])
        return start(benchmark, name, options)

    return exit_code_of(work)


def start(benchmark: str, name: str, options: argparse.Namespace) -> int:
    """Start the command `name` with parsed `options`, and return its exit code.

    Raises the errors of `job_from`, and ConfigError for options that conflict.
    """
    if name == "run":
        return _start_run(benchmark, options)
    return _start_measurement(benchmark, name, options)


def _start_run(benchmark: str, options: argparse.Namespace) -> int:
    """Start one timed run or a series, or print its command with --print."""
    if not options.resume:
        refuse_without("--resume", {"--take-over": options.take_over})
    request = series.request_from(
        os.environ, options.max_failures, options.resume, options.take_over
    )
    submission_status(os.environ)  # raises ConfigError now, instead of in the ranks
    if options.continues:  # also if --continue auto finds no run
        series.require_single_run(request)
    job = job_from(benchmark, options)
    if job.continues:
        request = series.continued(request, job.continues, benchmark, job.config)
    _print_header(job, (job.data_dir, job.log_dir))
    if not job.config.miniature and names_mlperf(benchmark, job.config):
        for reason in refusal_reasons(ROOT, os.environ):
            inform(f"NOTE       {reason}: package will refuse these runs")
        if not options.tune and (advice := system_settings.advice()):
            inform(f"NOTE       {advice}: {system_settings.remedy()}")
    if options.print:
        print(shlex.join(trainer_command(job, Path("DIR"), 0)))
        return 0
    _require_software(job)
    with system_settings.applied(ROOT) if options.tune else contextlib.nullcontext():
        return run_all(job, request)


def _start_measurement(benchmark: str, name: str, options: argparse.Namespace) -> int:
    """Start `bench`, `profile` or `tune`, or print its command or candidates with --print."""
    job = job_from(benchmark, options, *MEASURED_ANYWAY)
    require_layers(getattr(options, "layers", None) or 0, job.rules.shape.num_layers)
    _print_header(job, None)
    if name == "profile":
        options.out = profile_directory(job, options)
    if options.print and name == "tune":
        return print_candidates(job)
    if options.print:
        print(shlex.join(bench_command(job, Path("DIR"), options)))
        return 0
    _require_software(job)
    if name == "tune":
        return tune(job, options)
    if name == "profile":
        return profile(job, options)
    return bench(job, options)


def _print_header(job: Job, directories: tuple[Path, Path] | None) -> None:
    """Print the lines of `header`, notes, and the engines. Raise as `_print_engines` does."""
    inform(*header(job.benchmark, job.selection, job.rules, directories, job.cpus))
    if job.node.count == 1 and (note := note_on_one_node(job.environment)):
        inform(f"NOTE       {note}")
    _print_engines(job)


def _print_engines(job: Job) -> None:
    """Print the engines that a job on GPUs uses, and why faster ones are not used.

    Raise ConfigError if a pinned engine cannot be used, also on a CPU.
    """
    in_use = job.engines
    if job.selection.device == "cuda":
        inform(*in_use.lines())


def _require_software(job: Job) -> None:
    """Raise PreflightError if torch cannot use the job's GPUs. Print a note without a compiler."""
    if job.selection.device != "cuda":
        return
    require_fitting_torch(job.gpus, installed(job.gpus.driver), os.environ)
    if missing := missing_compiler():
        inform(f"NOTE       {missing}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
