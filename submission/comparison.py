"""Find a published result by words, and print how another one differs from it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from common.benchmarks import divisions
from common.command_line import meant
from common.errors import ConfigError
from common.records import published
from common.records.published import Pace, Published
from submission.runs import Run
from submission.series import check_same, read_series, result, ten_runs
from submission.terminal import number, signed, table

ROUND = re.compile(r"v?\d\.\d")
GPUS = frozenset(row.gpu for row in published.RESULTS if row.gpu)
LISTED = 12  # candidates that an error lists

# Finding a result.


def find(wish: str, ruleset: str = "", like: Published | None = None) -> Published:
    """Return the result that `wish` names: a directory, a log, or words of a published result.

    `ruleset`: ruleset for logs (default: chosen by their keys). `like`: the result to compare with.
    Only results of its benchmark match. Of several matches, those with its kind and its number of
    GPUs are preferred. Raises ConfigError if nothing matches, if several results still match, or if
    a directory holds another benchmark than that of `like`.
    """
    if wish and Path(wish).exists():
        return _read(Path(wish), ruleset, like)
    matches = matching(wish)
    if like is not None:
        matches = _comparable(matches, like)
    if not matches:
        kind = like.gpu if like is not None and like.gpu else "GPU"
        raise ConfigError(
            f"no result {wish!r}",
            "it is not a file, and no published result has all of these words",
            f"./run_and_time.sh score --list {kind} lists the published results",
        )
    if len(matches) > 1:
        raise ConfigError(
            f"{wish!r} matches {len(matches)} published results",
            "; ".join(_candidates(matches)),
            "add words until one result is left, or paste its name",
        )
    return matches[0]


def _read(path: Path, ruleset: str, like: Published | None) -> Published:
    series = read_series([path], ruleset=ruleset)
    check_same(series)
    if like is not None and series.first.benchmark != like.benchmark:
        raise ConfigError(
            f"{path} is a result of {series.first.benchmark}",
            "minutes of two benchmarks cannot be compared",
            f"name a result of {like.benchmark}",
        )
    return result(series, ten_runs(series))


def matching(wish: str) -> list[Published]:
    """Return the published results that match every word of `wish`, or that have exactly this name.

    The name of a benchmark may follow the name of a result.
    """
    words = wish.split()
    rows = [row for row in published.RESULTS if all(_matches(row, word) for word in words)]
    exact = [row for row in rows if wish.strip() in (row.name, f"{row.name} {row.benchmark}")]
    if not words:
        return []
    return exact or rows


def _matches(row: Published, word: str) -> bool:
    """Return whether `word` is the round, the GPU, or a whole word of a name of `row`.

    Case is ignored. Letters and digits make up a word: "B200" does not match "GB200".
    """
    if ROUND.fullmatch(word):
        return row.round == word.lstrip("v")
    if word.upper() in GPUS:
        return row.gpu == word.upper()
    text = f"{row.submitter} {row.system} {row.benchmark}"
    pattern = rf"(?<![a-z0-9]){re.escape(word)}(?![a-z0-9])"
    return re.search(pattern, text, re.IGNORECASE) is not None


def _comparable(rows: list[Published], like: Published) -> list[Published]:
    """Return the rows of the benchmark of `like`, if possible with its kind and number of GPUs."""
    rows = [row for row in rows if row.benchmark == like.benchmark]
    same_kind = [row for row in rows if row.gpu == like.gpu]
    rows = same_kind or rows
    same_number = [row for row in rows if row.gpus == like.gpus]
    return same_number or rows


def _candidates(rows: list[Published]) -> list[str]:
    names = [f"{row.name} {row.benchmark}" for row in rows[:LISTED]]
    if len(rows) > LISTED:
        names.append(f"and {len(rows) - LISTED} more")
    return names


def best_published(mine: Published) -> Published | None:
    """Return the best result of the newest round on the same number and kind of GPUs, if any."""
    if not mine.gpu or not mine.gpus:
        return None
    rows = published.published(mine.benchmark, mine.gpu, mine.gpus)
    scored = [row for row in rows if row.score is not None]
    # Rows are sorted best first, and max returns the first row of the newest round.
    return max(scored, key=lambda row: row.round, default=None)


# List of the published results.


def listed(gpu: str) -> list[Published]:
    """Return the published results on `gpu`, or all for "", by benchmark, GPU, number and score.

    Raises ConfigError if there is no result on this kind of GPU.
    """
    kind = gpu.upper()
    if kind and kind not in GPUS:
        names = sorted(GPUS)
        raise ConfigError(
            f"no published result on {gpu!r}",
            f"there are results on {', '.join(names)}",
            meant(gpu, names, "choose one of these"),
        )
    rows = [row for row in published.RESULTS if kind in ("", row.gpu)]
    return sorted(rows, key=lambda row: (row.benchmark, row.gpu or "", row.gpus or 0, row.rank))


def listing(gpu: str) -> list[str]:
    """Return the lines of --list: a table of the published results on `gpu`, or of all for ""."""
    rows = listed(gpu)
    cells: list[Sequence[str]] = [
        ("result", "score", "minutes", "tokens/s/GPU", "batch", "GPUs", "benchmark")
    ]
    for row in rows:
        cells.append(
            (
                row.name,
                number(row.score, ".3f"),
                number(row.minutes, ".3f"),
                number(tokens_per_gpu(row), ",.0f"),
                number(row.batch, "d"),
                f"{row.gpus} x {row.gpu}",
                row.benchmark,
            )
        )
    of_one_log = any(row.runs == 1 for row in rows)
    note = ["", "  without a score: only one log of the result was read"] if of_one_log else []
    return [*table(cells), *note]


# Comparison.


def comparison_as_dict(mine: Published, other: Published | None) -> dict | None:
    """Return the JSON object of a comparison, or None without another result."""
    if other is None:
        return None
    parts = None
    if mine.pace and other.pace:
        parts = [asdict(part) for part in published.split(mine.pace, other.pace)]
    return {**asdict(other), "name": other.name, "speedup": speedup(mine, other), "split": parts}


def labels(mine: Published, other: Published) -> tuple[str, str]:
    """Return the names of both results: that of a published one, else "yours" and "theirs"."""
    first = mine.name if mine.round else "yours"
    second = other.name if other.round else "theirs"
    return first, second


def comparison(mine: Published, other: Published | None) -> list[str]:
    """Return the lines of the comparison: both results, their paces and the split difference."""
    if other is None:
        if mine.gpu and mine.gpus:
            return _others(mine)
        return ["  unknown GPU or number of GPUs: set them with --gpu and --gpus"]
    first, second = labels(mine, other)
    lines = [_headline(mine, first), _headline(other, second)]
    times = speedup(mine, other)
    if times is not None:
        lines.append(
            f"  {first} is {times:.2f} times as fast as {second} ({1 / times:.4f} of the minutes)"
        )
    if not mine.pace or not other.pace:
        return [*lines, "  no split: one result has no training blocks, or no run converged"]
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
    """Return the system and the batch of a result or run, such as "8 x H200, global batch 32"."""
    gpus = side.gpus or "unknown number"
    return f"{gpus} x {side.gpu or 'unknown GPU'}, global batch {side.batch}"


def tokens_per_gpu(side: Published) -> float | None:
    """Return the tokens per second and GPU of a result, or None if it is unknown."""
    if side.samples_per_s is None or not side.gpus:
        return None
    return side.samples_per_s * divisions(side.benchmark)["closed"].sequence_length / side.gpus


def speedup(mine: Published, other: Published) -> float | None:
    """Return the ratio of the scores, or of the minutes if one side has no score."""
    if mine.score and other.score:
        return other.score / mine.score
    if mine.minutes and other.minutes:
        return other.minutes / mine.minutes
    return None


def _others(mine: Published) -> list[str]:
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
    """Return the rows that split the difference between two results into its causes."""
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
