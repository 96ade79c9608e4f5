"""Tune the GEMMs of AMD's libraries before a run: ./run_and_time.sh <benchmark> gemms COMMAND.

    gemms record DIR               run a short bench, and record every GEMM of training and
                                   evaluation in the new directory DIR
    gemms tune DIR [--out FILE]    time the solutions of each GEMM on one GPU, check the fastest
                                   numerically, and write configs/gemm/<GPU>.csv
    gemms check [FILE]             check that FILE, or the file that the config names, was tuned
                                   with this machine's library versions

A run uses a tuned file only if the config's [env] names it. A run never tunes. See
docs/gemm_tuning.md.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from common.benchmarks import config_keys
from common.command_line import PROGRAM, Parser, add_set_option, exit_code_of, pairs_of
from common.config import RunConfig
from common.errors import ConfigError, PreflightError, StorageError
from common.paths import ROOT
from launch import run_directory
from launch.selection.choose import choose
from launch.selection.machine import Machine
from launch.selection.request import Request, add_config_option
from throughput.gemm_tuning.tunable_op_files import (
    PREFIX,
    configured,
    per_gpu,
    read_recorded,
    read_tuned,
)


def parser(benchmark: str) -> Parser:
    parser = Parser(f"{benchmark} gemms", __doc__)
    parser.add_argument("step", choices=("record", "tune", "check"))
    parser.add_argument(
        "path",
        type=Path,
        nargs="?",
        metavar="DIR|FILE",
        help="record, tune: directory of the recorded GEMMs; check: tuned file",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="tune: tuned file to write (default: configs/gemm/<GPU>.csv)",
    )
    add_config_option(parser, benchmark, "default: selected for the GPUs found")
    add_set_option(parser, config_keys(benchmark))
    parser.add_argument("--device", choices=("cpu", "cuda"), help=argparse.SUPPRESS)
    return parser


def main(arguments: list[str]) -> int:
    return exit_code_of(lambda: work(*arguments))


def work(benchmark: str, *rest: str) -> int:
    options = parser(benchmark).parse_args(rest)
    if options.path is None and options.step != "check":
        raise ConfigError(
            f"{options.step} needs the directory of the recorded GEMMs",
            "record writes them there, and tune reads them",
            f"{PROGRAM} {benchmark} gemms {options.step} DIR",
        )
    if options.out and options.step != "tune":
        parser(benchmark).error(f"argument --out: {options.step} writes no tuned file")
    machine = Machine.of(os.environ, options.device)
    if options.step == "record" and not machine.gpus:
        raise PreflightError(
            "gemms record needs a GPU",
            "no GPU is visible, and a bench on the CPU runs no GEMM of a GPU library",
            "run it on the GPUs that train",
        )
    choice = choose(Request.of(benchmark, options, os.environ), machine)
    choice.require()
    steps = {"record": record, "tune": tune, "check": check}
    return steps[options.step](benchmark, choice.config, options)


def _without_tunable_op(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(PREFIX)}


def record(benchmark: str, config: RunConfig, options: argparse.Namespace) -> int:
    """Record the GEMMs of training and of evaluation in a bench. Return its exit code.

    Training and evaluation may have different micro-batches, and therefore different GEMMs.
    """
    try:
        # The directory must be new: otherwise `tune` would also tune the GEMMs of another config.
        options.path.mkdir(parents=True)
    except OSError as error:
        raise StorageError(
            f"cannot create {options.path}: {error.strerror}",
            "GEMMs are recorded in a new directory",
            "name another directory",
        ) from None
    # TunableOp inserts the GPU's index before the last dot.
    out = str(options.path.absolute() / "untuned_gpu.csv")
    switches = {"ENABLED": "1", "TUNING": "0", "RECORD_UNTUNED": "1", "UNTUNED_FILENAME": out}
    env = _without_tunable_op({**os.environ}) | {
        PREFIX + name: value for name, value in switches.items()
    }
    command = bench_command(benchmark, config, options)
    code = subprocess.run(command, env=env, stdout=sys.stderr).returncode
    if code:
        return code
    count = len(read_recorded(options.path))
    print(f"{count} GEMMs recorded; next: {PROGRAM} {benchmark} gemms tune {options.path}")
    return 0


def bench_command(benchmark: str, config: RunConfig, options: argparse.Namespace) -> list[str]:
    """Return the command of the bench.

    The bench runs two layers, because all layers have the same GEMMs. It runs two micro-batches per
    step, because the first may differ from the others.
    """
    command = [sys.executable, "-m", "launch.bench", benchmark]
    command += ["--layers", "2", "--warmup", "1", "--steps", "1"]
    command += ["--eval-sequences", str(config.eval_micro_batch_size * config.world_size)]
    if options.config:
        command.append(f"--config={options.config}")
    if options.device:
        command.append(f"--device={options.device}")
    changes = pairs_of("--set", options.set)
    changes["global_batch_size"] = str(2 * config.micro_batch_size * config.world_size)
    return [*command, *(f"--set={key}={value}" for key, value in changes.items())]


def tune(benchmark: str, config: RunConfig, options: argparse.Namespace) -> int:
    """Tune the recorded GEMMs, and print a line for each."""
    tuner = _tuner(config)
    out = options.out or ROOT / "configs" / "gemm" / f"{config.gpu}.csv"
    run_directory.require_writable(out.parent, "--out")  # not after hours of tuning
    for line in tuner.tune(options.path, out, config.gpus_per_node, tuner.torch.device("cuda")):
        print(line, flush=True)
    return 0


def check(benchmark: str, config: RunConfig, options: argparse.Namespace) -> int:
    """Raise ConfigError unless the tuned files fit this machine's library versions."""
    if options.path:
        paths = per_gpu(options.path, config.gpus_per_node)
    else:
        paths = configured(config.env, config.gpus_per_node)
    if not paths:
        raise ConfigError(
            "gemms check: no file to check",
            "the config's [env] names no file",
            "name a file; see docs/gemm_tuning.md",
        )
    versions = _tuner(config).versions()
    for path in paths:
        count = len(read_tuned(path, versions))
        print(f"{path}: {count} GEMMs; its versions match this machine")
    return 0


def _tuner(config: RunConfig) -> ModuleType:
    """Import throughput.gemm_tuning.tune, and with it torch, with the config's [env] as in a run.

    The environment decides, for example by hipBLASLt's workspace size, which solutions exist.
    Raises PreflightError without a GPU.
    """
    environment = _without_tunable_op({**os.environ, **config.env})
    os.environ.clear()
    os.environ.update(environment)
    tuner = importlib.import_module("throughput.gemm_tuning.tune")
    if not tuner.torch.cuda.is_available():
        raise PreflightError(
            "no GPU is visible",
            "tuning and library versions need the GPU",
            "run this on the GPU in question",
        )
    return tuner


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
