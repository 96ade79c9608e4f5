"""The command line of the package: `./run_and_time.sh <benchmark> [verb] [options]`.

    run (default)   train to the target and check the log
    prepare ...     fetch, convert or verify data: passed on to <benchmark>.prepare
    bench           throughput on synthetic tokens
    profile         bench, then steps under torch's profiler: trace for Perfetto, table and picture of where the time went
    plan            memory and time of a config, without a GPU and without torch
    preflight       is this machine fit? GPUs, host, versions, and their speed: passed on to preflight, whose --help says more
    gemms ...       record, tune and check GEMM solutions of AMD's libraries; docs/gemm_tuning.md
    merge ...       adapters into a base, where a benchmark has adapters: passed on to <benchmark>.adapter

The rest reads logs and needs no torch; each is passed on to submission.<verb>, whose --help says more:

    check LOG       official checker and our lint on a log
    report DIR      the HTML page of a run, or of a series
    score ...       RCP verdict and score of a series, and how much of it was luck
    describe ...    the system description of this machine
    package ...     the tree of a submission, checked

Environment: SEED, NEXP, DATADIR, LOGDIR, DGXSYSTEM, DGXNGPU, GPU_KIND, MLPERF_SUBMISSION_ORG, MLPERF_SUBMISSION_PLATFORM.
For a config of several nodes, on each of them: MASTER_ADDR, NODE_RANK (or Slurm's), MASTER_PORT; see docs/clusters.md.

NEXP=10 makes ten GOOD runs (target reached, log clean): after a failed attempt comes another one, until more than --max-failures
attempts have failed (default 2; 0 stops at the first; a single run is not repeated unless asked for). Every attempt has a directory
and a seed of its own, from the system's randomness; the page cache is cleared before each. SEED fixes the seed of a single run, for
debugging; with NEXP > 1 it is an error. LOGDIR/<benchmark>/attempts.jsonl says of every attempt when it started and how it ended;
nothing is ever overwritten. --resume goes on with the last series that lacks good runs, after a signal, a crash or too many
failures, provided that config, code, data and GPUs are the same. NEXP then comes from the ledger; a larger one
adds runs to a series, a finished one as well.

Exit codes: 0 all runs good; else that of the first failure, see common/errors.py; a signal ends the series with 130 (INT), 143 (TERM).
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.errors import CheckFailed, ConfigError, DataError, Interrupted, RunError
from common.hardware import Probe, probe
from launch import nodes, page_cache, rundir, sampler, series, supervise, verdict
from launch.choose import Choice, benchmarks, choose, rules_of
from launch.screen import closing, header, tell

ROOT = Path(__file__).resolve().parents[1]
SUBMISSION_VERBS = ("check", "report", "score", "describe", "package")  # modules of submission/; they take the rest
VERBS = ("run", "prepare", "bench", *SUBMISSION_VERBS, "merge", "gemms", "plan", "preflight", "profile")
STARTUP_S = 300.0  # kernels compile before the first step


@dataclass(frozen=True)
class Job:
    """What all runs of one command share."""

    benchmark: str
    choice: Choice
    found: Probe
    data_dir: Path
    log_dir: Path
    environment: Mapping[str, str]
    place: nodes.Place


def main(arguments: list[str]) -> int:
    _end_by_exception()
    try:
        benchmark, verb, rest = _split(arguments)
        if verb == "prepare":
            return _module(f"{benchmark}.prepare", rest)
        if verb in SUBMISSION_VERBS:
            return _module(f"submission.{verb}", rest)
        if verb == "plan":
            return _module("plan.command", [benchmark, *rest])
        if verb == "preflight":
            return _module("preflight", [benchmark, *rest])
        if verb == "gemms":
            return _module("gemm_tuning.cli", [benchmark, *rest])
        if verb == "merge":
            return _merge(benchmark, rest)
        options = _parse(verb, rest)
        wished = series.wish(os.environ, options.max_failures, options.resume) if verb == "run" else series.Wish(1, 0)
        job = _job(benchmark, options)
        places = (job.data_dir, job.log_dir) if verb == "run" else None
        tell(*header(benchmark, job.choice, rules_of(benchmark, job.choice.config), places))
        if verb == "profile":
            options.out = _profile_folder(job, options)
        if options.print:
            print(" ".join(trainer_command(job, Path("DIR"), 0) if verb == "run" else bench_command(job, Path("DIR"), options)))
            return 0
        if verb == "profile":
            return profile(job, options)
        return bench(job, options) if verb == "bench" else run_all(job, wished)
    except RunError as error:
        tell(error.lines())
        return error.exit_code


def _end_by_exception() -> None:
    def interrupt(number: int, frame) -> None:
        raise Interrupted(number)

    for number in supervise.heeded_signals():
        signal.signal(number, interrupt)


# --- the command line -------------------------------------------------------------------------------------------------


def _split(arguments: list[str]) -> tuple[str, str, list[str]]:
    known = benchmarks(ROOT)
    if arguments[:1] in (["-h"], ["--help"]):
        print(__doc__ + f"\nBenchmarks: {', '.join(known)}")
        raise SystemExit(0)
    if not arguments or arguments[0] not in known:
        what = f"unknown benchmark {arguments[0]}" if arguments else "which benchmark?"
        raise ConfigError(what, f"there are: {', '.join(known)}", "./run_and_time.sh <benchmark> [verb] [options]; --help says more")
    if len(arguments) == 1 or arguments[1].startswith("-"):
        return arguments[0], "run", arguments[1:]
    if arguments[1] not in VERBS:
        raise ConfigError(
            f"unknown verb {arguments[1]}", f"there are: {', '.join(VERBS)}", "./run_and_time.sh <benchmark> [verb] [options]"
        )
    return arguments[0], arguments[1], arguments[2:]


def _parse(verb: str, rest: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"./run_and_time.sh <benchmark> {verb}", allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="this TOML instead of the one that fits the machine")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change one value; the run is not for submission")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPUs if there are any (ROCm's are cuda as well)")
    parser.add_argument("--print", action="store_true", help="say what would be done, and the command, and do nothing")
    if verb == "run":
        patience = f"end the series when more than N attempts failed; default {series.MAX_FAILURES}, for a single run 0"
        parser.add_argument("--max-failures", type=int, metavar="N", help=patience)
        parser.add_argument("--resume", action="store_true", help="go on with the last series in LOGDIR that lacks good runs")
    if verb in ("bench", "profile"):
        for name in ("steps", "warmup", "layers"):
            parser.add_argument(f"--{name}", type=int, metavar="N", default=2 if (verb, name) == ("profile", "steps") else None)
        parser.add_argument("--eval-sequences", type=int, metavar="N", help="time an evaluation of N sequences as well")
    if verb == "profile":
        parser.add_argument("--out", type=Path, metavar="DIR", help="default: a new directory in LOGDIR/profiles")
    options = parser.parse_args(rest)
    if getattr(options, "steps", None) is not None and options.steps < 1:
        raise ConfigError(f"--steps {options.steps}", "there is nothing to measure in no step", "use 1 or more")
    return options


def _job(benchmark: str, options: argparse.Namespace) -> Job:
    environment = os.environ
    found = Probe("none") if options.device == "cpu" else probe()
    choice = choose(ROOT, benchmark, options, environment, found)
    data_name = f"{benchmark}-miniature" if choice.config.miniature else benchmark
    data_dir = Path(environment.get("DATADIR") or ROOT / "data" / data_name).absolute()
    log_dir = Path(environment.get("LOGDIR") or ROOT / "results").absolute()
    return Job(benchmark, choice, found, data_dir, log_dir, environment, nodes.place_of(environment, choice.config.nodes))


def _merge(benchmark: str, arguments: list[str]) -> int:
    if not (ROOT / benchmark / "adapter.py").is_file():
        raise ConfigError(f"{benchmark} has nothing to merge", "it trains no adapters", "merge is for llama2_70b_lora")
    return _module(f"{benchmark}.adapter", ["merge", *arguments])


def _module(name: str, arguments: list[str]) -> int:
    return subprocess.run([sys.executable, "-m", name, *arguments]).returncode


# --- one run, or several ----------------------------------------------------------------------------------------------


def run_all(job: Job, wished: series.Wish) -> int:
    """As many good runs as wished, in a ledger; the exit code of series.run."""
    versions = rundir.versions(ROOT, job.found)
    facts = series.facts_of(job.choice, job.data_dir, versions["commit"], ROOT, job.benchmark)
    if job.place.rank:
        return follow(job, versions, facts)
    ensure_data(job)
    with nodes.Leader(job.place, _shared(facts, versions)) as leader:
        leader.gather()
        code = series.run(
            job.log_dir, job.benchmark, job.choice, facts, wished, lambda folder, seed: run_once(job, versions, leader, folder, seed)
        )
        leader.code = code
    if wished.goal > 1 or wished.resume:
        _report(job.log_dir / job.benchmark)  # of the whole series, beside the ledger
    return code


def follow(job: Job, versions: dict, facts: dict) -> int:
    """The launcher of a node other than 0: runs as node 0 says, and ends with its exit code. Raises NodeLost if node 0 is gone."""

    def ours() -> dict:
        ensure_data(job)
        return _shared(facts, versions)

    with nodes.Follower(job.place) as follower:
        follower.join(ours)
        while (order := follower.order())["do"] == "prepare":
            _follow_once(job, versions, follower, order)
        if order["code"]:
            tell(f"node 0 ended with exit code {order['code']}", *filter(None, [order.get("why")]))
        return order["code"]


def _shared(facts: dict, versions: dict) -> dict:
    """What must be equal on all nodes; the data may lie elsewhere, and a copy of the code need not be a git repository."""
    return {key: value for key, value in facts.items() if key not in ("data", "commit")} | {"packages": versions["packages"]}


def _follow_once(job: Job, versions: dict, follower: nodes.Follower, order: dict) -> None:
    """The ranks of this node. Their directory is node_<n> within the run's: of a shared LOGDIR, or of our own."""
    run_dir = job.log_dir / job.benchmark / order["run"] / f"node_{job.place.rank}"
    rundir.require_writable(run_dir / "ranks")
    rundir.write_facts(run_dir, job.choice.config, versions)
    tell(f"run        {run_dir}, seed {order['seed']}")
    cleared = page_cache.clear(data_files(job))
    if not follower.ready(cleared):
        return
    watch = follower.watch(run_dir / "ranks", job.choice.config.gpus_per_node)
    with sampler.beside(run_dir, wanted=job.choice.device == "cuda"):
        ending = supervise.supervise(trainer_command(job, run_dir, order["seed"]), trainer_environment(job, cleared), watch)
    follower.ended(run_dir, ending)
    if ending.signal_number:
        raise Interrupted(ending.signal_number)


