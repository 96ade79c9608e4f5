"""`./run_and_time.sh score DIR_OR_LOGS... [--against B] [--json]`: score a series of runs.

The logs may be any MLPerf result logs of our benchmarks: LOGDIR/<benchmark> with its ledger, a
folder of result_*.txt, or logs by name. B is a directory as well, or words that name a published
result (`--against "AMD MI300X 5.1"`). The first argument may also be such words. The default of
--against is the best published result on the same GPUs. submission/series.py selects the ten runs
that count. The RCP test uses the pruned points, as in the official tools.

Exit code: 0 scored and RCP test passed (a miniature has none), 20 RCP test failed or series
invalid, 2 wrong usage, 18 no mlperf-logging. Needs mlperf-logging and the standard library.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from common.benchmarks import divisions
from common.command_line import Parser, count, program
from common.errors import CheckFailed, ConfigError
from common.records import published
from common.records.published import Pace, Published
from common.records.rcp import SUBMISSION_RUNS
from submission.official_tools import RULESETS
from submission.runs import NOT_STARTED, Run
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
from submission.terminal import number, signed, table

ROUND = re.compile(r"v?\d\.\d")
OF_A_RUN = (  # fields of a run in the JSON
    *("name", "number", "state", "reason", "converged", "minutes", "samples", "z"),
    *("samples_per_s", "tokens_per_s_per_gpu", "evaluation_s", "notes"),
)


def parser(benchmark: str = "") -> Parser:
    parser = Parser(
        "score",
        "Score a series of MLPerf result logs.",
        [
            "score results/llama31_8b",
            "score results/llama31_8b --json",
            'score "AMD MI300X 5.1" --against "NVIDIA H200 5.1"',
        ],
    )
    parser.add_argument(
        "logs",
        nargs="+",
        metavar="DIR_OR_LOG",
        help="LOGDIR/<benchmark>, a folder of result_*.txt, or logs",
    )
    parser.add_argument(
        "--against",
        metavar="B",
        help="another directory, or words of a published result; default: the best of the GPU",
    )
    parser.add_argument(
        "--ruleset",
        choices=RULESETS,
        default="",
        help="hold the logs to this; default: what their keys say",
    )
    parser.add_argument(
        "--gpu", type=str.upper, help="kind of GPU, such as H200, where the logs do not tell"
    )
    parser.add_argument(
        "--gpus", type=count, metavar="N", help="number of GPUs, where the logs do not tell"
    )
    parser.add_argument(
        "--series",
        default="",
        metavar="ID",
        help="of the ledger; default: its newest series of more than one run",
    )
    parser.add_argument("--json", action="store_true", help="everything as one JSON object")
    return parser


def _score(options: argparse.Namespace) -> int:
    """Print the score or the comparison; return the exit code.

    Raises ConfigError if a result cannot be found or read, PreflightError without mlperf-logging.
    """
    if (
        len(options.logs) == 1
        and options.against is not None
        and not Path(options.logs[0]).exists()
    ):
        mine = find(options.logs[0])  # a comparison of two published results
        other = find(options.against, options.ruleset, mine)
        print(
            json.dumps(comparison_as_dict(mine, other), indent=1)
            if options.json
            else "\n".join(comparison(mine, other))
        )
        return 0
    series = read_series([Path(name) for name in options.logs], options.series, options.ruleset)
    for run in series.runs:
        run.gpu, run.gpus = options.gpu or run.gpu, options.gpus or run.gpus
    check_same(series)
    ten = ten_runs(series)
    mine = result(series, ten)
    compared = None
    if options.against is not None:
        compared = find(options.against, options.ruleset, mine)
    elif not series.first.is_miniature:
        compared = best_published(mine)
    if options.json:
        print(
            json.dumps(
                as_dict(series, ten) | {"against": comparison_as_dict(mine, compared)}, indent=1
            )
        )
    else:
        lines = (
            ["  none: a miniature"]
            if series.first.is_miniature and not compared
            else comparison(mine, compared)
        )
        print("\n".join([*report(series, ten), "", "against another result", *lines]))
    return 0 if ten.passed else CheckFailed.exit_code


# JSON output.


def as_dict(series: Series, ten: TenRuns) -> dict:
    """Return the JSON object of --json.

    `result` is the score of the series or of its median window. `windows` has the scores of all
    windows of ten.
    """
    first, mine = series.first, pace(ten)
    verdicts = {
        "rcp": asdict(ten.verdict) if ten.verdict else None,
        "pace": asdict(mine) if mine else None,
    }
    return {
        **{
            key: getattr(first, key)
            for key in ("benchmark", "division", "org", "ruleset", "gpu", "gpus")
        },
        "global_batch_size": first.batch,
        "runs": [{key: getattr(run, key) for key in OF_A_RUN} for run in series.runs],
        "result": _numbers(ten)
        | {"factor": ten.factor, "passed": ten.passed, "samples": ten.samples}
        | verdicts,
        "windows": [
            {"first": window.runs[0].name} | _numbers(window)
            for window in windows(series)
            if window.runs
        ],
        "notes": series.notes,
    }


def _numbers(ten: TenRuns) -> dict:
    return {"minutes": ten.minutes, "score": ten.score, "invalid": ten.invalid or None}


# Text output.


def report(series: Series, ten: TenRuns) -> list[str]:
    """Return the lines to print, up to the comparison: runs, notes and score."""
    first = series.first
    lines = [
        f"{first.benchmark}, {first.division or 'no division'}: {len(series.runs)} runs, {_where(first)}",
        "",
    ]
    lines += table(_run_rows(series, ten))
    notes = [*series.notes, *(f"{run.name}: {note}" for run in series.runs for note in _notes(run))]
    lines += ["", *(f"  {note}" for note in notes)] if notes else []
    if (count := len(windows(series))) > 1:
        median = f"{ten.runs[0].name} to {ten.runs[-1].name}"
        lines += [
            "",
            f"median of {count} windows of {SUBMISSION_RUNS} consecutive runs: {median}; --json has all",
        ]
    return [*lines, "", *score_lines(ten)]


def _notes(run: Run) -> list[str]:
    if run.state == NOT_STARTED:
        return [
            f"never started its clock, and is no run: {run.reason or 'its log ends before run_start'}"
        ]
    return run.notes + ([run.reason] if run.reason and not run.converged else [])


def _run_rows(series: Series, ten: TenRuns) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [
        ("run", "minutes", "converged", "samples", "z", "seq/s", "tokens/s/GPU", "evaluation s", "")
    ]
    for run in series.runs:
        z = number(run.z if run.converged else None, "+.2f")
        cells = (
            number(run.minutes, ".3f"),
            "yes" if run.converged else "NO",
            number(run.samples, ",d"),
            z,
        )
        speed = (
            number(run.samples_per_s, ".3f"),
            number(run.tokens_per_s_per_gpu, ",.0f"),
            number(run.evaluation_s, ".1f"),
        )
        rows.append((run.name, *cells, *speed, _role(run, ten)))
    return rows


def _role(run: Run, ten: TenRuns) -> str:
    if run not in ten.runs:
        return run.state if run.state == NOT_STARTED else "not in the median window"
    if run in ten.counted or not run.converged:
        return "" if run.converged else run.state
    fastest = not ten.counted or (run.minutes or 0.0) <= (ten.counted[0].minutes or 0.0)
    return f"dropped: {'fastest' if fastest else 'slowest'}"


def score_lines(ten: TenRuns) -> list[str]:
    """Return lines on how the score is computed, and on the samples compared with the reference."""
    if not ten.runs:
        return ["score", "  no run started its clock"]
    first, verdict = ten.runs[0], ten.verdict
    how = (
        "without the fastest and the slowest run"
        if len(ten.runs) >= 3
        else "too few runs to drop the fastest and the slowest"
    )
    lines = [
        "score",
        f"  mean of {len(ten.counted)} runs   {number(ten.minutes, '.4f')} min, {how}",
    ]
    if verdict:
        lines.append(
            f"  RCP test        {'passed' if verdict.passed else 'FAILED'} ({verdict.message})"
        )
    if first.is_miniature:
        lines.append("  a miniature: no RCP, no benchmark result, and nothing to submit")
    elif ten.invalid:
        lines.append(f"  INVALID         {ten.invalid}")
    elif ten.score is None:
        lines.append(
            "  NO SCORE        the RCP test failed: converging too fast counts as another algorithm, and is rejected"
        )
    else:
        lines.append(
            f"  score           {ten.score:.4f} min = {ten.minutes:.4f} x {ten.factor:.6f}"
        )
    lines += ["", "samples to the target"]
    point, mean = first.point, ten.samples
    if point is None or mean is None:
        return [
            *lines,
            "  nothing to hold them against: too few runs that converged, no RCP for this global batch, or a miniature",
        ]
    return [
        *lines,
        f"  reference {point.mean:,.2f} +- {point.sigma:,.2f}; the lowest mean that passes {point.minimum:,.2f}",
        f"  mean {mean:,.2f}: {(mean / point.mean - 1) * 100:+.2f} % against the reference, z {point.z_score(mean):+.2f}",
    ]


# Comparison with another result.


def find(wish: str, ruleset: str = "", like: Published | None = None) -> Published:
    """Return the result that `wish` names: a directory, a log, or words of a published result.

    Only rows with the benchmark of `like` match. Of several, those with its kind and its number of
    GPUs are preferred, and the best of these is returned. `ruleset`: ruleset for logs (default:
    chosen by their keys). Raises ConfigError if nothing matches, if a directory holds another
    benchmark than that of `like`, or if the words match both benchmarks and there is no `like`.
    """
    if wish and Path(wish).exists():
        series = read_series([Path(wish)], ruleset=ruleset)
        check_same(series)
        if like and series.first.benchmark != like.benchmark:
            why = "minutes of two benchmarks cannot be compared"
            raise ConfigError(
                f"{wish} is a result of {series.first.benchmark}",
                why,
                f"name one of {like.benchmark}",
            )
        return result(series, ten_runs(series))
    words = wish.lower().split()
    rows = [row for row in published.RESULTS if all(_says(row, word) for word in words)]
    if like is None:
        if len({row.benchmark for row in rows}) > 1:
            raise ConfigError(
                f"{wish!r} names results of both benchmarks",
                "it is no directory or log either",
                "add the benchmark's name",
            )
    else:
        rows = [row for row in rows if row.benchmark == like.benchmark]
        for same in (
            [row for row in rows if row.gpu == like.gpu],
            [row for row in rows if row.gpus == like.gpus],
        ):
            rows = [row for row in rows if row in same] or rows
    if not rows or not words:
        there = (
            ", ".join(row.name for row in published.published(like.benchmark, like.gpu))
            if like
            else ""
        )
        why = f"it is no file, and no published result has these words{f'; of {like.gpu} there are: {there}' if like and there else ''}"
        raise ConfigError(
            f"no result {wish!r}",
            why,
            "name a directory, or submitter, system and round of a published result",
        )
    return min(rows, key=lambda row: row.rank)


def _says(row: Published, word: str) -> bool:
    """Return whether `row` matches `word`: a round such as 5.1 or v5.1, or a part of a name."""
    if ROUND.fullmatch(word):
        return row.round == word.lstrip("v")
    return word in f"{row.submitter} {row.system} {row.gpu} {row.benchmark}".lower()


def best_published(mine: Published) -> Published | None:
    """Return the best result of the newest round on the same number and kind of GPUs, if any."""
    same = (
        published.published(mine.benchmark, mine.gpu, mine.gpus) if mine.gpu and mine.gpus else []
    )
    rows = [row for row in same if row.score is not None]
    # Rows are sorted best first, and max returns the first row of the newest round.
    return max(rows, key=lambda row: row.round, default=None)


def comparison_as_dict(mine: Published, other: Published | None) -> dict | None:
    if other is None:
        return None
    parts = (
        [asdict(part) for part in published.split(mine.pace, other.pace)]
        if mine.pace and other.pace
        else None
    )
    return asdict(other) | {"name": other.name, "speedup": _speedup(mine, other), "split": parts}


def comparison(mine: Published, other: Published | None) -> list[str]:
    """Return the lines of the comparison: both results, their paces and the split difference."""
    if other is None:
        return (
            _others(mine)
            if mine.gpu and mine.gpus
            else ["  unknown GPU or number of GPUs: name them with --gpu and --gpus"]
        )
    found = [f"  yours   {mine.name}: {_where(mine)}", f"  theirs  {other.name}: {_where(other)}"]
    if (times := _speedup(mine, other)) is not None:
        found.append(f"  yours is {times:.2f} times as fast: {1 / times:.4f} of the minutes")
    if not mine.pace or not other.pace:
        return [
            *found,
            "  the logs of one side have no training blocks, or no run converged: no split",
        ]
    return [
        *found,
        "",
        *table(_pace_rows(mine, other)),
        "",
        *table(_split_rows(mine, other, mine.pace, other.pace)),
    ]


def _where(side: Published | Run) -> str:
    return (
        f"{side.gpus or 'unknown number'} x {side.gpu or 'unknown GPU'}, global batch {side.batch}"
    )


def _tokens_per_gpu(side: Published) -> float | None:
    rate, gpus = side.samples_per_s, side.gpus
    return (
        rate * divisions(side.benchmark)["closed"].sequence_length / gpus
        if rate is not None and gpus
        else None
    )


def _speedup(mine: Published, other: Published) -> float | None:
    """Return the ratio of the scores, or of the minutes if one side has no score."""
    if mine.score and other.score:
        return other.score / mine.score
    return other.minutes / mine.minutes if mine.minutes and other.minutes else None


def _others(mine: Published) -> list[str]:
    found = [
        f"  no published result of {mine.benchmark} on {mine.gpus} x {mine.gpu} to split a difference to; --against names another"
    ]
    for row in published.published(mine.benchmark, mine.gpu):
        rate, yours = (number(_tokens_per_gpu(side), ",.0f") for side in (row, mine))
        found.append(
            f"  {row.name}, {row.gpus} GPUs: {number(row.score, '.3f')} min, {rate} tokens/s/GPU; yours {yours}"
        )
    return found


def _pace_rows(mine: Published, other: Published) -> list[Sequence[str]]:
    def row(name: str, form: str, of) -> Sequence[str]:
        return (name, *(number(of(side), form) for side in (mine, other)), "")

    return [
        ("", "yours", "theirs", ""),
        row("GPUs", "d", lambda side: side.gpus),
        row("seq/s, first block of each run left out", ".3f", lambda side: side.samples_per_s),
        row("tokens/s/GPU", ",.0f", _tokens_per_gpu),
        row("samples to the target", ",.0f", lambda side: side.samples),
        row("evaluations per run", ".2f", lambda side: side.evaluations),
        row("seconds per evaluation", ".2f", lambda side: side.evaluation_s),
        row("minutes without RCP factor", ".3f", lambda side: side.minutes),
        row("score, minutes", ".3f", lambda side: side.score),
    ]


def _split_rows(mine: Published, other: Published, ours: Pace, theirs: Pace) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [
        ("what the difference is made of", "minutes", "factor on the time", "")
    ]
    rows += [
        (part.name, signed(part.minutes), f"{part.factor:.4f}", "")
        for part in published.split(ours, theirs)
    ]
    rows.append(
        (
            "together",
            signed(ours.minutes - theirs.minutes),
            f"{ours.minutes / theirs.minutes:.4f}",
            "without RCP factor",
        )
    )
    if mine.score is not None and other.score is not None:
        factor = (mine.score / ours.minutes) / (other.score / theirs.minutes)
        rows.append(
            (
                "RCP factor",
                signed((mine.score - ours.minutes) - (other.score - theirs.minutes)),
                f"{factor:.4f}",
                "",
            )
        )
        rows.append(
            ("score", signed(mine.score - other.score), f"{mine.score / other.score:.4f}", "")
        )
    return rows


main = program(parser, _score)

if __name__ == "__main__":
    sys.exit(main())
