"""`./run_and_time.sh package --benchmark B=DIR ... --system FILE.json --out DIR --org ORG`

The command makes a submission from series of ten runs. It writes DIR/ORG with systems/,
results/<system>/<benchmark>/result_0.txt .. result_9.txt, and
benchmarks/<benchmark>/implementations/ with the code of the commit that ran, from git. The ten runs
are consecutive attempts of the series. submission/series.py selects them, and the command prints
its choice. Then it runs the package checker, the summarizer and the repo checker on DIR/ORG, and
keeps their output in DIR.

With --rehearse, the logs are invented (submission/rehearsal.py), and nobody can submit the result.
--benchmark may then name a series of miniatures, whose seeds and outcomes are used.

Exit code: 0 all official tools reported success, 20 a tool did not, or something must not be
submitted, 2 wrong usage, 17 DIR cannot be written, 18 no official tools. If the submission cannot
be completed, DIR is not created. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import benchmarks
from common.command_line import Parser, program
from common.errors import CheckFailed, ConfigError, StorageError
from common.paths import ROOT
from common.records import ledger
from common.training.mllog import EMULATED
from launch.run_directory import doubts, git
from submission import check, describe, implementation, official_tools, rehearsal, terminal
from submission.examined import Examined
from submission.log_rules import REHEARSAL, Finding
from submission.runs import INTERVALS, LOST, Run
from submission.series import Series, TenRuns, read_series, ten_runs, windows
from submission.terminal import add_series_option, plural

# Pattern of the name of an organization, system or implementation, which are names of directories.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
PLACEHOLDERS = (  # names that are not those of an organization
    "unnamed",
    "org",
    "yourorg",
    "your_org",
    "myorg",
    "example",
    "test",
    "todo",
    "none",
    "organisation",  # the British spelling too
    "organization",
)
COMMIT = re.compile("[0-9a-f]{40}")
# Keys of versions.json that must be equal for all runs of a result. A series pins its engines, so a
# run with other engines was not made by that series.
SAME = ("commit", "python", "packages", "engines", "gpus", "driver")
# Keys that the official checker requires and that are logged after run_start. It accepts keys of
# epochs in place of those of blocks, and may name either of them.
AFTER_RUN_START = frozenset(
    {*INTERVALS, "eval_accuracy"} - {"init_start", "init_stop", "run_start"}
)
SIZE_LIMIT = 50 * 2**20  # bytes per file, as in the repo checker
# Names of caches and core dumps, and endings of build outputs.
CACHES = ("__pycache__", "node_modules", "wandb", "core")
CACHE_SUFFIXES = (".pyc", ".pyo", ".so", ".o", ".a", ".egg-info", ".whl", ".deb", ".rpm", ".swp")

# Kind of secret -> pattern of its text.
SECRETS = {
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{20,}",
    "an AWS key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "a GitHub token": r"\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_[A-Za-z0-9_]{30,}",
    "an API key": r"\bsk-[A-Za-z0-9_-]{24,}|\bAIza[0-9A-Za-z_-]{35}",
    "a Slack token": r"\bxox[abprs]-[A-Za-z0-9-]{10,}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a password": (
        r"(?i:\b\w*(?:password|passwd|api_?key|secret_key|auth_token)[\"']?\s*[=:]\s*[\"']?)"
        r"(?!None\b|str\b|\$|<)[^\s\"',)\]}\[({]{4,}"
    ),
    "a password in an address": r"\b[a-z][a-z0-9+.-]*://[^/\s:@\"'{}]+:[^/\s:@\"'{}]+@",
}


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


class PackageParser(Parser):
    """The parser of `package`. Only --rehearse needs no --benchmark, --system and --org."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options = super().parse_args(args, namespace)
        missing = [name for name in ("benchmark", "system", "org") if not getattr(options, name)]
        if missing and not options.rehearse:
            names = ", ".join(f"--{name}" for name in missing)
            self.error(f"the following arguments are required: {names}")
        return options


