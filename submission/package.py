"""`./run_and_time.sh package --benchmark B=DIR ... --system FILE.json --out DIR --org ORG`

The command makes a submission out of series of ten runs. It writes DIR/ORG with systems/,
results/<system>/<benchmark>/result_0.txt .. result_9.txt and
benchmarks/<benchmark>/implementations/. The code in the latter is that of the commit that ran,
taken from git. Ten consecutive attempts are submitted: submission/series.py selects them, and the
choice is printed. Then the package checker, summarizer and repo checker are run on DIR/ORG, and
their output is kept in DIR.

With --rehearse, the same is done with invented logs (submission/rehearsal.py), which nobody can
submit. --benchmark may then name a series of miniatures, whose seeds and outcomes are used.

Exit code: 0 all of them reported success, 20 they did not, or something must not be submitted, 2
wrong usage, 17 cannot be written, 18 no official tools. DIR is not created until everything has
been collected. Standard library only.
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
from submission.runs import LOST, Run
from submission.series import TenRuns, read_series, ten_runs, windows

# Name of an organization, system or implementation, each of which becomes a directory.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
PLACEHOLDERS = (
    "unnamed",
    "org",
    "yourorg",
    "your_org",
    "myorg",
    "example",
    "test",
    "todo",
    "none",
    "organisation",
    "organization",
)
COMMIT = re.compile("[0-9a-f]{40}")
SAME = ("commit", "python", "packages", "gpus", "driver")  # equal in the versions.json of a window
SIZE_LIMIT = 50 * 2**20  # bytes per file, as in the repo checker
CACHES = ("__pycache__", "node_modules", "wandb", "core")
CACHE_SUFFIXES = (".pyc", ".pyo", ".so", ".o", ".a", ".egg-info", ".whl", ".deb", ".rpm", ".swp")

# Patterns of tokens and keys (Hugging Face, AWS, GitHub, OpenAI-like, Slack, Google, PEM), and of
# passwords written as a value.
SECRETS = {
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{20,}",
    "an AWS key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "a GitHub token": r"\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_[A-Za-z0-9_]{30,}",
    "an API key": r"\bsk-[A-Za-z0-9_-]{24,}|\bAIza[0-9A-Za-z_-]{35}",
    "a Slack token": r"\bxox[abprs]-[A-Za-z0-9-]{10,}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a password": r"(?i:\b\w*(?:password|passwd|api_?key|secret_key|auth_token)[\"']?\s*[=:]\s*[\"']?)(?!None\b|str\b|\$|<)[^\s\"',)\]}\[({]{4,}",
    "a password in an address": r"\b[a-z][a-z0-9+.-]*://[^/\s:@\"'{}]+:[^/\s:@\"'{}]+@",
}


@dataclass(frozen=True)
class PackageRequest:
    """The options of one `package` command."""

    sources: Mapping[str, str | Path]  # benchmark -> directory of its series
    system: Path
    out: Path
    org: str
    ruleset: str = official_tools.CLOSED_RULESETS[-1]
    implementation: str = "torch_native"
    series: str = ""
    root: Path = ROOT  # the project's git repository
    rehearsal: bool = False  # the logs are invented


class PackageParser(Parser):
    """The parser of `package`: a rehearsal needs no series, system and organization."""

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
        "Make a submission out of series of ten runs, and run the official tools on it.",
        [
            "package --benchmark llama31_8b=results --system H200_1x8.json --out submission --org Us",
            "package --rehearse --out rehearsal",
            "package --rehearse --benchmark llama31_8b=results --out rehearsal --org Us",
        ],
    )
    parser.add_argument(
        "--benchmark",
        action="append",
        default=[],
        metavar="B=DIR",
        help="benchmark, and the LOGDIR or LOGDIR/<benchmark> of its series",
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
        "--org", default="", help="organization: MLPERF_SUBMISSION_ORG in the logs, and submitter"
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
    parser.add_argument(
        "--series",
        default="",
        metavar="ID",
        help="series ID from the run ledger, or its beginning"
        " (default: the newest series with more than one run)",
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="build a marked submission from invented logs, which nobody can submit;"
        " only --out is required",
    )
    return parser


def _package(options: argparse.Namespace) -> int:
    if options.rehearse:
        return rehearse(options)
    request = PackageRequest(
        sources=terminal.pairs("--benchmark", options.benchmark, benchmarks.names()),
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

    `options`: those of the parser. A benchmark without a directory, and no system, mean invented
    ones. `root`: the project's git repository. Raises CheckFailed if it is none, and the errors of
    `package`.
    """
    texts = options.benchmark or [
        name for name in benchmarks.names() if "closed" in benchmarks.divisions(name)
    ]
    texts = [text if "=" in text else f"{text}=" for text in texts]
    sources = terminal.pairs("--benchmark", texts, benchmarks.names())
    for doubt in doubts(root, os.environ):
        print(f"note: a run that is started now could not be submitted: {doubt}")
    commit = git(root, "rev-parse", "HEAD")
    if commit is None:
        raise CheckFailed(
            f"{root} has no commit",
            "a submission contains the code of the commit that ran",
            "rehearse in a git repository of this project",
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


def package(request: PackageRequest) -> int:
    """Build the submission and run the official tools on it; return the exit code.

    Raises ConfigError for wrong options, CheckFailed if something must not be submitted,
    StorageError if it cannot be written, PreflightError without the official tools. A submission
    that cannot be completed leaves no files.
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
            offences = forbidden(partial / request.org)
            what = f"{len(offences)} things must not be in a submission: {'; '.join(offences)}"
            _demand(not offences, what, "see there", "remove them")
            partial.rename(request.out)
    except OSError as error:
        raise StorageError(
            f"cannot write {request.out}", str(error), "free space, or choose another --out"
        ) from error
    return judge(request, sum(not run.converged for ten in chosen.values() for run in ten.runs))


# Checks of the request, the system description and the runs.


def _demand(holds: bool, what: str, why: str, do: str) -> None:
    if not holds:
        raise CheckFailed(what, why, do)


def _check_names(request: PackageRequest) -> None:
    for flag, name in (
        ("--org", request.org),
        ("--system", request.system.stem),
        ("--implementation", request.implementation),
    ):
        if not NAME.fullmatch(name):
            why = "it becomes a directory: letters, digits and _ . + - only, no blank, no dot in front"
            raise ConfigError(
                f"{flag}: {name!r} cannot be a name in a submission", why, "choose another name"
            )
    if request.org.lower() in PLACEHOLDERS or "placeholder" in request.org.lower():
        why = "it stands for an organisation that nobody has named"
        raise ConfigError(
            f"--org {request.org}",
            why,
            "name yours; the runs must have had it as MLPERF_SUBMISSION_ORG",
        )
    if rehearsal.is_marked(request.org) and not request.rehearsal:
        raise ConfigError(
            f"--org {request.org}",
            "this name marks a rehearsal, which cannot be submitted",
            "name your organization, and package the series of real runs",
        )
    if request.out.exists() or request.out.is_symlink():
        raise ConfigError(
            f"--out {request.out} exists",
            "nothing is overwritten",
            "choose another name, or remove it",
        )


def _check_description(request: PackageRequest, description: dict) -> None:
    problems = describe.problems(description)
    do = f"complete it: ./run_and_time.sh describe --out {request.system} ..."
    _demand(not problems, f"{request.system} cannot be submitted", "; ".join(problems), do)
    what = f"{request.system}: submitter is {description['submitter']!r}, --org is {request.org!r}"
    _demand(
        description["submitter"] == request.org,
        what,
        "reviewers find the code by the submitter's name",
        "make them equal",
    )


def _chosen(request: PackageRequest, benchmark: str, description: dict) -> TenRuns:
    """Return the ten runs of `benchmark` to submit, after all checks of them and of their series.

    Raises ConfigError if there is no series, CheckFailed if a check fails.
    """
    folder = _series_folder(Path(request.sources[benchmark]), benchmark)
    series = read_series([folder], request.series)
    for run in series.runs:
        _require_benchmark_run(request, run, benchmark)
    chosen = ten_runs(series)
    _demand(
        not chosen.invalid,
        f"{series.name} cannot be submitted",
        chosen.invalid,
        "run more: NEXP with --resume, or a new series",
    )
    count = sum(not window.invalid for window in windows(series))
    attempts = (
        f"attempts {chosen.runs[0].number} to {chosen.runs[-1].number}: {chosen.rank:.4f} min"
    )
    attempts += "" if chosen.passed else ", fails the RCP test"
    print(
        f"{benchmark}: {series.name}, {len(series.runs)} attempts, windows of ten: {count}; median: {attempts}"
    )
    for run in series.runs:
        print(f"  {'*' if run in chosen.runs else ' '} {run.describe()}")
    _check_seeds(series.runs)
    for run in chosen.runs:
        lost = f"{run.name} was killed and left no log"
        why = "a result set is ten files, and the official tools read each"
        _demand(bool(run.log.events), lost, why, "run more: NEXP with --resume, or a new series")
        _check_same(chosen.runs[0], run)
        _check_identity(request, run, description)
        _check_log(request, run)
    return chosen


def _series_folder(source: Path, benchmark: str) -> Path:
    """Return LOGDIR/<benchmark> for `source`, which may be LOGDIR or this folder.

    Raises ConfigError if there is no ledger.
    """
    folder = source if (source / ledger.NAME).is_file() else source / benchmark
    if not (folder / ledger.NAME).is_file():
        raise ConfigError(
            f"{source}: no series of {benchmark}",
            f"there is no {ledger.NAME} in it",
            "name the LOGDIR of the series",
        )
    return folder


def _require_benchmark_run(request: PackageRequest, run: Run, benchmark: str) -> None:
    """Raise CheckFailed for a run that cannot be a benchmark result.

    Such runs are those of another benchmark, miniatures, rehearsals, continued and emulated runs,
    and runs with a changed config.
    """
    logged = run.log.value("submission_benchmark")
    _demand(
        logged in (None, benchmark),
        f"{run.path} is a log of {logged}",
        f"--benchmark names it as a log of {benchmark}",
        "correct --benchmark",
    )
    _demand(
        run.log.value("submission_division") != "miniature",
        f"{run.folder} is a miniature",
        "a miniature has its own target and is not a benchmark result",
        "run the benchmark, or try the packaging with --rehearse",
    )
    _demand(
        run.log.value(REHEARSAL) is None or request.rehearsal,
        f"{run.folder} is a rehearsal",
        "its log is invented",
        "run the benchmark",
    )
    _demand(
        run.log.value("resumed") is None,
        f"{run.folder} was continued from a checkpoint of another run",
        "a run is timed from its first step to its last, without interruption",
        "run it without --continue",
    )
    emulated = run.log.value(EMULATED)
    _demand(
        emulated is None,
        f"{run.folder} emulated {emulated}",
        "emulation computes in bf16 or FP8 what another number format would give",
        'run a series with linear = "fp8"',
    )
    name = str(run.log.value("config_filename") or run.start.get("config", ""))
    _demand(
        "+" not in name and not run.start.get("modified"),
        f"{run.folder} ran with {name}",
        "it did not run with an unchanged config of the repository (--set, or another GPU)",
        "write a config for it, commit it, and run the series with that config",
    )


def _check_seeds(runs: list[Run]) -> None:
    """Raise CheckFailed unless all runs of the series have independent seeds, submitted or not."""
    seeds, do = [run.start.get("seed") for run in runs], "run a series without SEED"
    for index, (run, seed) in enumerate(zip(runs, seeds, strict=True)):
        logged, other, before = (
            run.log.value("seed"),
            runs[seeds.index(seed)],
            seeds[index - 1] if index else None,
        )
        why = f"the ledger says {seed}: the log is not the one that this attempt wrote"
        fits = type(seed) is int and logged in (None, seed)
        _demand(fits, f"{run.path}: seed {logged}", why, "submit logs as they were written")
        what = f"attempts {other.number} and {run.number} have the same seed {seed}"
        _demand(other is run, what, "the ten runs must be independent", do)
        what = f"attempts {run.number - 1} and {run.number} have the seeds {before} and {seed}"
        why = "these were chosen: seeds come from the clock or from the system's entropy"
        _demand(before is None or seed != before + 1, what, why, do)


def _check_same(first: Run, run: Run) -> None:
    """Raise CheckFailed unless `run` has the system, code and config of `first`.

    Source: MLPerf training rules, "Benchmark Results".
    """
    commit = run.versions.get("commit")
    dirty = run.versions.get("dirty")
    named = isinstance(commit, str) and COMMIT.fullmatch(commit) is not None
    why = (
        "there were changes that no commit holds"
        if named
        else "its versions.json names no commit (40 hexadecimal digits)"
    )
    do = "commit, and run the series from a clean tree"
    _demand(named and dirty is False, f"{run.folder}: nobody can say which code ran", why, do)
    both = f"attempts {first.number} and {run.number} ran with different"
    for key in SAME:
        mine, theirs = run.versions.get(key), first.versions.get(key)
        why = "the ten runs must be of one system and one code"
        _demand(
            mine == theirs,
            f"{both} {key}: {theirs} and {mine}",
            why,
            "run a series without changing anything",
        )
    why = f"compare {first.folder / 'config.toml'} and {run.folder / 'config.toml'}"
    _demand(run.config == first.config, f"{both} configs", why, "run a series with one")


def _check_identity(request: PackageRequest, run: Run, description: dict) -> None:
    """Raise CheckFailed unless log, config and system description agree.

    They must name the same organization, platform, GPUs and torch version.
    """
    rerun, do = (
        "a log is not edited: run the series with MLPERF_SUBMISSION_{} set",
        "describe the system that ran",
    )
    platform, torch = (
        run.log.value("submission_platform"),
        str((run.versions.get("packages") or {}).get("torch") or "").split("+")[0],
    )
    what = f"{run.path}: submission_org is {run.org!r}, --org is {request.org!r}"
    _demand(run.org == request.org, what, "both are shown to reviewers", rerun.format("ORG"))
    what = f"{run.folder / 'config.toml'} does not say where it ran"
    _demand(
        bool(run.nodes),
        what,
        "it is missing or spoilt",
        "submit run directories as the launcher left them",
    )
    shape = f"{run.nodes}x{run.gpus_per_node}"
    facts = {"number_of_nodes": str(run.nodes), "accelerators_per_node": str(run.gpus_per_node)}
    facts |= {"accelerator_model_name": str(run.gpu), "framework": torch}
    for key, value in facts.items():
        named = re.search(rf"(?<![\w.]){re.escape(value)}(?![\w.])", description[key]) is not None
        why = f"{run.folder} ran on {shape} {run.gpu} with torch {torch}"
        _demand(named, f"{request.system}: {key} is {description[key]}, not {value}", why, do)
    fitting = (request.system.stem, description["system_name"], f"{shape} {run.gpu}")
    why = f"of this system it would be one of {', '.join(map(repr, fitting))}"
    _demand(
        platform in fitting,
        f"{run.path}: submission_platform is {platform!r}",
        why,
        rerun.format("PLATFORM"),
    )


def _check_log(request: PackageRequest, run: Run) -> None:
    """Raise CheckFailed if submission.check finds errors or warnings in the log of `run`.

    Findings that every run has if it missed its target or was killed are accepted.
    """
    linked = run.path.is_symlink()
    _demand(
        not linked,
        f"{run.path} is a link",
        "a log is a file that a run has written",
        "submit run directories as they are",
    )
    examined = check.examine(run.path, request.ruleset, request.root, ours=True)
    found = [
        finding
        for finding in examined.errors(werror=True)
        if not _is_of_a_failed_run(run, finding, examined)
        and not (request.rehearsal and finding.rule == REHEARSAL)
    ]
    complaints = [f"line {finding.line}: {finding.message} ({finding.source})" for finding in found]
    _demand(
        not found,
        f"{run.path} is not clean",
        "; ".join(complaints),
        f"see ./run_and_time.sh check {run.path}",
    )


def _is_of_a_failed_run(run: Run, finding: Finding, examined: Examined) -> bool:
    """Return whether every log of a run that missed its target, or was killed, has this finding."""
    if run.status == "success":
        return False
    cut_short = (
        run.state == LOST and finding.rule in ("once", "order") and "run_stop" in finding.message
    )
    return cut_short or finding in examined.verdict.complaints


# Files that must not be in a submission.


def forbidden(root: Path) -> list[str]:
    """Return one line for each path in `root` that must not be in a submission.

    These are names and sizes that the repo checker refuses, caches, build outputs, secrets, and
    links, which the repo checker would judge relative to its own directory.
    """
    paths = (root, *sorted(root.rglob("*")))
    return [
        f"{path.relative_to(root.parent)}: {offence}"
        for path in paths
        for offence in _offences(path)
    ]


def _offences(path: Path) -> Iterator[str]:
    if path.name.startswith("."):
        yield "its name starts with a dot"
    if any(letter.isspace() for letter in path.name):
        yield "there is a blank in its name"
    if path.name in CACHES or path.name.endswith(CACHE_SUFFIXES):
        yield "is a cache or something built"
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
            yield f"line {text.count(chr(10), 0, match.start()) + 1} looks like {kind}"


# Building.


def _build(org_dir: Path, request: PackageRequest, chosen: dict[str, TenRuns]) -> None:
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
    org_dir, sets = request.out / request.org, len(request.sources)
    # The order matters: the summarizer reads the RCP factor that the package checker writes.
    answers = [
        tool(org_dir, request.ruleset, sets, missed)
        for tool in (official_tools.package, official_tools.summary)
    ]
    answers.append(official_tools.repository(org_dir, request.ruleset))
    for answer in answers:
        (request.out / f"{answer.tool}_{request.ruleset}.txt").write_text(answer.text)
        print(f"{answer.tool:<18} {request.ruleset}  {'success' if answer.passed else 'FAILED'}")
        print("".join(f"  {line}\n" for line in answer.complaints), end="")
        print(
            "".join(
                f"  {name}: {minutes:.3f} minutes\n" for (_, name), minutes in answer.scores.items()
            ),
            end="",
        )
    for (system, benchmark), verdict in answers[0].verdicts.items():
        if "RCP" in verdict:
            place = org_dir / "results" / system / benchmark / "package_checker_params"
            print(
                f"{benchmark}: a result that fails the RCP test can be uploaded only with a reason that the results chair accepts,"
            )
            print(f"  and a file without a line end:  printf rcp-bypass > {place}")
    passed = all(answer.passed for answer in answers)
    scores = {name: minutes for (_, name), minutes in answers[1].scores.items()}
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


main = program(parser, _package)

if __name__ == "__main__":
    sys.exit(main())
