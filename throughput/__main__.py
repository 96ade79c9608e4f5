"""Measure the speed of this machine.

    {subcommands}

`throughput MEASUREMENT --help` lists the options of a measurement. Each one writes result.json,
table.md and page.html into a directory (--out; default: a new one in LOGDIR/throughput).
result.json is saved after every row. If a row fails, for example out of memory, the row records the
error and the measurement continues.

The measurements need torch, and Triton on a GPU. They need no data, weights or network.
`python3 -m throughput MEASUREMENT` runs the same command without installing packages.
docs/throughput.md explains each number.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

from common.command_line import Parser, complete_below, exit_code_of
from common.errors import PreflightError, RunError, failure_of
from launch.processes.supervise import raise_at_signals
from launch.selection.machine import Machine
from throughput import shared_options

# Measurement -> one line of help. Its module throughput/<name>.py defines add_arguments(parser),
# measure(options, result), which adds rows to the Result, and TABLES, which describe the rows
# (common/measure/tables.py). The modules of WITHOUT_RESULT define add_arguments and main(options).
MEASUREMENTS = {
    "gemm": "matrix products in FP16, BF16 and FP8, and copies of memory",
    "llama": "training steps of Llama, Mistral and Qwen3 models, full or LoRA",
    "mlp": "training steps of a small MLP on one GPU",
    "gpt": "training steps of GPTs of eight sizes on one GPU",
    "scaling": "training steps on 1, 2, 4, ... GPUs, collectives, and links between GPUs",
    "flux": "training steps of FLUX.1-dev's transformer on synthetic latents",
}
WITHOUT_RESULT = {
    "suite": "all measurements above on one page, with a comparison to a baseline",
    "compare": "results of the same measurement, or two profiles, side by side",
    "tiles": "alternative launch settings of each Triton kernel, for kernel authors",
}
SUBCOMMANDS = MEASUREMENTS | WITHOUT_RESULT


def parser() -> Parser:
    """Return the parser of the first argument.

    `parser_of` has the options of a measurement, whose module may need torch.
    """
    about = (__doc__ or "").format(
        subcommands="\n    ".join(f"{name:10}{text}" for name, text in SUBCOMMANDS.items())
    )
    parser = Parser(
        "throughput",
        about,
        ["throughput suite --quick", "throughput llama --model qwen3-8b --gpus 1,2"],
    )
    measurement = parser.add_argument(
        "name", metavar="measurement", choices=tuple(SUBCOMMANDS), help="see above"
    )
    complete_below(measurement, lambda: {name: parser_of(name) for name in SUBCOMMANDS})
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS).required = False
    return parser


def main(arguments: list[str]) -> int:
    return exit_code_of(lambda: start(**vars(parser().parse_args(arguments))))


def parser_of(name: str) -> Parser:
    """Return the parser of a measurement's options. Its module may need torch."""
    module = _module(name)
    parser = Parser(f"throughput {name}", module.__doc__)
    module.add_arguments(parser)
    if name != "tiles":  # it only prints
        parser.add_argument(
            "--out",
            type=Path,
            metavar="DIR",
            help="new directory for the result (default: one in LOGDIR/throughput)",
        )
    if name not in WITHOUT_RESULT:
        shared_options.add(parser, "device")
    return parser


def _module(name: str) -> ModuleType:
    """Import the module of a measurement. Raises PreflightError if torch cannot be imported."""
    try:
        return importlib.import_module(f"throughput.{name}")
    except ImportError as error:
        raise PreflightError(
            f"throughput {name} cannot be imported: {error}",
            "a measurement and its --help need torch",
            "run it by ./run_and_time.sh, which installs the packages, or in a container",
        ) from None


def start(name: str, rest: list[str]) -> int:
    """Run the measurement or command `name` with the options `rest`, and return the exit code.

    Raises RunError, which includes ConfigError.
    """
    module = _module(name)
    options = parser_of(name).parse_args(rest)
    if name in WITHOUT_RESULT:
        return module.main(options)
    here = Machine.of(os.environ)
    shared_options.settle(options, here.probe)
    # These import torch, which --help must not need.
    from throughput import machine, result

    facts = machine.facts(here, options.device)
    versions = machine.versions(here.probe)
    folder = options.out or result.default_directory(name)
    recorded = result.Result(name, module.TABLES, folder, options.device, facts, versions)
    try:
        module.measure(options, recorded)
        recorded.finish()
    except Exception as error:
        recorded.fail(failure_of(error) or internal_error(error))
        raise
    return 0


def internal_error(error: Exception) -> RunError:
    """Return an error for an exception that no code expects."""
    return RunError(f"{type(error).__name__}: {error}", "this is an internal error")


if __name__ == "__main__":
    raise_at_signals()
    sys.exit(main(sys.argv[1:]))
