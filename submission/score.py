"""`python -m submission.score DIR_OR_LOGS... [--rcp pruned|full|both] [--json]`: what a series of runs scores, and why.

Any MLPerf result logs of our benchmarks: LOGDIR/<benchmark> with its ledger, a folder of result_*.txt, or logs by name. Each run's
minutes, samples and throughput; the score of the series with the RCP verdict; how lucky its seeds were; and how much of the
difference to the published v5.1 result of the same GPU is throughput, samples, evaluation (formulae: records/published.py).

Score: mean of ten runs' minutes without the fastest and the slowest, times the RCP factor. One run that did not converge counts as
the slowest; two make the result invalid. Of more than ten runs, the median window of ten consecutive ones is taken (MLPerf Training
rules, "Benchmark Results"). The pruned RCPs decide, as in the official tools, unless only the full ones are asked for.

Exit code: 0 scored and RCP test passed (a miniature has none), 20 RCP test failed or series invalid, 2 wrong usage.
Standard library only.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path

from common.errors import CheckFailed, ConfigError, RunError
from records import rcp
from records.published import Pace, Published, published, split
from submission.runs import CLOSED, MINIATURE, Run, read_runs
from submission.series import Series, median_window, pace, windows

# --- the command ------------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        runs, notes = read_runs(options.logs, options.series)
        for run in runs:
            run.gpu, run.gpus = options.gpu or run.gpu, options.gpus or run.gpus
        points = rcp.POINT_SETS if options.rcp == "both" else (options.rcp,)
        found = windows(runs, points)
        series = median_window(found)
        against = _against(series, options.against)
    except RunError as error:
        print(error.lines(), file=sys.stderr)
        return error.exit_code
    if options.json:
        print(json.dumps(as_dict(found, series, against, notes), indent=1))
    else:
        print("\n".join(report(runs, found, series, against, notes)))
    return 0 if series.passed else CheckFailed.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="submission.score", description="Score a series of MLPerf result logs.")
    parser.add_argument("logs", type=Path, nargs="+", metavar="DIR_OR_LOG", help="LOGDIR/<benchmark>, a folder of result_*.txt, or logs")
    parser.add_argument("--rcp", choices=(*rcp.POINT_SETS, "both"), default="both", help="which convergence points; pruned decides")
    parser.add_argument("--gpu", type=str.upper, help="kind of GPU, such as H200, where the logs do not tell")
    parser.add_argument("--gpus", type=positive_number, metavar="N", help="number of GPUs, where the logs do not tell")
    parser.add_argument("--against", metavar="SUBMITTER", help="compare with this published result; default: the best of the GPU")
    parser.add_argument("--series", metavar="ID", help="of the ledger; default: its newest series of more than one run")
    parser.add_argument("--json", action="store_true", help="everything as one JSON object")
    return parser


def positive_number(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def _against(series: Series, submitter: str | None) -> Published | None:
    """The published result of the same GPUs to split against; None where there is none. Raises ConfigError."""
    run = series.runs[0]
    if run.division == "miniature":
        return None
    entries = [entry for entry in published(run.benchmark, run.gpu) if entry.gpus == run.gpus and entry.samples]
    if submitter is None:
        return entries[0] if entries else None
    for entry in entries:
        if submitter.lower() in entry.submitter.lower():
            return entry
    there = ", ".join(entry.submitter for entry in entries) or "none"
    why = f"for {run.benchmark} on {run.gpus or '?'} x {run.gpu or 'an unknown GPU'} there are: {there}"
    raise ConfigError(f"no published result by {submitter}", why, "name one of those")


def as_dict(found: list[Series], series: Series, against: Published | None, notes: list[str]) -> dict:
    """Everything for programs: `result` is the series or its median window, `windows` the scores of all windows of ten."""
    mine, run = pace(series), series.runs[0]
    return {
        "benchmark": run.benchmark,
        "division": run.division,
        "global_batch_size": run.batch,
        "gpu": run.gpu,
        "gpus": run.gpus,
        "runs": [_run_as_dict(run) for run in series.runs],
        "result": {
            "minutes": series.minutes,
            "score": series.score,
            "factor": series.factor,
            "passed": series.passed,
            "invalid": series.invalid or None,
            "rcp": [_verdict_as_dict(verdict) for verdict in series.verdicts],
            "pace": asdict(mine) if mine else None,
        },
        "windows": [{"first": window.runs[0].name, "minutes": window.minutes, "score": window.score} for window in found],
        "published": asdict(against) if against else None,
        "split": [asdict(part) for part in split(mine, against.pace)] if mine and against else None,
        "notes": notes,
    }


def _run_as_dict(run: Run) -> dict:
    point = _point(run)
    return {
        "name": run.name,
        "minutes": run.minutes,
        "converged": run.converged,
        "samples": run.samples,
        "z": point.z_score(run.samples) if point and run.samples else None,
        "samples_per_s": run.samples_per_s,
        "tokens_per_s_per_gpu": _tokens_per_gpu(run, run.samples_per_s),
        "evaluation_s": run.evaluation_s,
        "notes": run.notes,
    }


def _verdict_as_dict(verdict: rcp.Verdict) -> dict:
    point = verdict.point
    facts = {"points": verdict.points, "passed": verdict.passed, "message": verdict.message, "mean": verdict.mean}
    if point is None:
        return facts
    return facts | {"reference_mean": point.mean, "reference_sigma": point.sigma, "minimum": point.minimum, "factor": verdict.factor}


# --- for people -------------------------------------------------------------------------------------------------------


def report(runs: list[Run], found: list[Series], series: Series, against: Published | None, notes: list[str]) -> list[str]:
    """The lines on stdout."""
    first = runs[0]
    where = f"{first.gpus or 'unknown number'} x {first.gpu or 'unknown GPU'}"
    lines = [f"{first.benchmark}, {first.division or 'no division'}, global batch {first.batch}: {len(runs)} runs, {where}", ""]
    lines += _table(_run_rows(runs, series))
    odd = [f"  {run.name}: {note}" for run in runs for note in run.notes]
    lines += ["", *(f"  {note}" for note in notes), *_some(odd)] if notes or odd else []
    if len(found) > 1:
        title = f"windows of {rcp.SUBMISSION_RUNS} consecutive runs; the median one is the result"
        lines += ["", title, *_table(_window_rows(found, series))]
    lines += ["", "score", *_score_lines(series), "", "samples to the target", *_luck_lines(series)]
    lines += ["", "against the published v5.1 results", *_comparison_lines(series, against)]
    return lines


def _some(lines: list[str]) -> list[str]:
    return lines if len(lines) <= 12 else [*lines[:12], f"  ... and {len(lines) - 12} more such notes; --json has all"]


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """First column to the left, the others to the right, the last as it is."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:], strict=True)), row[-1]]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines


