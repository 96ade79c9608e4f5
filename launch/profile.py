"""Measure throughput like `bench`, then profile some steps."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from common.command_line import Parser, complete
from common.errors import ConfigError
from common.measure.defaults import PROFILED_STEPS
from common.terminal import print_stderr
from launch import profilers, run_directory
from launch.bench import add_bench_options, measure, measured_job
from launch.job import Job
from launch.job_command import job_main, job_parser

EXAMPLES = ("{} profile --steps 3 --out profile", "{} profile --memory", "{} profile --with nsys")


def parser(benchmark: str) -> Parser:
    """Return the argument parser of `profile`."""
    parser = job_parser(benchmark, "profile", __doc__, EXAMPLES)
    text = "number of timed steps, and then of profiled steps"
    add_bench_options(parser, PROFILED_STEPS, text)
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
    return parser


def start(benchmark: str, options: argparse.Namespace) -> int:
    """Profile steps into --out, and say how to read the files. With --print, only the command.

    Return the exit code. Raises the errors of `measured_job` and `profile_directory`, and
    StorageError if --out cannot be written.
    """
    job = measured_job(benchmark, options)
    options.out = profile_directory(job, options)
    if not options.print:
        run_directory.require_writable(options.out, "--out")
    code = measure(job, options)
    if code or options.print:
        return code
    guide = f"profile    {options.out}: profile.json, and trace.json.gz for ui.perfetto.dev"
    if options.tool:
        guide = profilers.guide(options.tool, options.out)
    elif options.memory:
        files = "memory.html, and snapshot.pickle for pytorch.org/memory_viz"
        guide = f"profile    {options.out}: {files}"
    print_stderr(guide)
    return 0


def profile_directory(job: Job, options: argparse.Namespace) -> Path:
    """Return --out, or else create a directory in LOGDIR/profiles; with --print, only name it.

    Raise ConfigError if the directory holds files, or if the requested profile is not possible.
    Raises StorageError if it cannot be created.
    """
    if options.memory and job.selection.device == "cpu":
        raise ConfigError(
            "profile --memory needs a GPU",
            "it records the allocations of torch's GPU allocator",
            "leave out --memory, or use plan, which calculates the memory of a GPU",
        )
    if options.tool is not None:
        profilers.require(options.tool, job.config.world_size, installed=not options.print)
    if options.out is None:
        config = Path(job.selection.log_name).stem
        name = f"{job.benchmark}_{config}_{run_directory.date()}"
        folder = job.log_dir.absolute() / "profiles" / name
        return folder if options.print else run_directory.create_new(folder)
    folder = options.out.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{folder} is not an empty directory",
            "a profile overwrites nothing",
            "name a new directory with --out",
        )
    return folder


main = job_main("profile", parser, start)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
