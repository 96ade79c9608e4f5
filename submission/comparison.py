"""Compare two results, published or local, and split the difference of their times into causes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

from common.records import published
from common.records.published import Pace, Published
from common.text_tables import number
from submission.output import signed, table
from submission.published_results import tokens_per_gpu
from submission.run import Run


def comparison_as_dict(mine: Published, other: Published | None) -> dict | None:
    """Return the JSON object of the comparison of `mine` with `other`, or None if that is None."""
    if other is None:
        return None
    parts = None
    if mine.pace and other.pace:
        parts = [asdict(part) for part in published.split(mine.pace, other.pace)]
    return {**asdict(other), "name": other.name, "speedup": speedup(mine, other), "split": parts}


def labels(mine: Published, other: Published) -> tuple[str, str]:
    """Return labels for both results.

    The label of a published result is its name. Local results are "yours" and "theirs".
    """
    first = mine.name if mine.round else "yours"
    second = other.name if other.round else "theirs"
    return first, second


def comparison(mine: Published, other: Published | None) -> list[str]:
    """Return the lines of the comparison: both results, their paces, causes of the difference."""
    if other is None:
        if mine.gpu and mine.gpus:
            return _others(mine)
        return ["  the GPU kind or the number of GPUs is unknown: set them with --gpu and --gpus"]
    first, second = labels(mine, other)
    lines = [_headline(mine, first), _headline(other, second)]
    times = speedup(mine, other)
    if times is not None:
        lines.append(
            f"  {first} is {times:.2f} times as fast as {second} ({1 / times:.4f} of the minutes)"
        )
    if not mine.pace or not other.pace:
        return [
            *lines,
            "  causes unknown: one result has no training blocks, or no run converged",
        ]
    return [
        *lines,
        "",
        *table(_pace_rows(mine, other)),
        "",
        *table(_split_rows(mine, other, mine.pace, other.pace)),
    ]


def _headline(side: Published, label: str) -> str:
    if side.round:
        return f"  {label}: {where(side)}"
    return f"  {label:<7} {side.name}: {where(side)}"


def where(side: Published | Run) -> str:
    """Return the GPUs and the batch of a result or run, such as "8 x H200, global batch 32"."""
    gpus = side.gpus or "unknown number"
    return f"{gpus} x {side.gpu or 'unknown GPU'}, global batch {side.batch}"


def speedup(mine: Published, other: Published) -> float | None:
    """Return how many times as fast as `other` the result `mine` is.

    It is the ratio of the scores, or of the minutes if one result has no score, or None.
    """
    if mine.score and other.score:
        return other.score / mine.score
    if mine.minutes and other.minutes:
        return other.minutes / mine.minutes
    return None


def _others(mine: Published) -> list[str]:
    """Return lines that list the results on the same GPU kind with other numbers of GPUs."""
    lines = [
        f"  no published result of {mine.benchmark} on {mine.gpus} x {mine.gpu};"
        " name another with --against"
    ]
    own_rate = number(tokens_per_gpu(mine), ",.0f")
    for row in published.published(mine.benchmark, mine.gpu):
        rate = number(tokens_per_gpu(row), ",.0f")
        score = number(row.score, ".3f")
        lines.append(
            f"  {row.name}, {row.gpus} GPUs: {score} min, {rate} tokens/s/GPU; yours {own_rate}"
        )
    return lines


def _pace_rows(mine: Published, other: Published) -> list[Sequence[str]]:
    """Return table rows with the quantities that make up the minutes of both results."""

    def row(name: str, form: str, value: Callable[[Published], float | None]) -> Sequence[str]:
        return (name, number(value(mine), form), number(value(other), form), "")

    return [
        ("", *labels(mine, other), ""),
        row("GPUs", "d", lambda side: side.gpus),
        row("seq/s, without the first block of a run", ".3f", lambda side: side.samples_per_s),
        row("tokens/s/GPU", ",.0f", tokens_per_gpu),
        row("samples to the target", ",.0f", lambda side: side.samples),
        row("evaluations per run", ".2f", lambda side: side.evaluations),
        row("seconds per evaluation", ".2f", lambda side: side.evaluation_s),
        row("minutes without RCP factor", ".3f", lambda side: side.minutes),
        row("score, minutes", ".3f", lambda side: side.score),
    ]


def _split_rows(mine: Published, other: Published, ours: Pace, theirs: Pace) -> list[Sequence[str]]:
    """Return table rows that split the difference of two times into causes (`published.split`)."""
    rows: list[Sequence[str]] = [("cause of the difference", "minutes", "factor on the time", "")]
    for part in published.split(ours, theirs):
        rows.append((part.name, signed(part.minutes), f"{part.factor:.4f}", ""))
    difference = ours.minutes - theirs.minutes
    ratio = ours.minutes / theirs.minutes
    rows.append(("together", signed(difference), f"{ratio:.4f}", "without RCP factor"))
    if mine.score is None or other.score is None:
        return rows
    factor = (mine.score / ours.minutes) / (other.score / theirs.minutes)
    more = (mine.score - ours.minutes) - (other.score - theirs.minutes)
    rows.append(("RCP factor", signed(more), f"{factor:.4f}", ""))
    total = mine.score / other.score
    rows.append(("score", signed(mine.score - other.score), f"{total:.4f}", ""))
    return rows
