"""Options and first steps that `run`, `bench`, `profile` and `tune` share.

Each of these commands has a module with `parser`, `start` and `main`.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from common.benchmarks import config_keys, example_config
from common.command_line import PROGRAM, Parser, add_set_option, program
from common.errors import RunError
from common.known_issues import installed
from common.machine.hardware import config_names
from common.packages import version_of
from common.paths import ROOT
from common.terminal import inform, outlive_readers
from launch.console import header
from launch.environment import replaced_packages
from launch.job import Job, note_on_one_node
from launch.selection.machine import add_machine_options
from launch.selection.request import OF_CONFIG, add_config_option
from launch.torch_build import missing_compiler, require_fitting_torch


def job_parser(
    benchmark: str, name: str, about: str | None, examples: Sequence[str], set_note: str = ""
) -> Parser:
    """Return a parser of command `name` with the options that all these commands have.

    `examples`: command lines with {} for the benchmark, and a second {} for one of its configs.
    `set_note`: added to the help of --set.
    """
    shipped = ships_configs(benchmark)
    parser = Parser(f"{benchmark} {name}", about, _filled(examples, benchmark, shipped))
    which = parser.add_mutually_exclusive_group()
    default = "required; relative paths in it start at the current directory"
    if shipped:
        default = "default: selected for the GPUs found"
    add_config_option(which, benchmark, default)
    which.add_argument(
        "--miniature",
        action="store_true",
        help="use the toy model, on one GPU of any kind or on the CPU"
        if shipped
        else argparse.SUPPRESS,  # only a benchmark with configs has one
    )
    add_set_option(parser, config_keys(benchmark), set_note)
    add_machine_options(parser)
    parser.variables = OF_CONFIG
    text = "print the name of the config and what would be started, and start nothing"
    parser.add_argument("--print", action="store_true", help=text)
    return parser


def ships_configs(benchmark: str) -> bool:
    """Return whether the benchmark has configs, or else each run needs one of the user's own."""
    return bool(config_names(ROOT, benchmark))


def _filled(examples: Sequence[str], benchmark: str, shipped: bool) -> list[str]:
    """Return the examples of a help. A benchmark without configs needs --config in each line."""
    config = example_config(benchmark, "CPU_1x1", "stdlib_10m")
    lines = [example.format(benchmark, config) for example in examples]
    if shipped:
        return lines
    return [line if "--config" in line else f"{line} --config {config}" for line in lines]


def job_main(
    name: str, parser: Callable[[str], Parser], start: Callable[[str, argparse.Namespace], int]
) -> Callable[[list[str]], int]:
    """Return the `main` of command `name`, whose arguments are the benchmark and the options.

    It parses them and returns the exit code of `start(benchmark, options)`.
    """

    def main(arguments: list[str]) -> int:
        outlive_readers()
        benchmark, *rest = arguments

        def work(options: argparse.Namespace) -> int:
            options.command = shlex.join([PROGRAM, benchmark, name, *rest])
            return start(benchmark, options)

        return program(lambda: parser(benchmark), work)(rest)

    return main


def print_header(job: Job, directories: tuple[Path, Path] | None) -> None:
    """Print the lines of `header`, notes, and on GPUs the engines and why faster ones are not used.

    Raise ConfigError if a pinned engine cannot be used, also on a CPU.
    """
    inform(*header(job.benchmark, job.selection, job.rules, directories, job.cpus))
    if job.node.count == 1 and (note := note_on_one_node(job.environment)):
        inform(f"NOTE       {note}")
    if replaced := replaced_packages(job.environment):
        inform(f"NOTE       PYTHONPATH replaces installed packages: {', '.join(replaced)}")
    in_use = job.engines
    if job.selection.device == "cuda":
        inform(*in_use.lines())


def note_refusal(check: Callable[[Job], None], job: Job) -> None:
    """Print a note, with --print, on what `check` refuses on this machine."""
    try:
        check(job)
    except RunError as error:
        inform(f"NOTE       {error.what}; {error.why}; {error.do}")


def require_software(job: Job, only_note: bool = False) -> None:
    """Raise PreflightError if torch cannot use the job's GPUs. Print a note without a compiler.

    `only_note`: with --print, print what is refused, or that torch is not installed.
    """
    if only_note and version_of("torch"):
        note_refusal(require_software, job)
    elif only_note:
        inform(
            "NOTE       torch is not installed: a run first installs the packages into .venv, and"
            " uses its Python, and faster engines if it has them"
        )
    elif job.selection.device == "cuda":
        require_fitting_torch(job.gpus, installed(job.gpus.driver), os.environ)
        if missing := missing_compiler():
            inform(f"NOTE       {missing}")
