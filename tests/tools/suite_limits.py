"""Compute the baseline of a GPU kind, and each row's limit, from repeated suites of healthy GPUs.

    python3 -m tests.tools.suite_limits SUITE.json ... [--slowed SLOWED.json] [--write]

SUITE.json: files of `throughput suite --save-baseline`, of one GPU kind. A row's baseline is the
median of the suites. Its limit is twice the largest distance of a suite from that median, and at
least TOLERANCE, because healthy cards of one kind differ by 2 %. A row whose limit exceeds WIDEST
says little about a machine's health and is not judged, nor are rows that limits.json declares so.

Prints how each suite fares against baseline and limits of the others, without a second measurement.
With --slowed, a suite of a GPU that was slowed on purpose, also prints how many judged rows are
below their limits in that suite, and in each healthy one whose rows are slowed in proportion.
With --write, writes throughput/baselines/<GPU>.json and the measured limits of
throughput/limits.json. Rows of that baseline that the suites do not measure stay.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.measure.files import write_json
from throughput import baseline
from throughput.baseline import Baseline, BaselineRow

WIDEST = 0.10

RowKey = tuple[str, str, str]


def key_of(row: BaselineRow) -> RowKey:
    return row.table, json.dumps(row.keys, sort_keys=True), row.column


def same(new: BaselineRow, old: BaselineRow) -> bool:
    """Return whether `new` measures what `old` does, which may name fewer keys."""
    return new.table == old.table and baseline.agrees(new.keys, old.keys)


def combined(suites: list[Baseline]) -> tuple[list[BaselineRow], list[dict[str, Any]]]:
    """Return the medians of all rows that every suite has, and their entries in limits.json."""
    declared = json.loads(baseline.LIMITS.read_text())["declared"]
    values: dict[RowKey, list[float]] = {}
    for suite in suites:
        for row in suite.rows:
            values.setdefault(key_of(row), []).append(row.value)
    rows = []
    entries = []
    for row in suites[0].rows:
        measured = values[key_of(row)]
        if len(measured) < len(suites):
            continue
        median = statistics.median(measured)
        rows.append(replace(row, value=median))
        if baseline.limit_of(row, declared) is None:
            continue
        distance = max(abs(value / median - 1) for value in measured)
        limit = round(max(baseline.TOLERANCE, 2 * distance), 4)
        entries.append(
            {
                "table": row.table,
                "keys": row.keys,
                "limit": limit if limit <= WIDEST else None,
                "distance": round(distance, 4),
            }
        )
    return rows, entries


def slow_rows(suite: Baseline, others: list[Baseline]) -> list[str]:
    """Return the judged rows of `suite` below baseline and limits of `others`, as text."""
    rows, entries = combined(others)
    declared = json.loads(baseline.LIMITS.read_text())["declared"]
    values = {key_of(row): row.value for row in suite.rows}
    slow = []
    for row in rows:
        limit = baseline.limit_of(row, [*entries, *declared])
        change = values.get(key_of(row), row.value) / row.value - 1
        if limit is not None and change < -limit:
            keys = ", ".join(str(value) for value in row.keys.values() if value)
            slow.append(f"{row.table}: {keys} {change:+.1%}, limit {-limit:.1%}")
    return slow


def slowed_alike(suite: Baseline, medians: Iterable[BaselineRow], slowed: Baseline) -> Baseline:
    """Return `suite` with each row slowed as `slowed` is slower than `medians`."""
    healthy = {key_of(row): row.value for row in medians}
    ratios = {key_of(row): row.value / healthy.get(key_of(row), row.value) for row in slowed.rows}
    rows = [replace(row, value=row.value * ratios.get(key_of(row), 1.0)) for row in suite.rows]
    return replace(suite, rows=tuple(rows))


def write(suites: list[Baseline], files: list[str]) -> None:
    """Write the baseline of the GPU kind and the measured limits."""
    rows, entries = combined(suites)
    path = baseline.BASELINES / f"{suites[0].gpu}.json"
    sources = list(dict.fromkeys(suite.source for suite in suites))
    source = f"medians of {len(suites)} suites: {'; '.join(sources)}"
    if path.is_file():
        before = baseline.read(path)
        older = [row for row in before.rows if not any(same(new, row) for new in rows)]
        rows += older
        source += f". {len(older)} rows: {before.source}"
    baseline.write(path, Baseline(suites[0].gpu, source, tuple(rows)))
    content = json.loads(baseline.LIMITS.read_text())
    source = f"{len(files)} suites on {suites[0].gpu}: {'; '.join(sources)}"
    write_json(baseline.LIMITS, content | {"source": source, "measured": entries})
    print(f"written: {path}, {baseline.LIMITS}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="SUITE.json")
    parser.add_argument("--slowed", type=Path, metavar="SLOWED.json")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    suites = [baseline.read(path) for path in options.files]
    rows, entries = combined(suites)
    judged = [entry for entry in entries if entry["limit"] is not None]
    print(f"{len(rows)} rows in each of {len(suites)} suites, {len(judged)} judged")
    for entry in entries:
        keys = ", ".join(str(value) for value in entry["keys"].values() if value)
        limit = "not judged" if entry["limit"] is None else f"limit {entry['limit']:.1%}"
        print(f"  {entry['table']}: {keys}: within {entry['distance']:.2%}, {limit}")
    if len(suites) > 2:
        for number, suite in enumerate(suites):
            others = suites[:number] + suites[number + 1 :]
            slow = slow_rows(suite, others)
            print(f"{options.files[number].name} against the others: {len(slow)} below {slow}")
    if options.slowed:
        slowed = baseline.read(options.slowed)
        slow = slow_rows(slowed, suites)
        print(f"{options.slowed.name}: {len(slow)} below {slow}")
        for number, suite in enumerate(suites):
            others = suites[:number] + suites[number + 1 :]
            slow = slow_rows(slowed_alike(suite, rows, slowed), others)
            print(f"{options.files[number].name} slowed alike: {len(slow)} below")
    if options.write:
        write(suites, [path.name for path in options.files])


if __name__ == "__main__":
    main()