def data_files(job: Job) -> list[Path]:
    return [job.data_dir / name for name in rules_of(job.benchmark, job.choice.config).data_files]


def ensure_data(job: Job) -> None:
    """Build the miniature's data if it is missing; for real data say how to get it. Raises DataError."""
    absent = [path for path in data_files(job) if not path.is_file()]
    if not absent:
        return
    prepare = f"./run_and_time.sh {job.benchmark} prepare"
    if not job.choice.config.miniature:
        raise DataError(
            f"there is no {absent[0]}",
            f"{len(absent)} of {len(data_files(job))} data files are missing",
            f"set DATADIR, or see {prepare} --help",
        )
    tell(f"building the miniature's data in {job.data_dir} (once)")
    command = [sys.executable, "-m", f"{job.benchmark}.prepare", "miniature", "--data-dir", str(job.data_dir)]
    if subprocess.run(command, stdout=sys.stderr).returncode or not all(path.is_file() for path in data_files(job)):
        raise DataError("the miniature's data could not be built", "see the message above", f"try {prepare} miniature --data-dir DIR")


def run_once(job: Job, versions: dict, leader: nodes.Leader, run_dir: Path, seed: int) -> series.Outcome:
    """One timed run in `run_dir`. Good only if it reached the target and its log is clean."""
    rundir.write_facts(run_dir, job.choice.config, versions)
    tell(f"run        {run_dir}, seed {seed}")
    cleared = leader.prepare(run_dir.name, seed, page_cache.clear(data_files(job)))
    if cleared == "no":
        tell("NOTE       the data is still in the page cache, and the log will say so: not for submission")
    start_date = _date()
    print(f"STARTING TIMING RUN AT {start_date}", flush=True)
    ranks_per_node = job.choice.config.gpus_per_node
    leader.start()
    watch = leader.watch(run_dir / "ranks", ranks_per_node, _hang_limits(job))
    with sampler.beside(run_dir, wanted=job.choice.device == "cuda"):
        ending = supervise.supervise(trainer_command(job, run_dir, seed), trainer_environment(job, cleared), watch)
    ending = leader.finish(run_dir, ranks_per_node, ending)
    print(f"ENDING TIMING RUN AT {_date()}", flush=True)
    result = verdict.read_result(run_dir / "result.txt")
    if result.seconds is not None:
        org = job.environment.get("MLPERF_SUBMISSION_ORG", "")
        print(f"RESULT,{job.benchmark.upper()},,{result.seconds:.0f},{org},{start_date}", flush=True)
    error = judge(job, run_dir, leader, ending, result)
    _report(run_dir)
    tell(*closing(result, run_dir, error.lines() if error else "", job.choice.config.miniature))
    return series.Outcome(error, result, cleared)