def parser(benchmark: str = "") -> Parser:
    parser = PackageParser(
        "package",
        "Make a submission from series of ten runs, and run the official tools on it.",
        [
            "package --benchmark llama31_8b=results --system H200_1x8.json --org Us --out tree",
            "package --rehearse --out rehearsal",
            "package --rehearse --benchmark llama31_8b=results --out rehearsal --org Us",
        ],
    )
    parser.add_argument(
        "--benchmark",
        action="append",
        default=[],
        metavar="B=DIR",
        help="benchmark, and LOGDIR or LOGDIR/<benchmark> of its series (can be repeated)",
    )
    parser.add_argument(
        "--system",
        type=Path,
        metavar="FILE.json",
        help="system description, made by ./run_and_time.sh describe",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="new directory to write"
    )
    parser.add_argument(
        "--org",
        default="",
        help="organization, as in MLPERF_SUBMISSION_ORG of the runs and in the system description",
    )
    parser.add_argument(
        "--ruleset",
        choices=official_tools.CLOSED_RULESETS,
        default=PackageRequest.ruleset,
        help=f"MLPerf ruleset (default: {PackageRequest.ruleset})",
    )
    parser.add_argument(
        "--implementation",
        default=PackageRequest.implementation,
        metavar="NAME",
        help=f"name of the implementation directory (default: {PackageRequest.implementation})",
    )
    add_series_option(parser)
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="make a marked submission from invented logs, which nobody can submit"
        " (requires only --out)",
    )
    return parser


def _package(options: argparse.Namespace) -> int:
    if options.rehearse:
        return rehearse(options)
    request = PackageRequest(
        sources=terminal.pairs("--benchmark", options.benchmark, benchmarks.closed()),
        system=options.system,
        out=options.out,
        org=options.org,
        ruleset=options.ruleset,
        implementation=options.implementation,
        series=options.series,
    )
    return package(request)


def rehearse(options: argparse.Namespace, root: Path = ROOT) -> int:
    """Package invented series; return the exit code.

    `options`: parsed options. Without the directory of a benchmark, the seeds and outcomes of its
    series are invented as well. Without a system, its description is invented. `root`: the
    project's git repository. Raises CheckFailed if `root` is not a git repository, and the errors
    of `package`.
    """
    sources = _rehearsal_sources(options)
    for doubt in doubts(root, os.environ):
        print(f"note: a run that is started now could not be submitted: {doubt}")
    commit = git(root, "rev-parse", "HEAD")
    if commit is None:
        raise CheckFailed(
            f"{root} has no commit",
            "a submission contains the code of the commit that ran",
            "rehearse in a git clone of this project",
        )
    org = rehearsal.marked(options.org or "Org")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        request = PackageRequest(
            sources=dict.fromkeys(sources, folder),
            system=rehearsal.write_description(folder, options.system, org),
            out=options.out,
            org=org,
            ruleset=options.ruleset,
            implementation=options.implementation,
            root=root,
            rehearsal=True,
        )
        _check_names(request)
        description = describe.read(request.system)
        _check_description(request, description)
        for benchmark, source in sources.items():
            series = None
            if source:
                series = read_series([_series_folder(Path(source), benchmark)], options.series)
            rehearsal.write_series(
                folder / benchmark,
                benchmark,
                rehearsal.attempts_like(series),
                config=rehearsal.config_file(root, benchmark, description),
                org=org,
                system=request.system,
                commit=commit,
            )
        return package(request)


def _rehearsal_sources(options: argparse.Namespace) -> dict[str, str]:
    """Return benchmark -> directory of a series, or "", of the option --benchmark.

    The default is all benchmarks, without directories.
    """
    texts = []
    for text in options.benchmark or benchmarks.closed():
        texts.append(text if "=" in text else f"{text}=")
    return terminal.pairs("--benchmark", texts, benchmarks.closed())


def package(request: PackageRequest) -> int:
    """Build the submission and run the official tools on it; return the exit code.

    Raises ConfigError for wrong options, CheckFailed if something must not be submitted,
    StorageError if `request.out` cannot be written, PreflightError without the official tools. If
    the submission cannot be completed, nothing is left behind.
    """
    _check_names(request)
    description = describe.read(request.system)
    _check_description(request, description)
    chosen = {name: _chosen(request, name, description) for name in request.sources}
    try:
        request.out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{request.out.name}-", dir=request.out.parent
        ) as folder:
            partial = Path(folder, "partial")
            _build(partial / request.org, request, chosen)
            problems = forbidden(partial / request.org)
            _require(
                not problems,
                f"{plural(len(problems), 'file')} must not be in a submission",
                "; ".join(problems),
                "remove them from the commit or from the logs",
            )
            partial.rename(request.out)
    except OSError as error:
        raise StorageError(
            f"cannot write {request.out}", str(error), "free space, or choose another --out"
        ) from error
    missed = 0
    for ten in chosen.values():
        missed += sum(not run.converged for run in ten.runs)
    return judge(request, missed)


# Checks of the request, the system description and the runs.


def _require(condition: bool, what: str, why: str, do: str) -> None:
    """Raise CheckFailed with these texts unless `condition` is true."""
    if not condition:
        raise CheckFailed(what, why, do)


