"""Commands `bench` (throughput on synthetic tokens) and `profile` (bench, then profiled steps)."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from common.errors import ConfigError
from common.terminal import print_stderr
from launch import diagnosis, profilers, run_directory
from launch.job import Job, torchrun_command, trainer_environment
from launch.processes.supervise import supervise


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


def bench(job: Job, options: argparse.Namespace) -> int:
    """Measure the throughput on synthetic tokens. Return 0, or the exit code of the failure."""
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


def profile(job: Job, options: argparse.Namespace) -> int:
    """Run a bench whose steps are profiled into --out, and say how to read the files.

    Return the exit code. Raises StorageError if --out cannot be written.
    """
    run_directory.require_writable(options.out, "--out")
    if code := bench(job, options):
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
