"""Checks of what `package` is asked to submit: names, system description, series and runs.

`check_names` and `check_description` judge the options. `runs_to_submit` selects the ten runs of a
benchmark, and checks them and the whole series. Standard library only, except for mlperf-logging.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.benchmarks import OPEN
from common.errors import CheckFailed, ConfigError
from common.paths import ROOT
from common.records import ledger
from common.records.run_record import INTERVALS
from common.terminal import plural
from common.training.arguments import runs_in
from common.training.mllog import EMULATED_KEY
from common.variables import Use, select
from submission import describe, official_tools, prerequisites
from submission.examined_log import ExaminedLog, examine
from submission.findings import Finding
from submission.log_rules import REHEARSAL_KEY
from submission.official_tools import BY_HAND
from submission.run import LOST, Run
from submission.series import Series, TenRuns, read_series, ten_runs

COMMIT = re.compile("[0-9a-f]{40}")
# Facts that must be equal for all runs of a result. A series pins its engines, so a run with other
# engines was not made by that series.
SAME = (
    "commit",
    "python",
    "packages",
    "gpus",
    "driver",
    "engines",
    "variables",
    "system_tuning",
)
# Keys that the official checker requires and that are logged after run_start. It accepts keys of
# epochs in place of keys of blocks, and may name either.
AFTER_RUN_START = frozenset(
    {*INTERVALS, "eval_accuracy"} - {"init_start", "init_stop", "run_start"}
)


@dataclass(frozen=True)
class PackageRequest:
    """The options of one `package` command."""

    sources: Mapping[str, str | Path]  # benchmark -> directory of its series
    system: Path  # system description
    out: Path  # directory to create
    org: str  # organization
    ruleset: str = official_tools.CLOSED_RULESETS[-1]
    implementation: str = "torch_native"
    series: str = ""  # ID of a series in the ledger, or its beginning
    root: Path = ROOT  # the project's git repository
    rehearsal: bool = False  # whether the logs are invented


def require(condition: bool, what: str, why: str, do: str) -> None:
    """Raise CheckFailed with these texts unless `condition` is true."""
    if not condition:
        raise CheckFailed(what, why, do)


def check_names(request: PackageRequest) -> None:
    """Raise ConfigError if a name cannot be submitted, or if `request.out` exists."""
    prerequisites.require_file_name("--system", request.system)
    prerequisites.require_org("--org", request.org, request.rehearsal)
    prerequisites.require_name("--implementation", request.implementation)
    if request.implementation == request.system.stem:
        raise ConfigError(
            f"--implementation {request.implementation} is also the name of --system",
            "both are names of directories in implementations/",
            "choose another --implementation",
        )
    if request.out.exists() or request.out.is_symlink():
        raise ConfigError(
            f"--out {request.out} exists",
            "nothing is overwritten",
            f"choose another name, or remove it; to add a system, see {BY_HAND}",
        )


def check_description(request: PackageRequest, description: dict) -> None:
    """Raise CheckFailed if the system description is incomplete or names another submitter."""
    problems = describe.problems(description)
    require(
        not problems,
        f"{request.system} cannot be submitted",
        "; ".join(problems),
        f"complete it: ./run_and_time.sh describe --out {request.system} ...",
    )
    submitter = description["submitter"]
    require(
        submitter == request.org,
        f"{request.system}: submitter is {submitter!r}, --org is {request.org!r}",
        "reviewers find the code by the submitter's name",
        "make them equal",
    )


def runs_to_submit(request: PackageRequest, benchmark: str, description: dict) -> TenRuns:
    """Return the ten runs of `benchmark` to submit. Check them and their whole series.

    Raises ConfigError if there is no series, CheckFailed if a check fails.
    """
    folder = series_folder(Path(request.sources[benchmark]), benchmark)
    series = read_series([folder], request.series, request.ruleset)
    for run in series.runs:
        _require_benchmark_run(request, run, benchmark)
    ten = ten_runs(series)
    require(
        not ten.invalid,
        f"{series.name} cannot be submitted",
        ten.invalid,
        "run more: NEXP with --resume, or a new series",
    )
    _print_choice(benchmark, series, ten)
    _check_seeds(series.runs)
    for run in ten.runs:
        require(
            bool(run.log.events),
            f"{run.name} left no log",
            "a result set has ten files, and the official tools read each of them",
            "run more: NEXP with --resume, or a new series",
        )
        _check_same(ten.runs[0], run)
        _check_identity(request, run, description)
        check_log(request, run)
    return ten


def _print_choice(benchmark: str, series: Series, ten: TenRuns) -> None:
    """Print the attempts of `series`, with a * before the ten that are submitted."""
    count = sum(not window.invalid for window in series.windows)
    print(
        f"{benchmark}: {series.name}, {plural(len(series.runs), 'attempt')},"
        f" {plural(count, 'valid window')} of ten"
    )
    first = ten.runs[0].number
    last = ten.runs[-1].number
    for note in series.notes:
        print(f"  {note}")
    rcp = "" if ten.passed else ", fails the RCP test"
    print(f"  median: attempts {first} to {last}, {ten.rank:.4f} min{rcp}")
    for run in series.runs:
        mark = "*" if run in ten.runs else " "
        print(f"  {mark} {run.describe()}")


def series_folder(source: Path, benchmark: str) -> Path:
    """Return LOGDIR/<benchmark> for `source`, which is LOGDIR or LOGDIR/<benchmark>.

    Raises ConfigError if there is no ledger.
    """
    source = runs_in(source)
    folder = source if (source / ledger.NAME).is_file() else source / benchmark
    if not (folder / ledger.NAME).is_file():
        raise ConfigError(
            f"{source}: no series of {benchmark}",
            f"there is no {ledger.NAME} in it or in its folder {benchmark}",
            "name the LOGDIR of the series",
        )
    return folder


def _require_benchmark_run(request: PackageRequest, run: Run, benchmark: str) -> None:
    """Raise CheckFailed if `run` cannot be a benchmark result.

    It cannot if it is of another benchmark, a miniature, a rehearsal, a continued or an emulated
    run, or if its config was changed.
    """
    logged = run.log.value("submission_benchmark")
    require(
        logged in (None, benchmark),
        f"{run.path} is a log of {logged}",
        f"--benchmark says that it is a log of {benchmark}",
        "correct --benchmark",
    )
    division = run.log.value("submission_division")
    require(
        division != OPEN,
        f"{run.folder} ran in the open division",
        "only results of the closed division are packaged",
        f"make the tree by hand: {BY_HAND}",
    )
    require(
        division != "miniature",
        f"{run.folder} is a miniature",
        "a miniature has its own target and is not a benchmark result",
        "run the benchmark, or try the packaging with --rehearse",
    )
    require(
        run.log.value(REHEARSAL_KEY) is None or request.rehearsal,
        f"{run.folder} is a rehearsal",
        "its log is invented",
        "run the benchmark",
    )
    require(
        run.log.value("resumed") is None,
        f"{run.folder} was continued from a checkpoint of another run",
        "a run is timed from its first step to its last, without interruption",
        "run it without --continue",
    )
    emulated = run.log.value(EMULATED_KEY)
    require(
        emulated is None,
        f"{run.folder} emulated {emulated}",
        "emulation computes the results of this number format in bf16 or FP8",
        'run a series with linear = "fp8"',
    )
    name = str(run.log.value("config_filename") or run.start.get("config", ""))
    require(
        "+" not in name and not run.start.get("modified"),
        f"{run.folder} ran with {name}",
        "it did not run with an unchanged config of the repository (--set, or another GPU)",
        "write a config for it, commit it, and run the series with that config",
    )


def _check_seeds(runs: list[Run]) -> None:
    """Raise CheckFailed unless all runs of the series, submitted or not, have independent seeds."""
    first_with: dict[object, Run] = {}
    previous: object = None
    for run in runs:
        seed = run.start.get("seed")
        logged = run.log.value("seed")
        require(
            type(seed) is int and logged in (None, seed),
            f"{run.path}: seed {logged}",
            f"the ledger has seed {seed}: the log is not the one that this attempt wrote",
            "submit logs as they were written",
        )
        other = first_with.setdefault(seed, run)
        require(
            other is run,
            f"attempts {other.number} and {run.number} have the same seed {seed}",
            "the ten runs must be independent",
            "run a series without SEED",
        )
        require(
            type(previous) is not int or seed != previous + 1,
            f"attempts {run.number - 1} and {run.number} have the seeds {previous} and {seed}",
            "consecutive seeds are not random: they must come from the clock or system entropy",
            "run a series without SEED",
        )
        previous = seed


def _check_same(first: Run, run: Run) -> None:
    """Raise CheckFailed unless `run` has the system, code, engines and config of `first`.

    Source: MLPerf training rules, "Benchmark Results".
    """
    commit = run.versions.get("commit")
    named = isinstance(commit, str) and COMMIT.fullmatch(commit) is not None
    why = "its versions.json names no commit (40 hexadecimal digits)"
    if named:
        why = "there were uncommitted changes"
    require(
        named and run.versions.get("dirty") is False,
        f"{run.folder}: the code that ran is unknown",
        why,
        "commit, and run the series from a clean tree",
    )
    attempts = f"attempts {first.number} and {run.number}"
    facts = _facts(run)
    others = _facts(first)
    for key in SAME:
        value = facts.get(key)
        other = others.get(key)
        require(
            value == other,
            f"{attempts} ran with different {key}: {_without(other, value)} and"
            f" {_without(value, other)}",
            f"the ten runs must have the same system and the same code ({run.folder})",
            "run a series without changing anything",
        )
    require(
        run.config == first.config,
        f"{attempts} ran with different configs",
        f"compare {first.folder / 'config.toml'} and {run.folder / 'config.toml'}",
        "run a series with one config",
    )


def _facts(run: Run) -> dict:
    """Return versions.json, with the engines of the self-test, and without variables of a host."""
    variables = select(Use.PACKAGED, run.variables)
    return run.versions | {"engines": run.engines, "variables": variables}


def _without(value: object, other: object) -> object:
    """Return `value`, or only the items that `other` has not, if both are dictionaries."""
    if isinstance(value, dict) and isinstance(other, dict):
        return {key: item for key, item in value.items() if (key, item) not in other.items()}
    return value


def _check_identity(request: PackageRequest, run: Run, description: dict) -> None:
    """Raise CheckFailed unless log, config and system description agree.

    They must name the same organization, status, platform, GPUs and torch version.
    """
    packages = run.versions.get("packages") or {}
    torch = str(packages.get("torch") or "").split("+")[0]
    require(
        bool(run.nodes),
        f"{run.folder / 'config.toml'} does not name the GPUs",
        "the file is missing or damaged",
        "submit run directories as the launcher wrote them",
    )
    ran_on = {
        "number_of_nodes": str(run.nodes),
        "accelerators_per_node": str(run.gpus_per_node),
        "accelerator_model_name": str(run.gpu),
        "framework": torch,
    }
    for key, value in ran_on.items():
        described = str(description[key])  # the official tools accept a number as well
        named = re.search(rf"(?<![\w.]){re.escape(value)}(?![\w.])", described) is not None
        require(
            named,
            f"{request.system}: {key} is {description[key]}, not {value}",
            f"{run.folder} ran on {run.nodes}x{run.gpus_per_node} {run.gpu} with torch {torch}",
            "describe the system that ran",
        )
    for key, texts in describe.accepted_texts(request.system, description).items():
        logged = run.log.value(f"submission_{key}")
        require(
            logged in texts,
            f"{run.path}: submission_{key} is {logged!r}",
            f"for {request.system} it must be {' or '.join(map(repr, texts))}",
            f"do not edit the log: run the series with MLPERF_SUBMISSION_{key.upper()} set, or"
            " correct the system description if the logs are right",
        )


def check_log(request: PackageRequest, run: Run) -> None:
    """Raise CheckFailed if submission.check finds errors or warnings in the log of `run`.

    Findings that are unavoidable for a run that missed its target or was killed are accepted.
    """
    require(
        not run.path.is_symlink(),
        f"{run.path} is a link",
        "a log must be the file that the run wrote",
        "submit run directories as the launcher wrote them",
    )
    examined = examine(run.path, request.ruleset, request.root, ours=True)
    complaints = []
    for finding in examined.errors(werror=True):
        if _is_unavoidable(run, finding, examined):
            continue
        if request.rehearsal and finding.rule == REHEARSAL_KEY:
            continue
        complaints.append(f"line {finding.line}: {finding.message} ({finding.source})")
    require(
        not complaints,
        f"{run.path} is not clean",
        "; ".join(complaints),
        f"see ./run_and_time.sh check {run.path}",
    )


def _is_unavoidable(run: Run, finding: Finding, examined: ExaminedLog) -> bool:
    """Return whether every run that fails as `run` did causes `finding`.

    The official checker requires an evaluation at the target, and records that a run which ends
    early does not write. Our rules require run_stop, which a killed run does not write.
    """
    if run.status == "success":
        return False
    if finding in examined.verdict.complaints:
        return finding.rule == "target" or finding.key in AFTER_RUN_START
    return run.counts_as == LOST and finding.rule == "once" and "run_stop" in finding.message
