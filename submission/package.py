"""Make a submission from series of ten runs, and run the official tools on it.

The ten runs are consecutive attempts of the series. The command selects them by the rules in
docs/submission.md and prints its choice. With --rehearse, the logs are invented, and nobody can
submit the result. --benchmark may then name a series of miniatures, whose seeds and outcomes are
used.

Files written, below the directory of --out:

    ORG/systems/                                 the system description
    ORG/results/<system>/<benchmark>/            result_0.txt to result_9.txt
    ORG/benchmarks/<benchmark>/implementations/  the code of the commit that ran, from git, and
                                                 a directory of documents and scripts, named after
                                                 the system
    <tool>_<ruleset>.txt                         output of each official tool: package checker,
                                                 summarizer, repo checker
    verdict_<ruleset>.json                       their verdicts

Exit code 0 if all official tools reported success; 20 if a tool did not, or something must not be
submitted; 2 for wrong usage, 17 if the directory cannot be written, 18 without the official tools.
If the submission cannot be completed, the directory is not created.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import benchmarks
from common.atomic_write import new_folder
from common.command_line import Parser, pairs_of, program
from common.errors import CheckFailed, ConfigError, StorageError
from common.paths import ROOT
from common.repository import commit_of, remote_name
from common.terminal import plural
from common.values import path
from submission import describe, implementation, official_tools, rehearsal
from submission.forbidden_files import forbidden_files
from submission.options import add_series_option
from submission.package_checks import (
    PackageRequest,
    check_description,
    check_names,
    require,
    runs_to_submit,
    series_folder,
)
from submission.prerequisites import refusal_reasons
from submission.series import TenRuns, read_series


class PackageParser(Parser):
    """The parser of `package`. Only --rehearse needs no --benchmark, --system and --org."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options = super().parse_args(args, namespace)
        missing = [name for name in ("benchmark", "system", "org") if not getattr(options, name)]
        if missing and not options.rehearse:
            names = ", ".join(f"--{name}" for name in missing)
            self.error(f"the following arguments are required: {names}")
        return options