def _run_rows(runs: list[Run], series: Series) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("run", "minutes", "converged", "samples", "z", "seq/s", "tokens/s/GPU", "evaluation s", "")]
    for run in runs:
        point = _point(run)
        z = point.z_score(run.samples) if point and run.samples and run.converged else None
        rate = run.samples_per_s
        cells = (_text(run.minutes, ".3f"), "yes" if run.converged else "NO", _text(run.samples, ",d"), _text(z, "+.2f"))
        speed = (_text(rate, ".3f"), _text(_tokens_per_gpu(run, rate), ",.0f"), _text(run.evaluation_s, ".1f"))
        rows.append((run.name, *cells, *speed, _role(run, series)))
    return rows


def _role(run: Run, series: Series) -> str:
    """By identity: two runs may look the same."""
    if not any(run is one for one in series.runs):
        return "not in the median window"
    if any(run is one for one in series.counted):
        return ""
    if not run.converged:
        return "did not converge"
    minutes = [one.minutes or 0.0 for one in series.counted]
    return "dropped: fastest" if minutes and (run.minutes or 0.0) <= min(minutes) else "dropped: slowest"


def _window_rows(found: list[Series], chosen: Series) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("first run", "last run", "minutes", "factor", "score", "")]
    for window in found:
        why = window.invalid or ("" if window.passed else "RCP test failed")
        names = (window.runs[0].name, window.runs[-1].name)
        numbers = (_text(window.minutes, ".3f"), _text(window.factor, ".6f"), _text(window.score, ".3f"))
        rows.append((*names, *numbers, why + ("  <- median" if window is chosen else "")))
    return rows


def _score_lines(series: Series) -> list[str]:
    how = "without the fastest and the slowest run" if len(series.runs) >= 3 else "too few runs to drop the fastest and the slowest"
    lines = [f"  mean of {len(series.counted)} runs   {_text(series.minutes, '.4f')} min, {how}"]
    for verdict in series.verdicts:
        lines.append(f"  RCP {verdict.points:<8}    {'passed' if verdict.passed else 'FAILED'} ({verdict.message})")
        if verdict.point:
            point = verdict.point
            lines.append(f"                  mean {verdict.mean:,.2f}; the lowest that passes {point.minimum:,.2f}")
            lines.append(f"                  reference {point.mean:,.2f} +- {point.sigma:,.2f}; factor {verdict.factor:.6f}")
    if series.runs[0].division == "miniature":
        lines.append("  a miniature: no RCP, no benchmark result, and nothing to submit")
    elif series.invalid:
        lines.append(f"  INVALID         {series.invalid}")
    elif series.score is None:
        lines.append("  NO SCORE        the RCP test failed: converging too fast counts as another algorithm, and is rejected")
    else:
        lines.append(f"  score           {series.score:.4f} min = {series.minutes:.4f} x {series.factor:.6f}")
    return lines