def _check_names(request: PackageRequest) -> None:
    """Raise ConfigError if a name cannot be submitted, or if `request.out` exists."""
    names = {
        "--org": request.org,
        "--system": request.system.stem,
        "--implementation": request.implementation,
    }
    for option, name in names.items():
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"{option}: {name!r} cannot be the name of a directory in a submission",
                "only letters, digits and _ . + - are allowed, and no leading dot",
                "choose another name",
            )
    if request.org.lower() in PLACEHOLDERS or "placeholder" in request.org.lower():
        raise ConfigError(
            f"--org {request.org}",
            "this is a placeholder, not the name of an organization",
            "give the name of your organization, as in MLPERF_SUBMISSION_ORG of the runs",
        )
    if rehearsal.is_marked(request.org) and not request.rehearsal:
        raise ConfigError(
            f"--org {request.org}",
            "this name marks a rehearsal, which cannot be submitted",
            "give the name of your organization, and package series of real runs",
        )
    if request.out.exists() or request.out.is_symlink():
        raise ConfigError(
            f"--out {request.out} exists",
            "nothing is overwritten",
            "choose another name, or remove it",
        )


def _check_description(request: PackageRequest, description: dict) -> None:
    """Raise CheckFailed if the system description is incomplete or names another submitter."""
    problems = describe.problems(description)
    _require(
        not problems,
        f"{request.system} cannot be submitted",
        "; ".join(problems),
        f"complete it: ./run_and_time.sh describe --out {request.system} ...",
    )
    submitter = description["submitter"]
    _require(
        submitter == request.org,
        f"{request.system}: submitter is {submitter!r}, --org is {request.org!r}",
        "reviewers find the code by the submitter's name",
        "make them equal",
    )


def _chosen(request: PackageRequest, benchmark: str, description: dict) -> TenRuns:
    """Return the ten runs of `benchmark` to submit, after checking them and their series.

    Raises ConfigError if there is no series, CheckFailed if a check fails.
    """
    folder = _series_folder(Path(request.sources[benchmark]), benchmark)
    series = read_series([folder], request.series)
    for run in series.runs:
        _require_benchmark_run(request, run, benchmark)
    chosen = ten_runs(series)
    _require(
        not chosen.invalid,
        f"{series.name} cannot be submitted",
        chosen.invalid,
        "run more: NEXP with --resume, or a new series",
    )
    _print_choice(benchmark, series, chosen)
    _check_seeds(series.runs)
    for run in chosen.runs:
        _require(
            bool(run.log.events),
            f"{run.name} was killed and left no log",
            "a result set has ten files, and the official tools read each of them",
            "run more: NEXP with --resume, or a new series",
        )
        _check_same(chosen.runs[0], run)
        _check_identity(request, run, description)
        _check_log(request, run)
    return chosen


def _print_choice(benchmark: str, series: Series, chosen: TenRuns) -> None:
    """Print the attempts of `series`, with a * before the ten that are submitted."""
    count = sum(not window.invalid for window in windows(series))
    print(
        f"{benchmark}: {series.name}, {plural(len(series.runs), 'attempt')},"
        f" {plural(count, 'valid window')} of ten"
    )
    first = chosen.runs[0].number
    last = chosen.runs[-1].number
    rcp = "" if chosen.passed else ", fails the RCP test"
    print(f"  median: attempts {first} to {last}, {chosen.rank:.4f} min{rcp}")
    for run in series.runs:
        print(f"  {'*' if run in chosen.runs else ' '} {run.describe()}")


