"""Score a series of runs and test it against the reference convergence points.

The logs may be those of any submitter for our benchmarks: LOGDIR/<benchmark> with its ledger, a
folder of result_*.txt, or single logs. RESULT is another directory, or words that name a published
result (--against "AMD MI300X 5.1"). With --against, the first argument may also be such words.
Without it, the best published result on the same GPUs is used. Which ten runs count is in
docs/submission.md. The RCP test uses the pruned points, as the official tools do.

Exit code 0 if the series has a score, or is a miniature of which all runs but one at most
converged; 20 if the RCP test failed or the series is not valid, 2 for wrong usage, 18 without
mlperf-logging. Nothing is written.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import benchmarks
from common.benchmarks import OPEN
from common.command_line import PROGRAM, Parser, complete, count, program
from common.errors import CheckFailed, ConfigError
from common.gpu_kinds import KINDS
from common.records import published
from common.records.published import Published
from common.records.rcp import SUBMISSION_RUNS
from common.terminal import plural
from submission.comparison import comparison, comparison_as_dict, where
from submission.log_rules import REHEARSAL_KEY
from submission.official_tools import RULESETS
from submission.options import add_series_option
from submission.output import number, table
from submission.published_results import best_published, find, listed, listing, matching
from submission.run import NOT_STARTED, Run
from submission.series import (
    Series,
    TenRuns,
    check_same,
    pace,
    read_series,
    result,
    ten_runs,
    windows,
)

# Attributes of a Run that the JSON object has for the series, and those that it has for each run.
SERIES_KEYS = ("benchmark", "division", "org", "ruleset", "gpu", "gpus")
RUN_KEYS = (
    "name",
    "number",
    "state",
    "reason",
    "converged",
    "minutes",
    "samples",
    "z",
    "samples_per_s",
    "tokens_per_s_per_gpu",
    "evaluation_s",
    "notes",
)


class ScoreParser(Parser):
    """The parser of `score`: logs are required unless --list is given."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options = super().parse_args(args, namespace)
        if not options.logs and options.list is None:
            self.error("the following arguments are required: DIR_OR_LOG")
        return options