def _luck_lines(series: Series) -> list[str]:
    point = _point(series.runs[0])
    if not series.verdicts or point is None or series.verdicts[0].mean >= rcp.NOT_CONVERGED:
        return ["  nothing to hold them against: too few runs, no RCP for this global batch, or a miniature"]
    mean, runs = series.verdicts[0].mean, rcp.SUBMISSION_RUNS - 2
    distance = (mean - point.mean) / (point.sigma * math.sqrt(1 / point.counted + 1 / runs))
    tail = rcp.t_tail(abs(distance), point.counted + runs - 2)
    chance = tail if distance < 0 else 1 - tail
    lines = [f"  mean {mean:,.2f}: {(mean / point.mean - 1) * 100:+.2f} % against the reference, z {point.z_score(mean):+.2f}"]
    lines.append(f"  ten runs of the reference would be this fast or faster in {chance * 100:.0f} % of the cases")
    for samples in sorted({run.samples for run in series.runs if run.converged and run.samples}):
        share, times = point.share_not_slower(samples), sum(run.samples == samples for run in series.runs if run.converged)
        of_reference = f"; {share * 100:.0f} % of the reference's runs needed no more" if share is not None else ""
        lines.append(f"  {times:>2} x {samples:,}, z {point.z_score(samples):+.2f}{of_reference}")
    return lines


def _comparison_lines(series: Series, against: Published | None) -> list[str]:
    run, mine = series.runs[0], pace(series)
    if run.division == "miniature":
        return ["  none: a miniature"]
    if run.gpu is None or run.gpus is None:
        return ["  unknown GPU or number of GPUs: name them with --gpu and --gpus"]
    if against is None:
        lines = [f"  no published result of {run.benchmark} on {run.gpus} x {run.gpu} to split a difference to"]
        for entry in published(run.benchmark, run.gpu):
            rate = entry.samples_per_s * CLOSED[run.benchmark].sequence_length / entry.gpus
            ours = f"; yours {_tokens_per_gpu(run, mine.samples_per_s):,.0f}" if mine else ""
            lines.append(f"  {entry.submitter}, {entry.gpus} GPUs: {entry.score:.3f} min, {rate:,.0f} tokens/s/GPU{ours}")
        return lines
    theirs = against.pace
    lines = [f"  {against.submitter}, {against.gpus} x {against.gpu}, global batch {against.batch}: the split is against this one"]
    others = [f"{entry.submitter} {entry.score:.3f}" for entry in published(run.benchmark, run.gpu) if entry.gpus == run.gpus]
    lines += [f"  all of this GPU, minutes: {', '.join(others)}", ""]
    if mine is None:
        return [*lines, "  the logs have no training blocks, or no run converged: no split"]
    return [*lines, *_table(_pace_rows(mine, theirs, series, against)), "", *_table(_split_rows(series, mine, against))]


def _pace_rows(mine: Pace, theirs: Pace, series: Series, against: Published) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("", "yours", "published", "")]
    rows.append(("seq/s, first block of each run left out", f"{mine.samples_per_s:.3f}", f"{theirs.samples_per_s:.3f}", ""))
    rows.append(("samples to the target", f"{mine.samples:,.0f}", f"{theirs.samples:,.0f}", ""))
    rows.append(("evaluations per run", _text(mine.evaluations, ".2f"), _text(theirs.evaluations, ".2f"), ""))
    rows.append(("seconds per evaluation", _text(mine.evaluation_s, ".2f"), _text(theirs.evaluation_s, ".2f"), ""))
    rows.append(("minutes without RCP factor", f"{mine.minutes:.3f}", f"{theirs.minutes:.3f}", ""))
    rows.append(("score, minutes", _text(series.score, ".3f"), f"{against.score:.3f}", ""))
    return rows


def _split_rows(series: Series, mine: Pace, against: Published) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("what the difference is made of", "minutes", "factor on the time", "")]
    for part in split(mine, against.pace):
        rows.append((part.name, _signed(part.minutes), f"{part.factor:.4f}", ""))
    rows.append(("together", _signed(mine.minutes - against.minutes), f"{mine.minutes / against.minutes:.4f}", "without RCP factor"))
    if series.score is not None and series.factor is not None:
        difference = (series.score - mine.minutes) - (against.score - against.minutes)
        rows.append(("RCP factor", _signed(difference), f"{series.factor / against.factor:.4f}", ""))
        rows.append(("score", _signed(series.score - against.score), f"{series.score / against.score:.4f}", ""))
    return rows


def _point(run: Run) -> rcp.Point | None:
    return None if run.division == "miniature" or run.batch is None else rcp.point_at(run.benchmark, run.batch)


def _tokens_per_gpu(run: Run, samples_per_s: float | None) -> float | None:
    rules = (MINIATURE if run.division == "miniature" else CLOSED)[run.benchmark]
    return None if samples_per_s is None or run.gpus is None else samples_per_s * rules.sequence_length / run.gpus


def _signed(minutes: float) -> str:
    return f"{round(minutes, 3) + 0.0:+.3f}"  # + 0.0: no minus before a zero


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


if __name__ == "__main__":
    sys.exit(main())
