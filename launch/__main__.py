"""The command line of the package: `./run_and_time.sh <benchmark> [verb] [options]`, or `./run_and_time.sh <verb> [options]`.

Verbs of a benchmark:

    run (default)   train to the target and check the log
    prepare ...     fetch, convert or verify data: passed on to <benchmark>.prepare
    bench           throughput on synthetic tokens
    profile         bench, then steps under torch's profiler: trace for Perfetto, table and picture of where the time went
    plan            memory and time of a config, without a GPU and without torch
                    (without a benchmark: memory of any model on any GPUs, and the MFU of a measured step; plan --help says more)
    preflight       is this machine fit? GPUs, host, versions, and their speed: passed on to preflight, whose --help says more
    gemms ...       record, tune and check GEMM solutions of AMD's libraries; docs/gemm_tuning.md
    merge ...       adapters into a base, where a benchmark has adapters: passed on to <benchmark>.merge

Verbs that read logs, without a benchmark and without torch; each is passed on to submission.<verb>, whose --help says more:

    check LOG       official checker and our lint on a log
    report DIR      the HTML page of a run, or of a series
    score ...       RCP verdict and score of a series, and how much of it was luck
    describe ...    the system description of this machine
    package ...     the tree of a submission, checked

A verb that measures this machine, without a benchmark:

    throughput ...  matrix products, training steps of many models, several GPUs: passed on to throughput, whose --help says more

--version prints the version and, in a git repository, the commit.

Environment: SEED, NEXP, DATADIR, LOGDIR, DGXSYSTEM, DGXNGPU, GPU_KIND, MLPERF_SUBMISSION_ORG, MLPERF_SUBMISSION_PLATFORM.
For a config of several nodes, on each of them: MASTER_ADDR, NODE_RANK (or Slurm's), MASTER_PORT; see docs/clusters.md.

NEXP=10 makes ten GOOD runs (target reached, log clean). Failed attempts are repeated until more than --max-failures have failed
(default 2; 0 stops at the first; a single run is not repeated unless asked for). Every attempt has its own directory and a random
seed; the page cache is cleared before each. SEED fixes the seed of a single run, for debugging; with NEXP > 1 it is an error.
LOGDIR/<benchmark>/attempts.jsonl records when every attempt started and how it ended; nothing is ever overwritten. --resume continues
the last series that lacks good runs, after a signal, a crash or too many failures, provided that config, code, data and GPUs are the
same. It takes NEXP from the ledger; a larger NEXP adds runs to a series, finished or not.

--save writes the trained model of llama31_8b into the directory of each run, in model/, as transformers reads it, when the clock has
stopped. Where that fails, a full disk for example, the run stays good, and the command ends with the code of what failed.

--checkpoint WHEN saves the state of training into checkpoints/ of the run's directory, the newest one only: 2 after every second evaluation,
600s every ten minutes. --continue RUN goes on from there in a new directory, with the same seed and config, on the same number of GPUs or another.
Its log says so and its clock starts anew: `package` refuses it. docs/checkpoints.md says more.

Exit codes: 0 all runs good; else that of the first failure, see common/errors.py; a signal ends the series with 130 (INT), 143 (TERM).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import signal
import sys
import tomllib
from pathlib import Path
from typing import NoReturn

from common.errors import ConfigError, RunError
from launch import series
from launch.bench import bench, bench_command, profile, profile_directory
from launch.console import header, print_stderr
from launch.continued import continued
from launch.job import ROOT, job_from, trainer_command
from launch.run import run_all
from launch.run_directory import doubts, git
from launch.select_config import benchmarks
from launch.supervise import handled_signals, raise_interrupted

PACKAGE = "mlperf-llama-training"
USAGE = "./run_and_time.sh <benchmark> [verb] [options]; --help says more"


OF_LOGS = {name: f"submission.{name}" for name in ("check", "report", "score", "describe", "package")}
OF_A_BENCHMARK = {  # the module that does it: "" for this process, {} for the benchmark; another module gets the benchmark's name first
    **dict.fromkeys(("run", "bench", "profile"), ""),
    **{"prepare": "{}.prepare", "merge": "{}.merge"},
    **{"plan": "plan.command", "preflight": "preflight", "gemms": "gemm_tuning.cli"},
}
WITHOUT_BENCHMARK = OF_LOGS | {"throughput": "throughput"}
VERBS = OF_A_BENCHMARK | WITHOUT_BENCHMARK


def main(arguments: list[str]) -> int:
    for number in handled_signals():
        signal.signal(number, raise_interrupted)
    if arguments[:1] in (["-h"], ["--help"]):
        print(__doc__ + f"\nBenchmarks: {', '.join(benchmarks(ROOT))}")
        return 0
    if arguments[:1] == ["--version"]:
        print(version())
        return 0
    try:
        benchmark, name, rest = _split(arguments)
        if VERBS[name]:
            _run_module(benchmark, name, rest)
        return _run_here(benchmark, name, _parse(name, rest))
    except RunError as error:
        print_stderr(error.lines())
        return error.exit_code


def version() -> str:
    """Name and version of pyproject.toml or of the installed package, and the commit where this is a git repository."""
    try:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    except FileNotFoundError:
        project = {"name": PACKAGE, "version": importlib.metadata.version(PACKAGE)}
    commit, changes = git(ROOT, "rev-parse", "HEAD"), git(ROOT, "status", "--porcelain")
    return f"{project['name']} {project['version']}" + (f", commit {commit}" if commit else "") + (", modified" if changes else "")


def _split(arguments: list[str]) -> tuple[str, str, list[str]]:
    """Benchmark ("" for a verb that takes none), verb, and the rest. Raises ConfigError."""
    known = benchmarks(ROOT)
    first, *rest = arguments or [""]
    if first in WITHOUT_BENCHMARK or first == "plan":  # plan takes a benchmark or none
        return "", first, rest
    if first in OF_A_BENCHMARK:
        raise ConfigError(f"{first} needs a benchmark", f"there are: {', '.join(known)}", f"./run_and_time.sh <benchmark> {first} ...")
    if first not in known:
        what = f"unknown benchmark or verb {first}" if first else "which benchmark?"
        raise ConfigError(what, f"benchmarks: {', '.join(known)}; verbs without a benchmark: {', '.join(WITHOUT_BENCHMARK)}", USAGE)
    if not rest or rest[0].startswith("-"):
        return first, "run", rest
    name, *rest = rest
    if name not in VERBS:
        raise ConfigError(f"unknown verb {name}", f"there are: {', '.join(VERBS)}", USAGE)
    if name in WITHOUT_BENCHMARK:
        why = "what it reads names the benchmark" if name in OF_LOGS else "it measures the machine"
        raise ConfigError(f"{name} takes no benchmark", why, f"./run_and_time.sh {name} ...")
    return first, name, rest


def _run_module(benchmark: str, name: str, rest: list[str]) -> NoReturn:
    """In place of this process, so that a signal reaches the module, which may have processes of its own to end."""
    module = VERBS[name].format(benchmark)
    if module == f"{benchmark}.{name}" and not (ROOT / benchmark / f"{name}.py").is_file():
        raise ConfigError(f"{benchmark} has no verb {name}", f"it has no module {module}", "see --help")
    words = [benchmark] if benchmark and not module.startswith(f"{benchmark}.") else []
    os.execv(sys.executable, [sys.executable, "-m", module, *words, *rest])


def _parse(name: str, rest: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"./run_and_time.sh <benchmark> {name}", allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="this TOML instead of the one that fits the machine")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change one value; the run is not for submission")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPUs if there are any (ROCm's are cuda as well)")
    parser.add_argument("--print", action="store_true", help="print the config and the command, and start nothing")
    if name == "run":
        limit = f"end the series when more than N attempts failed; default {series.MAX_FAILURES}, for a single run 0"
        parser.add_argument("--max-failures", type=int, metavar="N", help=limit)
        parser.add_argument("--resume", action="store_true", help="continue the last series in LOGDIR that lacks good runs")
        help_save = "llama31_8b: after the clock, write the trained model to model/ of the run's directory, for transformers"
        parser.add_argument("--save", action="store_true", help=help_save)
        help_checkpoint = "save the state of training: WHEN is 2 for every second evaluation, 600s for every ten minutes"
        parser.add_argument("--checkpoint", metavar="WHEN", help=help_checkpoint)
        help_continue = "go on from the checkpoint in this run's directory; for research, never for submission"
        parser.add_argument("--continue", dest="continues", type=lambda run: Path(run).absolute(), metavar="RUN", help=help_continue)
    else:
        for key in ("steps", "warmup", "layers"):
            parser.add_argument(f"--{key}", type=int, metavar="N", default=2 if (name, key) == ("profile", "steps") else None)
        parser.add_argument("--eval-sequences", type=int, metavar="N", help="time an evaluation of N sequences as well")
    if name == "profile":
        parser.add_argument("--out", type=Path, metavar="DIR", help="default: a new directory in LOGDIR/profiles")
    options = parser.parse_args(rest)
    if name != "run" and options.steps is not None and options.steps < 1:
        raise ConfigError(f"--steps {options.steps}", "a measurement needs at least one step", "use 1 or more")
    return options


def _run_here(benchmark: str, name: str, options: argparse.Namespace) -> int:
    request = series.request_from(os.environ, options.max_failures, options.resume) if name == "run" else None
    job = job_from(benchmark, options, any_kind=name != "run")
    if request and job.continues:
        request = continued(job, request)
    print_stderr(*header(benchmark, job.selection, job.rules, (job.data_dir, job.log_dir) if request else None))
    if request and not job.config.miniature:
        print_stderr(*(f"NOTE       {doubt}: package will refuse these runs" for doubt in doubts(ROOT, os.environ)))
    if name == "profile":
        options.out = profile_directory(job, options.out)
    if options.print:
        print(*(trainer_command(job, Path("DIR"), 0) if request else bench_command(job, Path("DIR"), options)))
        return 0
    if request:
        return run_all(job, request)
    return profile(job, options) if name == "profile" else bench(job, options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
