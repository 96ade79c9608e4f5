"""Measure the speed of this machine.

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
import ast
import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

from common.command_line import Parser, program
from common.errors import PreflightError, RunError, failure_of
from launch.selection.machine import Machine
from throughput import options, shared_options

# Measurement -> one line of help. The function of its name in options.py adds its options. Its
# module throughput/<name>.py defines measure(options, result), which adds rows to the Result, and
# TABLES, which describe the rows (common/measure/tables.py). The modules of WITHOUT_RESULT define
# main(options).
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
    """Return the parser of `throughput`, with a subcommand for each measurement."""
    parser = Parser(
        "throughput",
        __doc__,
        ["throughput suite --quick", "throughput llama --model qwen3-8b --gpus 1,2"],
    )
    measurements = parser.add_subparsers(dest="name", metavar="measurement", required=True)
    for name, text in SUBCOMMANDS.items():
        source = Path(__file__).with_name(f"{name}.py").read_text()  # an import would need torch
        about = ast.get_docstring(ast.parse(source))
        measurement = measurements.add_parser(name, help=text, description=about)
        getattr(options, name)(measurement)
        if name != "tiles":  # it only prints
            measurement.add_argument(
                "--out",
                type=Path,
                metavar="DIR",
                help="new directory for the result (default: one in LOGDIR/throughput)",
            )
        if name not in WITHOUT_RESULT:
            shared_options.add(measurement, "device")
    return parser


def _module(name: str) -> ModuleType:
    """Import the module of a measurement. Raises PreflightError if torch cannot be imported."""
    try:
        return importlib.import_module(f"throughput.{name}")
    except ImportError as error:
        raise PreflightError(
            f"throughput {name} cannot be imported: {error}",
            "a measurement needs torch",
            "run it by ./run_and_time.sh, which installs the packages, or in a container",
        ) from None


def start(chosen: argparse.Namespace) -> int:
    """Run the measurement or command that the options choose, and return the exit code.

    Raises RunError, which includes ConfigError.
    """
    module = _module(chosen.name)
    if chosen.name in WITHOUT_RESULT:
        return module.main(chosen)
    here = Machine.of(os.environ)
    shared_options.settle(chosen, here.probe)
    # These import torch, which --help must not need.
    from throughput import machine, result

    facts = machine.facts(here, chosen.device)
    versions = machine.versions(here.probe)
    folder = chosen.out or result.default_directory(chosen.name)
    recorded = result.Result(chosen.name, module.TABLES, folder, chosen.device, facts, versions)
    try:
        module.measure(chosen, recorded)
        recorded.finish()
    except Exception as error:
        recorded.fail(failure_of(error) or internal_error(error))
        raise
    return 0


def internal_error(error: Exception) -> RunError:
    """Return an error for an exception that no code expects."""
    return RunError(f"{type(error).__name__}: {error}", "this is an internal error")


main = program(parser, start)

if __name__ == "__main__":
    sys.exit(main())
