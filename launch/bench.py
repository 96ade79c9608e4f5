"""Measure training throughput on synthetic tokens. No data is read."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from pathlib import Path

from common.benchmarks import require_layers
from common.command_line import Parser
from common.measure.defaults import STEPS, WARMUP
from common.terminal import print_stderr
from common.values import count
from launch import diagnosis, profilers
from launch.job import Job, job_from, torchrun_command, trainer_environment
from launch.job_command import job_main, job_parser, print_header, require_software
from launch.processes.supervise import supervise
from launch.selection.check import MEASURED_ANYWAY


def parser(benchmark: str) -> Parser:
    """Return the argument parser of `bench`."""
    examples = ("{} bench", "{} bench --steps 20 --layers 4")
    parser = job_parser(benchmark, "bench", __doc__, examples)
    add_bench_options(parser, STEPS, "number of timed steps")
    return parser


def add_bench_options(parser: Parser, steps: int, text: str) -> None:
    """Add the options of a bench. `steps`, `text`: default and help of --steps."""
    parser.add_argument(
        "--steps", type=count, metavar="N", default=steps, help=f"{text} (default: %(default)s)"
    )
    parser.add_argument(
        "--warmup",
        type=count,
        metavar="N",
        default=WARMUP,
        help="number of untimed steps before them (default: %(default)s)",
    )
    parser.add_argument("--layers", type=count, metavar="N", help="use only the first N layers")
    parser.add_argument(
        "--eval-sequences", type=count, metavar="N", help="also time an evaluation of N sequences"
    )


def start(benchmark: str, options: argparse.Namespace) -> int:
    """Measure the throughput, or print the command with --print. Return the exit code.

    Raises the errors of `measured_job`.
    """
    return measure(measured_job(benchmark, options), options)


def measured_job(benchmark: str, options: argparse.Namespace) -> Job:
    """Return the job that `bench` or `profile` measures, after printing its first lines.

    Raises the errors of `job_from`, and ConfigError for more layers than the model has.
    """
    job = job_from(benchmark, options, *MEASURED_ANYWAY)
    require_layers(options.layers or 0, job.rules.shape.num_layers)
    print_header(job, None)
    return job


def bench_command(job: Job, folder: Path, options: argparse.Namespace) -> list[str]:
    """Return the torchrun command of `bench` or `profile`, with its config in `folder`."""
    arguments = ["-m", "common.measure.bench", "--benchmark", job.benchmark]
    arguments += ["--config", str(folder / job.selection.log_name)]
    arguments += ["--device", job.selection.device]
    for name in ("steps", "warmup", "layers", "eval_sequences"):
        if getattr(options, name) is not None:
            arguments += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    if getattr(options, "out", None):
        if getattr(options, "command", ""):
            arguments += ["--command", options.command]
        arguments += ["--profile", str(options.out)]
        if options.memory:
            arguments += ["--of", "memory"]
        elif options.tool:
            arguments += ["--of", "outside"]
            command = torchrun_command(job, folder, arguments)
            return profilers.wrapped(command, options.tool, options.out)
    return torchrun_command(job, folder, arguments)


def measure(job: Job, options: argparse.Namespace) -> int:
    """Run the processes of `bench` or `profile`, or print their command with --print.

    Return 0, or the exit code of the failure.
    """
    require_software(job, only_note=options.print)
    if options.print:
        print(shlex.join(bench_command(job, Path("DIR"), options)))
        return 0
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        (folder / job.selection.log_name).write_text(job.config.as_toml())
        ending = supervise(
            bench_command(job, folder, options), trainer_environment(job, "no"), folder
        )
        if ending.signal_number:
            return 128 + ending.signal_number
        if ending.returncode == 0:
            return 0
        error, _ = diagnosis.diagnose(folder, job.config.world_size)
        print_stderr(error.lines())
        return error.exit_code


main = job_main("bench", parser, start)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
