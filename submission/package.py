"""`python -m submission.package --benchmark B=DIR ... --system FILE.json --out DIR --org ORG`: series of ten runs -> a submission.

Builds DIR/ORG with systems/, results/<system>/<benchmark>/result_0.txt .. result_9.txt and benchmarks/<benchmark>/implementations/,
whose code is that of the commit that ran, out of git. Ten consecutive attempts are taken (submission/series.py says which, and the
choice is printed). Then package checker, summarizer and repo checker judge it, and what they said is kept in DIR beside ORG.

Exit code: 0 all of them said success, 20 they did not, or something must not be submitted; 2 wrong usage; 17 cannot be written;
18 no official tools. Until everything has been collected, nothing stands under DIR. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from common.errors import CheckFailed, ConfigError, StorageError
from records import ledger
from submission import check, describe, forbidden_files, implementation, official_tools, own_log, terminal
from submission.implementation import Implementation
from submission.runs import Run
from submission.series import MEDIAN, TenRuns, read_series, ten_runs, windows

BENCHMARKS = tuple(official_tools.MINIATURES)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")  # of organisation, system and implementation: they become directories
PLACEHOLDERS = ("unnamed", "org", "yourorg", "your_org", "myorg", "example", "test", "todo", "none", "organisation", "organization")
SAME = ("commit", "python", "packages", "gpus", "driver")  # of versions.json, within a window


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    sources: dict[str, Path]  # benchmark -> directory of its series
    system: Path
    out: Path
    org: str
    ruleset: str = official_tools.CLOSED_RULESETS[-1]
    implementation: str = "torch_native"
    window: str = MEDIAN
    series: str = ""
    root: Path = own_log.PROJECT_ROOT  # the project in its git repository

    @property
    def system_name(self) -> str:
        return self.system.stem


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="submission.package", description="Make a submission out of series of ten runs.")
    parser.add_argument("--benchmark", action="append", required=True, metavar="B=DIR", help="LOGDIR, or LOGDIR/<benchmark>, of its series")
    parser.add_argument("--system", type=Path, required=True, metavar="FILE.json", help="made by submission.describe")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="must not exist yet")
    parser.add_argument("--org", required=True, help="as in the logs (MLPERF_SUBMISSION_ORG) and in the system's submitter")
    parser.add_argument("--ruleset", choices=official_tools.CLOSED_RULESETS, default=Request.ruleset)
    parser.add_argument("--implementation", default=Request.implementation, metavar="NAME")
    parser.add_argument(
        "--window", default="median", metavar="first|median|N", help="of more than ten attempts; N: the attempt it begins with"
    )
    parser.add_argument("--series", default="", metavar="ID", help="which series of the ledger; the beginning of its id is enough")
    options = vars(parser.parse_args(arguments))
    return terminal.run(lambda: package(Request(sources=_sources(options.pop("benchmark")), **options)))


def _sources(pairs: list[str]) -> dict[str, Path]:
    sources = {}
    for pair in pairs:
        name, equals, folder = pair.partition("=")
        if not equals or name not in BENCHMARKS or name in sources:
            raise ConfigError(f"--benchmark {pair}", f"it is not B=DIR with B one of {', '.join(BENCHMARKS)}, each once", "correct it")
        sources[name] = Path(folder)
    return sources


def package(request: Request) -> int:
    """Build, judge, say so; return the exit code. Raises ConfigError, CheckFailed, StorageError, PreflightError and leaves nothing then."""
    _check_names(request)
    description = describe.read(request.system)
    _check_description(request, description)
    chosen = {name: _chosen(request, name, description) for name in request.sources}
    try:
        request.out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{request.out.name}-", dir=request.out.parent))
    except OSError as error:
        raise StorageError(f"cannot write to {request.out.parent}", str(error), "choose another --out") from error
    try:
        _build(partial / request.org, request, chosen)
        offences = forbidden_files.findings(partial / request.org)
        if offences:
            raise CheckFailed(f"{len(offences)} things must not be in a submission: {'; '.join(offences)}", "see there", "remove them")
        partial.chmod(0o755)
        partial.rename(request.out)
    except OSError as error:
        raise StorageError(f"cannot write {request.out}", str(error), "free space, or choose another --out") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return judge(request, sum(each.failed for each in chosen.values()))


# What is asked for, and whether it fits together.


def _check_names(request: Request) -> None:
    for flag, name in (("--org", request.org), ("--system", request.system_name), ("--implementation", request.implementation)):
        if not NAME.fullmatch(name):
            why = "it becomes a directory: letters, digits and _ . + - only, no blank, no dot in front"
            raise ConfigError(f"{flag}: {name!r} cannot be a name in a submission", why, "choose another name")
    if request.org.lower() in PLACEHOLDERS:
        why = "it stands for an organisation that nobody has named"
        raise ConfigError(f"--org {request.org}", why, "name yours; the runs must have had it as MLPERF_SUBMISSION_ORG")
    if request.out.exists() or request.out.is_symlink():
        raise ConfigError(f"--out {request.out} exists", "nothing is overwritten", "choose another name, or remove it")


def _check_description(request: Request, description: dict) -> None:
    problems = describe.problems(description)
    if problems:
        do = f"complete it: python -m submission.describe --out {request.system} ..."
        raise CheckFailed(f"{request.system} cannot be submitted", "; ".join(problems), do)
    if description["submitter"] != request.org:
        what = f"{request.system}: submitter is {description['submitter']!r}, --org is {request.org!r}"
        raise CheckFailed(what, "reviewers find the code by the submitter's name", "make them equal")


def _chosen(request: Request, benchmark: str, description: dict) -> TenRuns:
    """The ten runs of `benchmark` that are submitted; everything about them that can be wrong has been looked at."""
    series = read_series([_folder(request.sources[benchmark], benchmark)], request.series)
    _refuse_what_was_never_meant(series.runs, benchmark)
    chosen, median = (ten_runs(series, wish) for wish in (request.window, MEDIAN))
    if chosen.invalid:
        raise CheckFailed(f"{series.name} cannot be submitted", chosen.invalid, "run more: NEXP with --resume, or a new series")
    count = sum(not window.invalid for window in windows(series))
    print(f"{benchmark}: {series.name}, {len(series.runs)} attempts, windows of ten: {count}; {request.window}: {chosen.describe()}")
    for run in series.runs:
        print(f"  {'*' if run in chosen.runs else ' '} {run.describe()}")
    if chosen.runs != median.runs:
        print(f"  note: the rules want the median of a group of more than ten; that would be {median.describe()}")
    _check_seeds(series.runs)
    _check_same(chosen)
    for run in chosen.runs:
        _check_identity(request, run, description)
        _check_log(request, run)
    return chosen


def _folder(source: Path, benchmark: str) -> Path:
    """Of the ledger: LOGDIR/<benchmark>, which may be named by LOGDIR. Raises ConfigError if there is none."""
    for folder in (source, source / benchmark):
        if (folder / ledger.NAME).is_file():
            return folder
    raise ConfigError(f"{source}: no series of {benchmark}", f"there is no {ledger.NAME} in it", "name the LOGDIR of the series")


def _refuse_what_was_never_meant(runs: list[Run], benchmark: str) -> None:
    for run in runs:
        division, logged = run.log.value("submission_division"), run.log.value("submission_benchmark")
        if logged not in (None, benchmark):
            raise CheckFailed(f"{run.path} is a log of {logged}", f"it was given as one of {benchmark}", "correct --benchmark")
        if division == "miniature":
            raise CheckFailed(f"{run.folder} is a miniature", "a toy with its own target is no benchmark result", "run the benchmark")
        if division not in (None, "closed"):
            raise CheckFailed(f"{run.folder} is of division {division!r}", "this package makes closed submissions", "run it closed")
        name = str(run.log.value("config_filename") or run.start.get("config", ""))
        if "+" in name or run.start.get("modified"):
            why = "it did not run with a config of the repository as it stands (--set, or a config forced onto another GPU)"
            raise CheckFailed(f"{run.folder} ran with {name}", why, "write a config for it, commit it, and run the series with that")


def _check_seeds(runs: list[Run]) -> None:
    """Of the whole series: its runs must be independent, also those that are not submitted."""
    seeds: dict[int, Run] = {}
    before = None
    for run in runs:
        seed, logged = run.start.get("seed"), run.log.value("seed")
        if type(seed) is not int or logged not in (None, seed):
            why = f"the ledger says {seed}: the log is not the one that this attempt wrote"
            raise CheckFailed(f"{run.path}: seed {logged}", why, "submit logs as they were written")
        if seed in seeds:
            what = f"attempts {seeds[seed].number} and {run.number} have the same seed {seed}"
            raise CheckFailed(what, "the ten runs must be independent", "run a series without SEED")
        if before is not None and seed == before + 1:
            what = f"attempts {run.number - 1} and {run.number} have the seeds {before} and {seed}"
            raise CheckFailed(
                what, "these were chosen: seeds come from the clock or from the system's entropy", "run a series without SEED"
            )
        seeds[seed], before = run, seed


def _check_same(chosen: TenRuns) -> None:
    """One system, one code, one configuration (rules, "Benchmark Results")."""
    reference = chosen.runs[0]
    first = _versions(reference)
    for run in chosen.runs:
        versions = _versions(run)
        if versions.get("commit") is None or versions.get("dirty") is not False:
            why = "its versions.json names no commit" if versions.get("commit") is None else "there were changes that no commit holds"
            raise CheckFailed(f"{run.folder}: nobody can say which code ran", why, "commit, and run the series from a clean tree")
        for key in SAME:
            if versions.get(key) != first.get(key):
                what = f"attempts {reference.number} and {run.number} ran with different {key}: {first.get(key)} and {versions.get(key)}"
                raise CheckFailed(what, "the ten runs must be of one system and one code", "run a series without changing anything")
        if _config_text(run) != _config_text(reference):
            what = f"attempts {reference.number} and {run.number} ran with different configs"
            raise CheckFailed(what, f"compare {reference.folder / 'config.toml'} and {run.folder / 'config.toml'}", "run a series with one")


def _versions(run: Run) -> dict:
    return describe.read(run.folder / "versions.json") if (run.folder / "versions.json").is_file() else {}


def _config_text(run: Run) -> str:
    path = run.folder / "config.toml"
    if not path.is_file():
        raise CheckFailed(f"{path} is missing", "without it nobody can say what ran", "submit run directories as the launcher left them")
    return path.read_text()


def _config(run: Run) -> dict:
    try:
        config = tomllib.loads(_config_text(run))
        return {key: config[key] for key in ("nodes", "gpus_per_node", "gpu")}
    except (tomllib.TOMLDecodeError, KeyError) as error:
        what = f"{run.folder / 'config.toml'} does not say where it ran"
        raise CheckFailed(what, str(error), "submit run directories as the launcher left them") from None


def _check_identity(request: Request, run: Run, description: dict) -> None:
    """Organisation and platform of the log, GPUs of the config, and the system description tell of the same machine."""
    log, config = run.log, _config(run)
    org, platform = log.value("submission_org"), str(log.value("submission_platform"))
    if org != request.org:
        raise CheckFailed(f"{run.path}: submission_org is {org!r}, --org is {request.org!r}", "both are shown to reviewers", _rerun("ORG"))
    nodes, gpus, kind = config["nodes"], config["gpus_per_node"], config["gpu"]
    wanted = {"number_of_nodes": str(nodes), "accelerators_per_node": str(gpus)}
    for key, value in wanted.items():
        if description[key] != value:
            why = f"{run.folder / 'config.toml'} ran on {nodes} x {gpus} {kind}"
            raise CheckFailed(f"{request.system}: {key} is {description[key]}, not {value}", why, "describe the system that ran")
    if not re.search(rf"\b{re.escape(kind)}\b", description["accelerator_model_name"]):
        what = f"{request.system}: accelerator_model_name is {description['accelerator_model_name']!r}"
        raise CheckFailed(what, f"{run.folder} ran on {kind}", "describe the system that ran")
    fitting = (request.system_name, description["system_name"], f"{nodes}x{gpus} {kind}")
    if platform not in fitting:
        why = f"of this system it would be one of {', '.join(map(repr, fitting))}"
        raise CheckFailed(f"{run.path}: submission_platform is {platform!r}", why, _rerun("PLATFORM"))
    torch = str((_versions(run).get("packages") or {}).get("torch") or "").split("+")[0]
    if torch and torch not in description["framework"]:
        why = f"{run.folder} ran with torch {torch}"
        raise CheckFailed(f"{request.system}: framework is {description['framework']!r}", why, "describe the system that ran")


def _rerun(variable: str) -> str:
    return f"a log is not edited: run the series with MLPERF_SUBMISSION_{variable} set"


def _check_log(request: Request, run: Run) -> None:
    """As submission.check does it. A run that missed its target fails the official checker by nature."""
    if run.path.is_symlink():
        raise CheckFailed(f"{run.path} is a link", "a log is a file that a run has written", "submit run directories as they are")
    examined = check.examine(run.path, request.ruleset, request.root, ours=True)
    found = [finding for finding in examined.errors() if run.status == "success" or finding not in examined.verdict.complaints]
    if found:
        complaints = [f"line {finding.line}: {finding.message} ({finding.source})" for finding in found]
        raise CheckFailed(f"{run.path} is not clean", "; ".join(complaints), f"see python -m submission.check {run.path}")


# Building.


def _build(org_dir: Path, request: Request, chosen: dict[str, TenRuns]) -> None:
    systems = org_dir / "systems"
    systems.mkdir(parents=True)
    shutil.copyfile(request.system, systems / request.system.name)
    for benchmark, ten in chosen.items():
        results = org_dir / "results" / request.system_name / benchmark
        results.mkdir(parents=True)
        for index, run in enumerate(ten.runs):
            shutil.copyfile(run.path, results / f"result_{index}.txt")
        about = Implementation(benchmark, request.implementation, request.system_name, request.root)
        folder = org_dir / "benchmarks" / benchmark / "implementations" / request.implementation
        implementation.write(folder, about, ten.runs[0].log, _versions(ten.runs[0]))


# Judging.


def judge(request: Request, missed: int = 0) -> int:
    """What the official tools say about the tree in `request.out`, for its ruleset; the exit code. Their text stays beside the tree.

    `missed`: runs among those packaged that did not reach the target, at most one per benchmark.
    """
    org_dir, names = request.out / request.org, list(request.sources)
    # In this order: the summarizer reads the RCP factor that the package checker has written.
    answers = [official_tools.package(org_dir, request.ruleset, len(names), missed)]
    answers += [official_tools.summary(org_dir, request.ruleset, names, missed), official_tools.repository(org_dir, request.ruleset)]
    for answer in answers:
        (request.out / f"{answer.tool}_{request.ruleset}.txt").write_text(answer.text)
        print(f"{answer.tool:<18} {request.ruleset}  {'success' if answer.passed else 'FAILED'}")
        print("".join(f"  {line}\n" for line in answer.complaints), end="")
        print("".join(f"  {name}: {minutes:.3f} minutes\n" for name, minutes in answer.scores.items()), end="")
    passed = all(answer.passed for answer in answers)
    facts = {"ruleset": request.ruleset, "passed": passed, "scores_minutes": answers[1].scores}
    (request.out / f"verdict_{request.ruleset}.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(f"{org_dir}: {'all tools said success' if passed else 'NOT a submission yet: see the complaints above'}")
    return 0 if passed else CheckFailed.exit_code


if __name__ == "__main__":
    sys.exit(main())
