"""Find a published result by words, and list the published results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from common.benchmarks import divisions
from common.command_line import PROGRAM
from common.errors import ConfigError
from common.records import published
from common.records.published import Published
from common.suggestions import unknown
from common.text_tables import number
from common.values import gpu_kind
from submission.options import runs_folder
from submission.output import table
from submission.series import LocalResult, check_same, read_series, result, ten_runs

ROUND = re.compile(r"v?\d\.\d")  # a round of MLPerf Training, such as 5.1
GPUS = frozenset(row.gpu for row in published.RESULTS if row.gpu)
MAX_CANDIDATES = 12  # maximum number of candidates that an error lists


def find(text: str, ruleset: str = "", like: Published | None = None) -> Published:
    """Return the result that `text` names: a directory, a log, or words of a published result.

    `ruleset`: ruleset for logs (default: chosen by their keys). `like`: the result to compare with.
    Only results of its benchmark match. If several match, results with its GPU kind and its number
    of GPUs are preferred. Raises ConfigError if nothing matches, if several results still match, or
    if the logs are of another benchmark than `like`.
    """
    if text and (folder := runs_folder(text)).exists():
        return _read(folder, ruleset, like)
    matches = matching(text)
    if like is not None:
        matches = _comparable(matches, like)
    if not matches:
        named = gpu_kind(text)
        kind = named if named in GPUS else like.gpu if like is not None and like.gpu else ""
        raise ConfigError(
            f"no result {text!r}",
            "there is no such file, and no published result has all of these words",
            f"{PROGRAM} score --list {kind}".strip() + " lists the published results",
        )
    if len(matches) > 1:
        raise ConfigError(
            f"{text!r} matches {len(matches)} published results",
            "; ".join(_candidates(matches)),
            "add words until only one result matches, or paste its name",
        )
    return matches[0]


def _read(path: Path, ruleset: str, like: Published | None) -> Published:
    """Return the result of the logs at `path`. For arguments and errors see `find`."""
    series = read_series([path], ruleset=ruleset)
    check_same(series)
    if like is not None and series.first.benchmark != like.benchmark:
        raise ConfigError(
            f"{path} is a result of {series.first.benchmark}",
            "results of two benchmarks cannot be compared",
            f"name a result of {like.benchmark}",
        )
    return result(series, ten_runs(series))


def matching(text: str) -> list[Published]:
    """Return the published results that match every word of `text`.

    If `text` is exactly the name of a result, or its name and benchmark, return only this result.
    """
    words = text.split()
    if not words:
        return []
    rows = [row for row in published.RESULTS if all(_matches(row, word) for word in words)]
    exact = [row for row in rows if text.strip() in (row.name, f"{row.name} {row.benchmark}")]
    return exact or rows


def _matches(row: Published, word: str) -> bool:
    """Return whether `word` is the round or the GPU of `row`, or a word of one of its names.

    The row has names of submitter, system and benchmark. Case is ignored. A word consists of
    letters and digits: "B200" does not match "GB200".
    """
    if ROUND.fullmatch(word):
        return row.round == word.lstrip("v")
    if word.upper() in GPUS:
        return row.gpu == word.upper()
    text = f"{row.submitter} {row.system} {row.benchmark}"
    pattern = rf"(?<![a-z0-9]){re.escape(word)}(?![a-z0-9])"
    return re.search(pattern, text, re.IGNORECASE) is not None


def _comparable(rows: list[Published], like: Published) -> list[Published]:
    """Return the rows of the benchmark of `like`.

    Results on other GPU kinds are left out, then results with other numbers of GPUs, each only if
    some results remain.
    """
    rows = [row for row in rows if row.benchmark == like.benchmark]
    same_kind = [row for row in rows if row.gpu == like.gpu]
    rows = same_kind or rows
    same_number = [row for row in rows if row.gpus == like.gpus]
    return same_number or rows


def _candidates(rows: list[Published]) -> list[str]:
    names = [f"{row.name} {row.benchmark}" for row in rows[:MAX_CANDIDATES]]
    if len(rows) > MAX_CANDIDATES:
        names.append(f"and {len(rows) - MAX_CANDIDATES} more")
    return names


def best_published(mine: Published) -> Published | None:
    """Return the best result of the newest round on the same number and kind of GPUs, or None."""
    if not mine.gpu or not mine.gpus:
        return None
    rows = published.published(mine.benchmark, mine.gpu, mine.gpus)
    scored = [row for row in rows if row.score is not None]
    # Rows are sorted best first, and max returns the first row of the newest round.
    return max(scored, key=lambda row: row.round, default=None)


# List for --list.


def listed(gpu: str) -> list[Published]:
    """Return the published results on the GPU kind `gpu`, or all results if it is "".

    They are sorted by benchmark, GPU kind, number of GPUs and score. Raises ConfigError if there is
    no result on this GPU kind.
    """
    kind = gpu_kind(gpu)
    if kind and kind not in GPUS:
        raise unknown(f"no published result for {gpu!r}", gpu, sorted(GPUS))
    rows = [row for row in published.RESULTS if kind in ("", row.gpu)]
    return sorted(rows, key=lambda row: (row.benchmark, row.gpu or "", row.gpus or 0, row.rank))


def listing(gpu: str) -> list[str]:
    """Return the lines that --list prints: a table of the results of `listed`."""
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
    lines = table(cells)
    if any(row.runs == 1 for row in rows):
        lines += ["", "  score -: only one log of the result was read"]
    return lines


def tokens_per_gpu(side: Published) -> float | None:
    """Return the tokens per second and GPU of a result, or None if they are unknown."""
    if side.samples_per_s is None or not side.gpus:
        return None
    length: int | None
    if isinstance(side, LocalResult):
        length = side.sequence_length
    else:
        length = divisions(side.benchmark)["closed"].sequence_length
    return None if length is None else side.samples_per_s * length / side.gpus
