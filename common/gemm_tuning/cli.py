"""`./run_and_time.sh <benchmark> gemms record|tune|check`: GEMM tuning for AMD's libraries, each step asked for; docs/gemm_tuning.md.

    gemms record [--out DIR]       two short benches note every GEMM of training and evaluation
    gemms tune DIR [--out FILE]    time the solutions for each on one GPU, prove them, write configs/gemm/<GPU>.csv
    gemms check [FILE]             was it tuned with the versions that are here?

A run uses a file only if its config names it (gemm_tuning_file). Nothing is ever tuned during a run. Needs no torch.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from common.config import RunConfig
from common.errors import ConfigError, RunError, StorageError
from common.gemm_tuning.file import read_recorded, read_tuned
from common.hardware import Probe, probe
from launch.choose import choose
from launch.screen import tell

ROOT = Path(__file__).resolve().parents[1]
COPY = "gemm_tuning_{}.csv"  # in the run's directory, one per local rank: TunableOp puts the number of its GPU into the name
OURS = "PYTORCH_TUNABLEOP_"
LAYERS = 2  # are enough to record: all have the same GEMMs


# --- use --------------------------------------------------------------------------------------------------------------


def tuning_file(config: RunConfig, root: Path) -> Path | None:
    """The file that `config` names, None if it names none. Raises ConfigError if it cannot be read."""
    if not config.gemm_tuning_file:
        return None
    path = root / config.gemm_tuning_file
    read_tuned(path)
    return path


def environment(config: RunConfig, root: Path, folder: Path) -> dict[str, str]:
    """What switches the config's tuned GEMMs on, with copies of the file in `folder`; {} without a file.

    Copies, since TunableOp wants one per GPU, and since they tell later what ran. The ranks check them (common/gemm_tuning/tune.py).
    """
    path = tuning_file(config, root)
    if path is None:
        return {}
    try:
        for rank in range(config.gpus_per_node):
            shutil.copyfile(path, folder / COPY.format(rank))
    except OSError as error:
        raise StorageError(f"cannot write to {folder}: {error.strerror}", "the tuned GEMMs are kept with the run", "free space") from None
    return {**_switches(tuning="0", record="0"), OURS + "FILENAME": str(folder / COPY.format("%d"))}


def _switches(tuning: str, record: str) -> dict[str, str]:
    return {OURS + "ENABLED": "1", OURS + "TUNING": tuning, OURS + "RECORD_UNTUNED": record}


def _without_switches(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(OURS)}


# --- the verb ---------------------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    benchmark, *rest = arguments
    options = _parse(rest)
    try:
        found = Probe("none") if options.device == "cpu" else probe()
        config = choose(ROOT, benchmark, options, os.environ, found).config
        return {"record": record, "tune": tune, "check": check}[options.step](benchmark, config, options)
    except RunError as error:
        tell(error.lines())
        return error.exit_code


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./run_and_time.sh <benchmark> gemms", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("step", choices=("record", "tune", "check"))
    parser.add_argument(
        "source", type=Path, nargs="?", metavar="DIR|FILE", help="tune: what was recorded; check: another file than the config's"
    )
    parser.add_argument("--out", type=Path, metavar="PATH", help="where record and tune write")
    parser.add_argument("--config", metavar="FILE", help="this TOML instead of the one that fits the machine")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change one value of the config")
    parser.add_argument("--device", choices=("cpu", "cuda"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def record(benchmark: str, config: RunConfig, options: argparse.Namespace) -> int:
    """Bench with the config's micro-batch, and once more with that of the evaluation where it is another: it has other GEMMs."""
    log_dir = Path(os.environ.get("LOGDIR") or ROOT / "results").absolute()
    folder = options.out or log_dir / benchmark / f"gemms_{config.gpu}_{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        folder.mkdir(parents=True)  # new: what another config recorded would be tuned as well
    except OSError as error:
        raise StorageError(
            f"cannot make {folder}: {error.strerror}", "records go into a new directory", "name another with --out"
        ) from None
    for number, micro_batch_size in enumerate(dict.fromkeys((config.micro_batch_size, config.eval_micro_batch_size))):
        # %d would do nothing here: TunableOp puts the number of the GPU before the last dot by itself.
        variables = _without_switches(os.environ) | _switches(tuning="0", record="1")
        variables |= {OURS + "UNTUNED_FILENAME": str(folder.absolute() / f"untuned_{number}_gpu.csv")}
        tell(f"recording the GEMMs of micro-batches of {micro_batch_size}")
        code = subprocess.run(bench_command(benchmark, config, options, micro_batch_size), env=variables, stdout=sys.stderr).returncode
        if code:
            return code
    print(f"{len(read_recorded(folder))} GEMMs recorded; next: ./run_and_time.sh {benchmark} gemms tune {folder}")
    return 0


def bench_command(benchmark: str, config: RunConfig, options: argparse.Namespace, micro_batch_size: int) -> list[str]:
    """Two micro-batches per step: the first of an accumulation and the last may use different GEMMs."""
    sizes = {"micro_batch_size": micro_batch_size, "global_batch_size": 2 * micro_batch_size * config.world_size, "gemm_tuning_file": '""'}
    changes = [*options.set, *(f"{key}={value}" for key, value in sizes.items())]
    where = [*(["--config", options.config] if options.config else []), *(["--device", options.device] if options.device else [])]
    command = [sys.executable, "-m", "launch", benchmark, "bench", *where, "--layers", str(LAYERS), "--warmup", "1", "--steps", "1"]
    return command + [word for change in changes for word in ("--set", change)]


def tune(benchmark: str, config: RunConfig, options: argparse.Namespace) -> int:
    if options.source is None:
        raise ConfigError("gemms tune: which directory?", "it holds what was recorded", f"./run_and_time.sh {benchmark} gemms record first")
    read_recorded(options.source)
    out = options.out or ROOT / "configs" / "gemm" / f"{config.gpu}.csv"
    # The config's [env] as in a run: the workspace that hipBLASLt may use decides which solutions there are.
    command = [sys.executable, "-m", "common.gemm_tuning.tune", "tune", str(options.source), str(out)]
    return subprocess.run(command, env=_without_switches(os.environ) | config.env).returncode


def check(benchmark: str, config: RunConfig, options: argparse.Namespace) -> int:
    path = options.source or tuning_file(config, ROOT)
    if path is None:
        raise ConfigError("gemms check: which file?", "the config names none", "give one, or set gemm_tuning_file in the config")
    return subprocess.run(
        [sys.executable, "-m", "common.gemm_tuning.tune", "check", str(path)], env=_without_switches(os.environ)
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