def judge(job: Job, run_dir: Path, leader: nodes.Leader, ending: supervise.Ending, result: verdict.Result) -> RunError | None:
    """What went wrong, also left in failure.json; None for a run that reached the target and passed the checks."""
    facts: dict = {}
    error: RunError | None
    if ending.signal_number:
        error = Interrupted(ending.signal_number)
    elif leader.lost:
        error = next(iter(leader.lost.values()))
    elif ending.hang and not leader.failed:
        error, facts = ending.hang, ending.guilty or {}
    elif ending.returncode == 0 and result.status == "success":
        error = _check(run_dir)
    else:
        error, facts = verdict.diagnose(run_dir, job.choice.config.world_size)
    if error:
        verdict.write_failure(run_dir, error, facts)
    return error


def _check(run_dir: Path) -> RunError | None:
    answer = _captured("submission.check", str(run_dir / "result.txt"))
    (run_dir / "check.txt").write_text(answer.stdout)
    if answer.returncode == 0:
        return None
    tell(answer.stdout.rstrip())
    why = "findings are listed above" if answer.returncode == CheckFailed.exit_code else f"the checks ended with code {answer.returncode}"
    return CheckFailed("the target was reached, but the log is not clean", why, f"see {run_dir / 'check.txt'}")


def _report(run_dir: Path, module: str = "submission.report") -> None:
    """The report is for people: without it a run is still what it is."""
    answer = _captured(module, str(run_dir))
    if answer.returncode:
        tell("note: no report was written:", *answer.stdout.splitlines()[-1:])


