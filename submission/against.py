"""One result against another: ratio of the scores, and what the difference in minutes is made of (records/published.py).

Either side is a series of logs or a row of the published table, of any GPU, number of GPUs and round. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from common.errors import ConfigError
from records import published
from records.published import Pace, Published
from submission.log_rules import BENCHMARKS
from submission.series import check_same, read_series, result, ten_runs
from submission.terminal import number, signed, table

ROUND = re.compile(r"v?\d\.\d")


def find(wish: str, ruleset: str = "", like: Published | None = None) -> Published:
    """The result that `wish` names: a directory or log, or words that stand in one row of the published table. Of several rows,
    those of the benchmark and the GPUs of `like`, if there are such, and of these the best. Raises ConfigError if there is none."""
    if wish and Path(wish).exists():
        series = read_series([Path(wish)], ruleset=ruleset)
        check_same(series)
        return result(series, ten_runs(series))
    words = wish.lower().split()
    rows = [row for row in published.RESULTS if all(_says(row, word) for word in words)]
    if like is None:
        if len({row.benchmark for row in rows}) > 1:
            raise ConfigError(f"{wish!r} names results of both benchmarks", "it is no directory or log either", "add the benchmark's name")
    else:
        rows = [row for row in rows if row.benchmark == like.benchmark]
        for same in ([row for row in rows if row.gpu == like.gpu], [row for row in rows if row.gpus == like.gpus]):
            rows = [row for row in rows if row in same] or rows
    if not rows or not words:
        there = ", ".join(row.name for row in published.published(like.benchmark, like.gpu)) if like else ""
        why = f"it is no file, and no published result has these words{f'; of {like.gpu} there are: {there}' if like and there else ''}"
        raise ConfigError(f"no result {wish!r}", why, "name a directory, or submitter, system and round of a published result")
    return min(rows, key=lambda row: row.rank)


def _says(row: Published, word: str) -> bool:
    """A word such as 5.1 or v5.1 is a round; any other stands in one of the names."""
    if ROUND.fullmatch(word):
        return row.round == word.lstrip("v")
    return word in f"{row.submitter} {row.system} {row.gpu} {row.benchmark}".lower()


def best_published(mine: Published) -> Published | None:
    """The best of the newest round on as many GPUs of the same kind."""
    if not (mine.gpu and mine.gpus):
        return None
    rows = [row for row in published.published(mine.benchmark, mine.gpu, mine.gpus) if row.score is not None]
    return max(rows, key=lambda row: row.round, default=None)  # of a round the first


def as_dict(mine: Published, other: Published | None) -> dict | None:
    if other is None:
        return None
    parts = [asdict(part) for part in published.split(mine.pace, other.pace)] if mine.pace and other.pace else None
    return asdict(other) | {"name": other.name, "speedup": _speedup(mine, other), "split": parts}


def lines(mine: Published, other: Published | None) -> list[str]:
    """The comparison for people."""
    if other is None and not (mine.gpu and mine.gpus):
        return ["  unknown GPU or number of GPUs: name them with --gpu and --gpus"]
    if other is None:
        return _others(mine)
    found = [f"  yours   {mine.name}: {_where(mine)}", f"  theirs  {other.name}: {_where(other)}"]
    if (times := _speedup(mine, other)) is not None:
        found.append(f"  yours is {times:.2f} times as fast: {1 / times:.4f} of the minutes")
    if not mine.pace or not other.pace:
        return [*found, "  the logs of one side have no training blocks, or no run converged: no split"]
    return [*found, "", *table(_pace_rows(mine, other)), "", *table(_split_rows(mine, other, mine.pace, other.pace))]


def _where(side: Published) -> str:
    return f"{side.gpus or 'unknown number'} x {side.gpu or 'unknown GPU'}, global batch {side.batch}"


def _tokens_per_gpu(side: Published) -> float | None:
    rate, gpus = side.samples_per_s, side.gpus
    return rate * BENCHMARKS[side.benchmark].CLOSED.sequence_length / gpus if rate is not None and gpus else None


def _speedup(mine: Published, other: Published) -> float | None:
    """By the scores; by the minutes where one side has no score."""
    if mine.score and other.score:
        return other.score / mine.score
    return other.minutes / mine.minutes if mine.minutes and other.minutes else None


def _others(mine: Published) -> list[str]:
    found = [f"  no published result of {mine.benchmark} on {mine.gpus} x {mine.gpu} to split a difference to; --against names another"]
    for row in published.published(mine.benchmark, mine.gpu):
        yours = f"; yours {number(_tokens_per_gpu(mine), ',.0f')}"
        rate = number(_tokens_per_gpu(row), ",.0f")
        found.append(f"  {row.name}, {row.gpus} GPUs: {number(row.score, '.3f')} min, {rate} tokens/s/GPU{yours}")
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
    rows: list[Sequence[str]] = [("what the difference is made of", "minutes", "factor on the time", "")]
    rows += [(part.name, signed(part.minutes), f"{part.factor:.4f}", "") for part in published.split(ours, theirs)]
    rows.append(("together", signed(ours.minutes - theirs.minutes), f"{ours.minutes / theirs.minutes:.4f}", "without RCP factor"))
    if mine.score is not None and other.score is not None:
        factor = (mine.score / ours.minutes) / (other.score / theirs.minutes)
        rows.append(("RCP factor", signed((mine.score - ours.minutes) - (other.score - theirs.minutes)), f"{factor:.4f}", ""))
        rows.append(("score", signed(mine.score - other.score), f"{mine.score / other.score:.4f}", ""))
    return rows