def parser() -> Parser:
    """Return the argument parser of `package`."""
    parser = PackageParser(
        "package",
        __doc__,
        [
            "package --benchmark llama31_8b=results --system results/H200_1x8.json --org Us "
            "--out results/submission",
            "package --rehearse --out results/rehearsal",
            "package --rehearse --benchmark llama31_8b=results --out results/rehearsal --org Us",
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
        help="MLPerf ruleset (default: %(default)s)",
    )
    parser.add_argument(
        "--implementation",
        default=PackageRequest.implementation,
        metavar="NAME",
        help="name of the implementation directory (default: %(default)s)",
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
    """Package real or, with --rehearse, invented series; return the exit code."""
    if options.rehearse:
        return rehearse(options)
    sources = pairs_of("--benchmark", options.benchmark, benchmarks.closed(), "BENCHMARK=DIR")
    for name, source in sources.items():
        if not source:
            raise ConfigError(
                f"the value of --benchmark {name}= is empty",
                "it names the LOGDIR of the series",
                f"write --benchmark {name}=DIR",
            )
    request = PackageRequest(
        sources=sources,
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
    for reason in refusal_reasons(root, os.environ):
        print(f"note: a run that is started now could not be submitted: {reason}")
    commit = _current_commit(root)
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
        check_names(request)
        description = describe.read(request.system)
        check_description(request, description)
        for benchmark, source in sources.items():
            series = None
            if source:
                series = read_series([series_folder(path(source), benchmark)], options.series)
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


def _current_commit(root: Path) -> str:
    """Return the commit that is checked out in `root`. Raises CheckFailed if there is none."""
    commit = commit_of(root)
    if commit is None:
        raise CheckFailed(
            f"{root} has no commit",
            "a submission contains the code of the commit that ran",
            "rehearse in a git clone of this project",
        )
    return commit


def _rehearsal_sources(options: argparse.Namespace) -> dict[str, str]:
    """Return benchmark -> directory of a series, or "", of the option --benchmark.

    The default is all benchmarks, without directories.
    """
    texts = []
    for text in options.benchmark or benchmarks.closed():
        texts.append(text if "=" in text else f"{text}=")
    return pairs_of("--benchmark", texts, benchmarks.closed(), "BENCHMARK=DIR")


def package(request: PackageRequest) -> int:
    """Build the submission and run the official tools on it; return the exit code.

    Raises ConfigError for wrong options, CheckFailed if something must not be submitted,
    StorageError if `request.out` cannot be written, PreflightError without the official tools. If
    the submission cannot be completed, nothing is left behind.
    """
    check_names(request)
    description = describe.read(request.system)
    check_description(request, description)
    submitted = {name: runs_to_submit(request, name, description) for name in request.sources}
    if remote_name(request.root) is None:
        print("note: README names no repository beside the commit: git has no remote `origin`")
    try:
        with new_folder(request.out) as partial:
            _build(partial / request.org, request, submitted)
            problems = forbidden_files(partial / request.org)
            require(
                not problems,
                f"{plural(len(problems), 'file')} must not be in a submission",
                "; ".join(problems),
                "remove them from the commit or from the logs",
            )
            missed = 0
            for ten in submitted.values():
                missed += sum(not run.converged for run in ten.runs)
            code = judge(replace(request, out=partial), missed, request.out)
    except OSError as error:
        raise StorageError(
            f"cannot write {request.out}", str(error), "free space, or choose another --out"
        ) from error
    return code


# The files of the submission.


def _build(org_dir: Path, request: PackageRequest, submitted: dict[str, TenRuns]) -> None:
    """Write the files of the submission into the new directory `org_dir`.

    `submitted`: benchmark -> the ten runs of its result.
    """
    systems = org_dir / "systems"
    systems.mkdir(parents=True)
    shutil.copyfile(request.system, systems / request.system.name)
    for benchmark, ten in submitted.items():
        results = org_dir / "results" / request.system.stem / benchmark
        results.mkdir(parents=True)
        for index, run in enumerate(ten.runs):
            shutil.copyfile(run.path, results / f"result_{index}.txt")
        folder = org_dir / "benchmarks" / benchmark / "implementations" / request.implementation
        implementation.write(folder, request.root, request.system.stem, ten.runs[0])
    if request.rehearsal:
        (org_dir / rehearsal.NOTICE).write_text(rehearsal.NOTICE_TEXT)


# The verdict of the official tools.


def judge(request: PackageRequest, missed: int = 0, final: Path | None = None) -> int:
    """Run the official tools on the submission in `request.out`; return the exit code.

    Their output and the verdict are written into `request.out`. `missed`: number of packaged runs
    that missed the target or were killed, at most one per benchmark. `final`: the name that
    `request.out` gets afterwards, for all texts (default: the same).
    """
    org_dir = request.out / request.org
    final = final or request.out
    here = str(request.out.resolve())

    def named(text: str) -> str:
        return text.replace(here, str(final.resolve()))

    sets = len(request.sources)
    # The order matters: the summarizer reads the RCP factors that the package checker writes.
    packaged = official_tools.package(org_dir, request.ruleset, sets, missed)
    summarized = official_tools.summary(org_dir, request.ruleset, sets, missed)
    verdicts = [packaged, summarized, official_tools.repository(org_dir, request.ruleset)]
    for verdict in verdicts:
        (request.out / f"{verdict.tool}_{request.ruleset}.txt").write_text(named(verdict.text))
        print(f"{verdict.tool:<18} {request.ruleset}  {'success' if verdict.passed else 'FAILED'}")
        for line in verdict.complaints:
            print(f"  {named(line)}")
        for (_, name), minutes in verdict.scores.items():
            print(f"  {name}: {minutes:.3f} minutes")
    for (system, benchmark), complaint in packaged.verdicts.items():
        if "RCP" in complaint:
            results = final / request.org / "results" / system / benchmark
            _explain_rcp_failure(benchmark, complaint, results)
    passed = all(verdict.passed for verdict in verdicts)
    scores = {name: minutes for (_, name), minutes in summarized.scores.items()}
    report = {
        "ruleset": request.ruleset,
        "rehearsal": request.rehearsal,
        "passed": passed,
        "scores_minutes": scores,
    }
    path = request.out / f"verdict_{request.ruleset}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    outcome = "all tools reported success" if passed else "NOT a submission yet: see above"
    print(f"{final / request.org}: {outcome}")
    if request.rehearsal:
        print("This was a rehearsal with invented logs: the tree cannot be submitted.")
    return 0 if passed else CheckFailed.exit_code


def _explain_rcp_failure(benchmark: str, complaint: str, results: Path) -> None:
    """Print what the rules of v6.1 ask for after the RCP test failed, and how to upload the result.

    `complaint`: the package checker's. `results`: directory of the logs. Sources:
    mlcommons/training_policies#589, and training_rules.adoc, "Handling RCP Failures".
    """
    print(f"{benchmark}: rejected by default; the rules of v6.1 ask for")
    if "Missing RCP" in complaint:
        print(
            "  20 runs of the reference with this global batch, in its precision, with their logs,"
        )
        print("  in a pull request to mlcommons/logging 7 days before the deadline")
    else:
        print("  a notice to the working group and the results chair before the deadline, and with")
        print("  the submission the evidence: the cause, shown by A/B experiments; the training")
        print("  loss beside the reference's; the number of trained parameters of both")
    file = results / official_tools.BYPASS_FILE
    print(f"  to upload it, a file without a newline:  printf {official_tools.RCP_BYPASS} > {file}")


main = program(parser, _package)

if __name__ == "__main__":
    sys.exit(main())