def parser() -> Parser:
    """Return the argument parser of `score`."""
    parser = ScoreParser(
        "score",
        __doc__,
        [
            "score results/llama31_8b",
            "score results/llama31_8b --json",
            'score "AMD MI300X 5.1" --against "AMD MI300X 5.0"',
            "score --list H200",
        ],
    )
    parser.add_argument(
        "logs",
        nargs="*",
        metavar="DIR_OR_LOG",
        help="LOGDIR/<benchmark>, a folder of result_*.txt, or a log;"
        " with --against also words of a published result",
    )
    against = parser.add_argument(
        "--against",
        metavar="RESULT",
        help="another directory, or words of a published result, to compare with"
        " (default: the best published result on the same GPUs)",
    )
    parser.add_argument(
        "--list",
        nargs="?",
        const="",
        metavar="GPU",
        help="list the published results, for all GPU kinds or for one, and exit",
    )
    parser.add_argument(
        "--ruleset",
        choices=RULESETS,
        default="",
        help="MLPerf ruleset (default: detected from the log)",
    )
    gpu = parser.add_argument(
        "--gpu",
        type=str.upper,
        metavar="KIND",
        help="GPU kind, such as H200, if the logs do not name it",
    )
    complete(gpu, KINDS)
    complete(against, {row.gpu: None for row in published.RESULTS if row.gpu})
    parser.add_argument(
        "--gpus", type=count, metavar="N", help="number of GPUs, if the logs do not give it"
    )
    add_series_option(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _score(options: argparse.Namespace) -> int:
    """Print the list, the score or the comparison; return the exit code.

    Raises ConfigError if a result cannot be found or read, PreflightError without mlperf-logging.
    """
    if options.list is not None:
        return _list_published(options)
    is_comparison = options.against is not None and len(options.logs) == 1
    if is_comparison and not Path(options.logs[0]).exists():
        return _compare_published(options)
    return _score_series(options)


def _list_published(options: argparse.Namespace) -> int:
    """Print the published results of --list; return 0."""
    if options.json:
        print(json.dumps([asdict(row) for row in listed(options.list)], indent=1))
    else:
        print("\n".join(listing(options.list)))
    return 0


def _compare_published(options: argparse.Namespace) -> int:
    """Print the comparison of a published result with that of --against; return 0."""
    mine = find(options.logs[0])
    other = find(options.against, options.ruleset, mine)
    if options.json:
        print(json.dumps(comparison_as_dict(mine, other), indent=1))
    else:
        print("\n".join(comparison(mine, other)))
    return 0


def _score_series(options: argparse.Namespace) -> int:
    """Print the score of the series at the given paths, and a comparison; return the exit code."""
    for name in options.logs:
        _require_logs(name)
    series = read_series([Path(name) for name in options.logs], options.series, options.ruleset)
    for run in series.runs:
        run.gpu = options.gpu or run.gpu
        run.gpus = options.gpus or run.gpus
    if series.first.division == OPEN:
        raise ConfigError(
            f"{series.name} is a series in the open division",
            "a score needs reference convergence points, and there are none for its rules",
            "see its results with ./run_and_time.sh report, or runs",
        )
    check_same(series)
    ten = ten_runs(series)
    mine = result(series, ten)
    other: Published | None = None
    if options.against is not None:
        other = find(options.against, options.ruleset, mine)
    elif not series.first.is_miniature:
        other = best_published(mine)
    if options.json:
        facts = {**as_dict(series, ten), "against": comparison_as_dict(mine, other)}
        print(json.dumps(facts, indent=1))
    elif series.first.is_miniature and other is None:
        print("\n".join(report(series, ten)))
    else:
        lines = ["", "comparison with another result", *comparison(mine, other)]
        print("\n".join([*report(series, ten), *lines]))
    return 0 if ten.passed else CheckFailed.exit_code


def _require_logs(name: str) -> None:
    """Raise ConfigError if `name` is not a path but words of a published result."""
    if Path(name).exists() or name in benchmarks.names() or not matching(name):
        return
    raise ConfigError(
        f"{name!r} names a published result, not a directory or log",
        "a published result has a score already, and can only be compared with another one",
        f'{PROGRAM} score "{name}" --against RESULT, or score --list for all results',
    )


# JSON output.


def as_dict(series: Series, ten: TenRuns) -> dict:
    """Return the JSON object of --json.

    `result` describes the median window, or the whole series if it has no more than ten runs.
    `windows` has the scores of all windows of ten runs.
    """
    first = series.first
    parts = pace(ten)
    return {
        **{key: getattr(first, key) for key in SERIES_KEYS},
        "global_batch_size": first.batch,
        "runs": [{key: getattr(run, key) for key in RUN_KEYS} for run in series.runs],
        "result": {
            **_numbers(ten),
            "factor": ten.factor,
            "passed": ten.passed,
            "samples": ten.samples,
            "rcp": asdict(ten.verdict) if ten.verdict else None,
            "pace": asdict(parts) if parts else None,
        },
        "windows": [
            {"first": window.runs[0].name, **_numbers(window)}
            for window in windows(series)
            if window.runs
        ],
        "notes": series.notes,
    }


def _numbers(ten: TenRuns) -> dict:
    return {"minutes": ten.minutes, "score": ten.score, "invalid": ten.invalid or None}


# Text output.


def report(series: Series, ten: TenRuns) -> list[str]:
    """Return the lines to print before the comparison: runs, notes and score."""
    first = series.first
    division = first.division or "no division"
    runs = plural(len(series.runs), "run")
    lines = [f"{first.benchmark}, {division}: {runs}, {where(first)}", ""]
    lines += table(_run_rows(series, ten))
    notes = list(series.notes)
    invented = [run for run in series.runs if run.log.all(REHEARSAL_KEY)]
    if invented:
        notes.append(f"{plural(len(invented), 'log')} INVENTED by package --rehearse: no result")
    for run in series.runs:
        notes += [f"{run.name}: {note}" for note in _notes(run)]
    if notes:
        lines += ["", *(f"  {note}" for note in notes)]
    total = len(windows(series))
    if total > 1:
        median = f"{ten.runs[0].name} to {ten.runs[-1].name}"
        lines += [
            "",
            f"median of {total} windows of {SUBMISSION_RUNS} consecutive runs: {median}"
            " (all windows: --json)",
        ]
    return [*lines, "", *score_lines(ten)]


def _notes(run: Run) -> list[str]:
    """Return remarks on `run`: unusual values, and why it is not good or not counted."""
    if run.state == NOT_STARTED:
        reason = run.reason or "its log ends before run_start"
        return [f"not counted, because its clock never started: {reason}"]
    if run.reason and not run.converged:
        return [*run.notes, run.reason]
    return run.notes


def _run_rows(series: Series, ten: TenRuns) -> list[Sequence[str]]:
    """Return the head and one row per run of the table of runs."""
    rows: list[Sequence[str]] = [
        ("run", "minutes", "converged", "samples", "z", "seq/s", "tokens/s/GPU", "evaluation s", "")
    ]
    for run in series.runs:
        rows.append(
            (
                run.name,
                number(run.minutes, ".3f"),
                "yes" if run.converged else "NO",
                number(run.samples, ",d"),
                number(run.z if run.converged else None, "+.2f"),
                number(run.samples_per_s, ".3f"),
                number(run.tokens_per_s_per_gpu, ",.0f"),
                number(run.evaluation_s, ".1f"),
                _role(run, ten),
            )
        )
    return rows


def _role(run: Run, ten: TenRuns) -> str:
    """Return why a run is not in the mean, for the last column, or "" if it is."""
    if run not in ten.runs:
        return run.state if run.state == NOT_STARTED else "not in the median window"
    if not run.converged:
        return run.state
    if run in ten.counted:
        return ""
    fastest = not ten.counted or (run.minutes or 0.0) <= (ten.counted[0].minutes or 0.0)
    return "dropped: fastest" if fastest else "dropped: slowest"


def score_lines(ten: TenRuns) -> list[str]:
    """Return the lines that explain the score, and that compare the samples with the reference."""
    if not ten.runs:
        return ["score", "  no run started its clock"]
    return ["score", *_mean_lines(ten), *_verdict_lines(ten), *_sample_lines(ten)]


def _mean_lines(ten: TenRuns) -> list[str]:
    """Return the line with the mean of the minutes."""
    runs = len(ten.counted)
    minutes = number(ten.minutes, ".4f")
    if not runs:
        return ["  minutes         none: no run converged"]
    if len(ten.runs) >= 3:
        return [
            f"  minutes         {minutes}, mean of {plural(runs, 'run')},"
            " without the fastest and the slowest"
        ]
    if runs == 1:
        return [f"  minutes         {minutes}, of one run"]
    return [f"  minutes         {minutes}, mean of {runs} runs, too few to drop any"]


def _verdict_lines(ten: TenRuns) -> list[str]:
    """Return the line of the RCP test, if it was made, and the line with the score."""
    lines = []
    if ten.verdict:
        verdict = "passed" if ten.verdict.passed else "FAILED"
        lines.append(f"  RCP test        {verdict} ({ten.verdict.message})")
    if ten.runs[0].is_miniature:
        lines.append("  miniature       no score: not a benchmark result")
    elif ten.invalid:
        lines.append(f"  INVALID         {ten.invalid}")
        if len(ten.runs) < SUBMISSION_RUNS:
            command = f"NEXP={SUBMISSION_RUNS} {PROGRAM} {ten.runs[0].benchmark} --resume"
            lines.append(f"                  to run the others: {command}")
    elif ten.score is None:
        lines.append(
            "  NO SCORE        the RCP test failed: the runs converged faster than it allows"
        )
    else:
        lines.append(
            f"  score           {ten.score:.4f} min = {ten.minutes:.4f} x {ten.factor:.6f}"
        )
    return lines


def _sample_lines(ten: TenRuns) -> list[str]:
    """Return the lines that compare the samples to the target with the reference."""
    first = ten.runs[0]
    if first.is_miniature:
        return []
    lines = ["", "samples to the target"]
    point = first.point
    mean = ten.samples
    if point is None:
        return [*lines, "  no reference convergence point at this global batch"]
    if mean is None:
        return [*lines, "  too few runs converged to compare with the reference"]
    change = (mean / point.mean - 1) * 100
    return [
        *lines,
        f"  reference {point.mean:,.2f} +- {point.sigma:,.2f};"
        f" lowest mean that passes: {point.minimum:,.2f}",
        f"  mean {mean:,.2f}: {change:+.2f} % from the reference, z {point.z_score(mean):+.2f}",
    ]


main = program(parser, _score)

if __name__ == "__main__":
    sys.exit(main())
