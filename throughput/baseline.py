"""Comparison of a suite's rows with a baseline: an earlier suite, or published numbers.

A baseline file is JSON: "gpu" (kind of GPU, or "CPU"), "source" (date, commit and command), and
"rows". A row holds the name of a table, the values of the table's keys, a column and its value.
baselines/<GPU>.json are measurements of this package. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.command_line import meant
from common.errors import ConfigError
from throughput import published, report
from throughput.tables import Section, Table

TOLERANCE = "3%"
FOLDER = Path(__file__).with_name("baselines")
PASS = "PASS"
FAIL = "FAIL"
NOT_MEASURED = "not measured"

Results = Iterable[dict[str, Any]]  # results that `result.read` returned


@dataclass(frozen=True)
class BaselineRow:
    """A value to compare with. `keys`: the values by which a measured row is found."""

    table: str
    keys: dict[str, Any]
    column: str
    value: float


@dataclass(frozen=True)
class Baseline:
    gpu: str
    source: str
    rows: tuple[BaselineRow, ...]


@dataclass(frozen=True)
class BaselineVerdict:
    """A row of the comparison. `value`: None if no row was measured or if it failed."""

    name: str
    column: str
    baseline: str
    value: str
    change: float | None  # of the baseline; -0.05: 5 % below it
    verdict: str


def percentage(text: str) -> float:
    """Parse an option such as 3% and return it as a fraction."""
    if not re.fullmatch(r"\d+(\.\d+)?%", text):
        raise argparse.ArgumentTypeError(f"'{text}' is not a percentage such as {TOLERANCE}")
    return float(text[:-1]) / 100


# --- where a baseline comes from ------------------------------------------------------------------


def of_results(results: Results) -> Baseline:
    """Return a baseline of every measured row. `results` are of one machine."""
    rows = []
    gpu = ""
    source = ""
    for data in results:
        gpu = report.gpu_kind(data) or "CPU"
        source = f"{report.date(data)}, commit {data['versions'].get('commit', 'unknown')}"
        for table in data["tables"]:
            rows += _rows_of(table, data)
    return Baseline(gpu, f"measured {source}", tuple(rows))


def _rows_of(table: Table, data: dict[str, Any]) -> list[BaselineRow]:
    if not table.larger_is_better:
        return []
    return [
        BaselineRow(
            table.name, {key: row.get(key) for key in table.keys}, table.value, row[table.value]
        )
        for row in report.rows_of(table, data)
        if row.get(table.value) is not None and "error" not in row
    ]


def of_published(gpu: str, tables: Iterable[Table]) -> Baseline:
    """Return the published values of `gpu` that stand beside columns of `tables`."""
    rows = []
    for table in tables:
        for wanted in table.published:
            if not wanted.match or not wanted.compared:
                continue
            for row in published.tables()[wanted.table].rows:
                if row["gpu"] == gpu and row[wanted.value] is not None:
                    keys = {key: row[key] for key in wanted.match}
                    rows.append(BaselineRow(table.name, keys, wanted.value, row[wanted.value]))
    return Baseline(gpu, f"published for {gpu} (throughput/published.json)", tuple(rows))


def find(name: str, tables: Iterable[Table]) -> Baseline:
    """Return the baseline `name`: a file, or a kind of GPU.

    For a kind of GPU it is baselines/<GPU>.json if there is one, otherwise its published numbers.
    Raises ConfigError for an unknown name, DataError for a file that is not a baseline.
    """
    path = Path(name)
    if path.is_file():
        return read(path)
    measured = {file.stem.lower(): file for file in FOLDER.glob("*.json")}
    if name.lower() in measured:
        return read(measured[name.lower()])
    tables = list(tables)
    of_gpus = [of_published(gpu, tables) for gpu in sorted(published.gpus())]
    known = {one.gpu.lower(): one for one in of_gpus if one.rows}
    if name.lower() in known:
        return known[name.lower()]
    names = sorted([file.stem for file in measured.values()] + [one.gpu for one in known.values()])
    raise ConfigError(
        f"unknown baseline --against {name}",
        "there is neither such a file nor a GPU with that name and known numbers",
        meant(name, names),
    )


def read(path: Path) -> Baseline:
    """Return the baseline in the file at `path`. Raises DataError if it is not a baseline."""

    def parse(data: dict[str, Any]) -> Baseline:
        rows = tuple(BaselineRow(**row) for row in data["rows"])
        return Baseline(str(data["gpu"]), str(data["source"]), rows)

    return report.read_json(
        path,
        parse,
        f"{path} is not a baseline",
        "save one with ./run_and_time.sh throughput suite --save-baseline FILE",
    )


def write(path: Path, baseline: Baseline) -> None:
    """Write `baseline` to the file at `path`. Raises StorageError."""
    report.write_text(path, json.dumps(asdict(baseline), indent=1) + "\n")


# --- comparison -----------------------------------------------------------------------------------


def compare(baseline: Baseline, results: Results, tolerance: float) -> list[BaselineVerdict]:
    """Return one verdict per row of the baseline, failures first.

    A row fails if it is more than `tolerance` (a fraction) below the baseline, or if its
    measurement failed. A row that this suite does not measure is "not measured" and fails nothing.
    """
    tables = [(table, data) for data in results for table in data["tables"]]
    verdicts = [_verdict(row, tables, tolerance) for row in baseline.rows]
    order = (FAIL, PASS, NOT_MEASURED)
    return sorted(verdicts, key=lambda verdict: order.index(verdict.verdict))


def _verdict(
    row: BaselineRow, tables: list[tuple[Table, dict[str, Any]]], tolerance: float
) -> BaselineVerdict:
    name = f"{row.table}: {', '.join(str(value) for value in row.keys.values() if value)}"
    matching = []
    head = row.column
    form = ",.4g"
    for table, data in tables:
        if table.name == row.table:
            rows = report.rows_of(table, data)
            matching += [one for one in rows if _agrees(one, row.keys)]
            columns = {column.key: column for column in table.columns}
            if row.column in columns:
                head = columns[row.column].head
                form = columns[row.column].format
    reference = format(row.value, form)
    errors = [one["error"] for one in matching if "error" in one]
    measured = [one for one in matching if "error" not in one]
    values = [one[row.column] for one in measured if one.get(row.column) is not None]
    if not values:
        verdict = FAIL if errors else NOT_MEASURED
        return BaselineVerdict(name, head, reference, errors[0] if errors else "-", None, verdict)
    # A published number may not name the library, for example: the best of several rows counts.
    value = max(values)
    change = value / row.value - 1
    verdict = PASS if change >= -tolerance else FAIL
    return BaselineVerdict(name, head, reference, format(value, form), change, verdict)


def _agrees(row: dict[str, Any], keys: dict[str, Any]) -> bool:
    # A row without a value, such as a product without a choice of library, has "" or no key.
    return all((row.get(key) or None) == (value or None) for key, value in keys.items())


def summary(verdicts: list[BaselineVerdict]) -> str:
    """Return the result of a comparison in one line."""
    counts = {
        name: sum(verdict.verdict == name for verdict in verdicts)
        for name in (PASS, FAIL, NOT_MEASURED)
    }
    total = counts[PASS] + counts[FAIL]
    if not total:
        return "FAIL: no row in common with the baseline"
    if counts[FAIL]:
        return f"FAIL: {counts[FAIL]} of {total} rows"
    return f"PASS: {total} rows"


def section(baseline: Baseline, verdicts: list[BaselineVerdict], tolerance: float) -> Section:
    """Return the section of the page that shows a comparison."""
    heads = ("Row", "Column", "Baseline", "Here", "Change", "Verdict")
    rows = tuple(
        (
            verdict.name,
            verdict.column,
            verdict.baseline,
            verdict.value,
            "-" if verdict.change is None else f"{verdict.change:+.1%}",
            verdict.verdict,
        )
        for verdict in verdicts
    )
    notes = (
        f"Baseline: {baseline.gpu}, {baseline.source}. Tolerance: {tolerance:.1%} below it.",
        "A row that was measured there and failed here is a FAIL. "
        "A row that these options do not measure is not counted.",
    )
    numbers = (False, False, True, True, True, False)
    return Section("Comparison with the baseline", "", heads, numbers, rows, notes)