def _captured(module: str, argument: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", module, argument], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


# --- the trainer's processes ------------------------------------------------------------------------------------------


def _torchrun(folder: Path, job: Job, arguments: list[str], module: str = "") -> list[str]:
    """`python -m torch.distributed.run ...`, by way of launch.torchrun.

    For several nodes the static rendezvous (a TCPStore on node 0): c10d's numbers the nodes by host name, and rank 0 must be on node 0.
    """
    config, place = job.choice.config, job.place
    where = ["--rdzv-backend", "static", "--master-addr", place.address, "--master-port", str(place.port), "--node-rank", str(place.rank)]
    size = ["--nnodes", str(config.nodes), *(where if config.nodes > 1 else []), "--nproc-per-node", str(config.gpus_per_node)]
    size = size if config.nodes > 1 else ["--standalone", *size]
    return [sys.executable, "-m", "launch.torchrun", str(folder), *size, "-m", module or f"{job.benchmark}.train", *arguments]


def trainer_command(job: Job, run_dir: Path, seed: int) -> list[str]:
    where = ["--run-dir", str(run_dir), "--data-dir", str(job.data_dir)]
    return _torchrun(run_dir, job, [*where, "--config-name", job.choice.log_name, "--seed", str(seed), "--device", job.choice.device])


def bench_command(job: Job, folder: Path, options: argparse.Namespace) -> list[str]:
    arguments = ["--benchmark", job.benchmark, "--config", str(folder / job.choice.log_name), "--device", job.choice.device]
    for name in ("steps", "warmup", "layers", "eval_sequences"):
        if getattr(options, name) is not None:
            arguments += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    if getattr(options, "out", None):
        arguments += ["--profile", str(options.out)]
    return _torchrun(folder, job, arguments, "throughput.bench")


def trainer_environment(job: Job, cleared: str) -> dict[str, str]:
    """Ours, the config's [env] (which wins: it is part of what is measured), and what was done about the page cache."""
    config = job.choice.config
    for name, value in config.env.items():
        if job.environment.get(name, value) != value:
            tell(f"note: {name}={value} from the config replaces {job.environment[name]}")
    threads = 1 if job.choice.device == "cuda" else max(1, (os.cpu_count() or 1) // config.gpus_per_node)
    paths = [str(ROOT), *filter(None, [job.environment.get("PYTHONPATH")])]
    ours = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", "CACHE_CLEARED": cleared}
    return {"OMP_NUM_THREADS": str(threads), **job.environment, **config.env, **ours}


def _hang_limits(job: Job) -> supervise.HangLimits:
    config = job.choice.config
    step_s = config.hang_timeout_s * supervise.BEFORE_COLLECTIVES
    return supervise.HangLimits(max(step_s, STARTUP_S), step_s)


def bench(job: Job, options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        (folder / job.choice.log_name).write_text(job.choice.config.as_toml())
        ending = supervise.supervise(bench_command(job, folder, options), trainer_environment(job, "no"))
        if ending.signal_number:
            return 128 + ending.signal_number
        if ending.returncode == 0:
            return 0
        error, _ = verdict.diagnose(folder, job.choice.config.world_size)
        tell(error.lines())
        return error.exit_code


def profile(job: Job, options: argparse.Namespace) -> int:
    """bench with a profile after it, in a directory of its own, and the page about it."""
    rundir.require_writable(options.out)
    if code := bench(job, options):
        return code
    _report(options.out, "throughput.profile_page")
    tell(f"profile    {options.out}: profile.html, profile.json, and trace.json.gz for ui.perfetto.dev")
    return 0


def _profile_folder(job: Job, options: argparse.Namespace) -> Path:
    stem = f"{job.benchmark}_{Path(job.choice.log_name).stem}_{time.strftime('%Y%m%d-%H%M%S')}"
    folder = (options.out or job.log_dir / "profiles" / stem).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already", "a profile is not overwritten", "name a new directory with --out")
    return folder


def _date() -> str:
    return time.strftime("%Y-%m-%d %I:%M:%S %p")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
