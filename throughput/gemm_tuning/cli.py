"""Tune the GEMMs of AMD's libraries before a run: ./run_and_time.sh <benchmark> gemms COMMAND.

    gemms record DIR               in a short bench, record every GEMM of training and evaluation
                                   in the new directory DIR
    gemms tune DIR [--out FILE]    on one GPU: time and prove the solutions of each GEMM, and write
                                   configs/gemm/<GPU>.csv
    gemms check [FILE]             check that FILE, or the file that the config names, fits this
                                   machine's library versions

A run uses a tuned file only if the config's [env] names it, and never tunes anything itself. Needs
no torch. See docs/gemm_tuning.md.
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
from common.command_line import PROGRAM, Parser, add_set_option, exit_code_of
from common.config import RunConfig
from common.errors import ConfigError, PreflightError, StorageError
from common.hardware import Probe, probe
from common.paths import ROOT
from launch.select_config import select_config
from throughput.gemm_tuning.file import (
    PREFIX,
    configured,
    per_gpu,
    read_recorded,
    read_tuned,
    require_same_versions,
)


def parser(benchmark: str) -> Parser:
    parser = Parser(f"{benchmark} gemms", __doc__)
    parser.add_argument("step", choices=("record", "tune", "check"))
    parser.add_argument(
        "path",
        type=Path,
        nargs="?",
        metavar="DIR|FILE",
        help="record, tune: directory of the records; check: tuned file",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="tune: tuned file to write (default: configs/gemm/<GPU>.csv)",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="config file (default: selected for the GPUs found)"
    )
    add_set_option(parser, config_keys(benchmark))
    parser.add_argument("--device", choices=("cpu", "cuda"), help=argparse.SUPPRESS)
    return parser


def main(arguments: list[str]) -> int:
    return exit_code_of(lambda: work(*arguments))


def work(benchmark: str, *rest: str) -> int:
    options = parser(benchmark).parse_args(rest)
    if options.path is None and options.step != "check":
        parser(benchmark).error(f"{options.step} needs the directory of the records")
    config = select_config(
        ROOT, benchmark, options, os.environ, Probe("none") if options.device == "cpu" else probe()
    ).config
    return {"record": record, "tune": tune, "check": check}[options.step](
        benchmark, config, options
    )


def _without_tunable_op(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(PREFIX)}


def record(benchmark: str, config: RunConfig, options: argparse.Namespace) -> int:
    """Record the GEMMs of training and of evaluation in a bench.

    Training and evaluation may have different micro-batches, and then GEMMs of different sizes.
    """
    try:
        # DIR must be new, since `tune` would also tune what another config recorded there.
        options.path.mkdir(parents=True)
    except OSError as error:
        raise StorageError(
            f"cannot create {options.path}: {error.strerror}",
            "records need a new directory",
            "name another",
        ) from None
    # TunableOp inserts the GPU's index before the last dot.
    out = str(options.path.absolute() / "untuned_gpu.csv")
    switches = {"ENABLED": "1", "TUNING": "0", "RECORD_UNTUNED": "1", "UNTUNED_FILENAME": out}
    env = _without_tunable_op({**os.environ}) | {
        PREFIX + name: value for name, value in switches.items()
    }
    if code := subprocess.run(
        bench_command(benchmark, config, options), env=env, stdout=sys.stderr
    ).returncode:
        return code
    count = len(read_recorded(options.path))
    print(f"{count} GEMMs recorded; next: {PROGRAM} {benchmark} gemms tune {options.path}")
    return 0


def bench_command(benchmark: str, config: RunConfig, options: argparse.Namespace) -> list[str]:
    """Return the command of the bench.

    It runs two layers, since all have the same GEMMs, and two micro-batches per step, since the
    first may differ from the others.
    """
    changes = [*options.set, f"global_batch_size={2 * config.micro_batch_size * config.world_size}"]
    command = [
        sys.executable,
        "-m",
        "launch.commands",
        "bench",
        benchmark,
        "--layers",
        "2",
        "--warmup",
        "1",
        "--steps",
        "1",
    ]
    command += ["--eval-sequences", str(config.eval_micro_batch_size * config.world_size)]
    command += [
        f"--{name}={value}" for name in ("config", "device") if (value := getattr(options, name))
    ]
    return command + [f"--set={change}" for change in changes]


def tune(benchmark: str, config: RunConfig, options: argparse.Namespace) -> int:
    recorded = read_recorded(options.path)
    tuner = _tuner(config)
    out = options.out or ROOT / "configs" / "gemm" / f"{config.gpu}.csv"
    for line in tuner.tune(recorded, out, config.gpus_per_node, tuner.torch.device("cuda")):
        print(line, flush=True)
    return 0


def check(benchmark: str, config: RunConfig, options: argparse.Namespace) -> int:
    paths = (
        per_gpu(options.path, config.gpus_per_node)
        if options.path
        else configured(config.env, config.gpus_per_node)
    )
    if not paths:
        raise ConfigError(
            "gemms check: no file to check",
            "the config's [env] names none",
            "give a file; see docs/gemm_tuning.md",
        )
    files = {path: read_tuned(path) for path in paths}
    versions = _tuner(config).versions()
    for path, tuned in files.items():
        require_same_versions(path, tuned.validators, versions)
        print(f"{path}: {len(tuned.solutions)} GEMMs; its versions are those of this machine")
    return 0


def _tuner(config: RunConfig) -> ModuleType:
    """Import throughput.gemm_tuning.tune, and torch with it, in the config's [env] as in a run.

    hipBLASLt's workspace size decides which solutions exist. Raises PreflightError without a GPU.
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