def _series_folder(source: Path, benchmark: str) -> Path:
    """Return LOGDIR/<benchmark> for `source`, which is LOGDIR or LOGDIR/<benchmark>.

    Raises ConfigError if there is no ledger.
    """
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
    _require(
        logged in (None, benchmark),
        f"{run.path} is a log of {logged}",
        f"--benchmark says that it is a log of {benchmark}",
        "correct --benchmark",
    )
    _require(
        run.log.value("submission_division") != "miniature",
        f"{run.folder} is a miniature",
        "a miniature has its own target and is not a benchmark result",
        "run the benchmark, or try the packaging with --rehearse",
    )
    _require(
        run.log.value(REHEARSAL) is None or request.rehearsal,
        f"{run.folder} is a rehearsal",
        "its log is invented",
        "run the benchmark",
    )
    _require(
        run.log.value("resumed") is None,
        f"{run.folder} was continued from a checkpoint of another run",
        "a run is timed from its first step to its last, without interruption",
        "run it without --continue",
    )
    emulated = run.log.value(EMULATED)
    _require(
        emulated is None,
        f"{run.folder} emulated {emulated}",
        "emulation computes the results of this number format in bf16 or FP8",
        'run a series with linear = "fp8"',
    )
    name = str(run.log.value("config_filename") or run.start.get("config", ""))
    _require(
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
        _require(
            type(seed) is int and logged in (None, seed),
            f"{run.path}: seed {logged}",
            f"the ledger has seed {seed}: the log is not the one that this attempt wrote",
            "submit logs as they were written",
        )
        other = first_with.setdefault(seed, run)
        _require(
            other is run,
            f"attempts {other.number} and {run.number} have the same seed {seed}",
            "the ten runs must be independent",
            "run a series without SEED",
        )
        _require(
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
    _require(
        named and run.versions.get("dirty") is False,
        f"{run.folder}: the code that ran is unknown",
        why,
        "commit, and run the series from a clean tree",
    )
    attempts = f"attempts {first.number} and {run.number}"
    for key in SAME:
        value = run.versions.get(key)
        other = first.versions.get(key)
        _require(
            value == other,
            f"{attempts} ran with different {key}: {other} and {value}",
            "the ten runs must have the same system and the same code",
            "run a series without changing anything",
        )
    _require(
        run.config == first.config,
        f"{attempts} ran with different configs",
        f"compare {first.folder / 'config.toml'} and {run.folder / 'config.toml'}",
        "run a series with one config",
    )


def _check_identity(request: PackageRequest, run: Run, description: dict) -> None:
    """Raise CheckFailed unless log, config and system description agree.

    They must name the same organization, platform, GPUs and torch version.
    """
    rerun = "do not edit the log: run the series with MLPERF_SUBMISSION_{} set"
    platform = run.log.value("submission_platform")
    packages = run.versions.get("packages") or {}
    torch = str(packages.get("torch") or "").split("+")[0]
    _require(
        run.org == request.org,
        f"{run.path}: submission_org is {run.org!r}, --org is {request.org!r}",
        "reviewers see both",
        rerun.format("ORG"),
    )
    _require(
        bool(run.nodes),
        f"{run.folder / 'config.toml'} does not name the GPUs",
        "the file is missing or damaged",
        "submit run directories as the launcher wrote them",
    )
    shape = f"{run.nodes}x{run.gpus_per_node}"
    facts = {
        "number_of_nodes": str(run.nodes),
        "accelerators_per_node": str(run.gpus_per_node),
        "accelerator_model_name": str(run.gpu),
        "framework": torch,
    }
    for key, value in facts.items():
        named = re.search(rf"(?<![\w.]){re.escape(value)}(?![\w.])", description[key]) is not None
        _require(
            named,
            f"{request.system}: {key} is {description[key]}, not {value}",
            f"{run.folder} ran on {shape} {run.gpu} with torch {torch}",
            "describe the system that ran",
        )
    allowed = (request.system.stem, description["system_name"], f"{shape} {run.gpu}")
    _require(
        platform in allowed,
        f"{run.path}: submission_platform is {platform!r}",
        f"for this system it must be one of {', '.join(map(repr, allowed))}",
        rerun.format("PLATFORM"),
    )


def _check_log(request: PackageRequest, run: Run) -> None:
    """Raise CheckFailed if submission.check finds errors or warnings in the log of `run`.

    Findings that are unavoidable for a run that missed its target or was killed are accepted.
    """
    _require(
        not run.path.is_symlink(),
        f"{run.path} is a link",
        "a log must be the file that the run wrote",
        "submit run directories as the launcher wrote them",
    )
    examined = check.examine(run.path, request.ruleset, request.root, ours=True)
    complaints = []
    for finding in examined.errors(werror=True):
        if _is_unavoidable(run, finding, examined):
            continue
        if request.rehearsal and finding.rule == REHEARSAL:
            continue
        complaints.append(f"line {finding.line}: {finding.message} ({finding.source})")
    _require(
        not complaints,
        f"{run.path} is not clean",
        "; ".join(complaints),
        f"see ./run_and_time.sh check {run.path}",
    )


def _is_unavoidable(run: Run, finding: Finding, examined: Examined) -> bool:
    """Return whether every run that fails as `run` did causes `finding`.

    The official checker requires an evaluation at the target, and records that a run which ends
    early does not write. Our rules require run_stop, which a killed run does not write.
    """
    if run.status == "success":
        return False
    if finding in examined.verdict.complaints:
        return finding.rule == "target" or finding.key in AFTER_RUN_START
    return run.state == LOST and finding.rule == "once" and "run_stop" in finding.message


# Files that must not be in a submission.


def forbidden(root: Path) -> list[str]:
    """Return one line for each reason why a path in `root` must not be in a submission.

    The reasons are names and sizes that the repo checker refuses, caches, build outputs, secrets,
    and links, which the repo checker would resolve relative to its own directory.
    """
    lines = []
    for path in (root, *sorted(root.rglob("*"))):
        name = path.relative_to(root.parent)
        lines += [f"{name}: {problem}" for problem in _problems(path)]
    return lines


def _problems(path: Path) -> Iterator[str]:
    if path.name.startswith("."):
        yield "its name starts with a dot"
    if any(letter.isspace() for letter in path.name):
        yield "its name contains a space"
    if path.name in CACHES or path.name.endswith(CACHE_SUFFIXES):
        yield "is a cache or a build output"
    if path.is_symlink():
        yield "is a link"
    elif path.is_file() and (size := path.stat().st_size) > SIZE_LIMIT:
        yield f"is {size / 2**20:.0f} MB, the limit is {SIZE_LIMIT >> 20} MB"
    elif path.is_file():
        yield from secrets_in(path.read_bytes())


def secrets_in(data: bytes) -> Iterator[str]:
    """Yield the kind and line of each apparent secret in `data`, but never the secret itself."""
    text = data.decode("latin-1")
    for kind, pattern in SECRETS.items():
        if match := re.search(pattern, text):
            line = text.count("\n", 0, match.start()) + 1
            yield f"line {line} looks like {kind}"


# Building.


def _build(org_dir: Path, request: PackageRequest, chosen: dict[str, TenRuns]) -> None:
    """Write the files of the submission into the new directory `org_dir`.

    `chosen`: benchmark -> runs to submit.
    """
    systems = org_dir / "systems"
    systems.mkdir(parents=True)
    shutil.copyfile(request.system, systems / request.system.name)
    for benchmark, ten in chosen.items():
        results = org_dir / "results" / request.system.stem / benchmark
        results.mkdir(parents=True)
        for index, run in enumerate(ten.runs):
            shutil.copyfile(run.path, results / f"result_{index}.txt")
        folder = org_dir / "benchmarks" / benchmark / "implementations" / request.implementation
        implementation.write(folder, request.root, request.system.stem, ten.runs[0])
    if request.rehearsal:
        (org_dir / rehearsal.NOTICE).write_text(rehearsal.NOTICE_TEXT)


# Judging.


def judge(request: PackageRequest, missed: int = 0) -> int:
    """Run the official tools on the submission in `request.out`; return the exit code.

    Their output and the verdict are written into `request.out`. `missed`: number of packaged runs
    that missed the target or were killed, at most one per benchmark.
    """
    org_dir = request.out / request.org
    sets = len(request.sources)
    # The order matters: the summarizer reads the RCP factors that the package checker writes.
    packaged = official_tools.package(org_dir, request.ruleset, sets, missed)
    summarized = official_tools.summary(org_dir, request.ruleset, sets, missed)
    answers = [packaged, summarized, official_tools.repository(org_dir, request.ruleset)]
    for answer in answers:
        (request.out / f"{answer.tool}_{request.ruleset}.txt").write_text(answer.text)
        print(f"{answer.tool:<18} {request.ruleset}  {'success' if answer.passed else 'FAILED'}")
        for line in answer.complaints:
            print(f"  {line}")
        for (_, name), minutes in answer.scores.items():
            print(f"  {name}: {minutes:.3f} minutes")
    for (system, benchmark), verdict in packaged.verdicts.items():
        if "RCP" in verdict:
            _explain_rcp_bypass(benchmark, org_dir / "results" / system / benchmark)
    passed = all(answer.passed for answer in answers)
    scores = {name: minutes for (_, name), minutes in summarized.scores.items()}
    facts = {
        "ruleset": request.ruleset,
        "rehearsal": request.rehearsal,
        "passed": passed,
        "scores_minutes": scores,
    }
    (request.out / f"verdict_{request.ruleset}.json").write_text(json.dumps(facts, indent=1) + "\n")
    verdict = "all tools reported success" if passed else "NOT a submission yet: see above"
    print(f"{org_dir}: {verdict}")
    if request.rehearsal:
        print("This was a rehearsal with invented logs: the tree cannot be submitted.")
    return 0 if passed else CheckFailed.exit_code


def _explain_rcp_bypass(benchmark: str, results: Path) -> None:
    """Print how to upload a result that fails the RCP test. `results`: directory of its logs."""
    print(
        f"{benchmark}: to upload a result that fails the RCP test, you need a reason that the"
        " results chair accepts"
    )
    file = results / "package_checker_params"
    print(f"  and a file without a newline:  printf rcp-bypass > {file}")


main = program(parser, _package)

if __name__ == "__main__":
    sys.exit(main())
