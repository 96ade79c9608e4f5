"""Comparison of a suite's rows with a baseline: an earlier suite, or published numbers.

A baseline file is JSON: "gpu" (GPU kind, or "CPU"), "source" (date and commit), and "rows". A row
has the name of a table, the values of the table's keys, a column, and the value in that column.
baselines/<GPU>.json are measurements with this package.

limits.json says how far below its baseline a row may be, whatever the GPU. "measured": limits from
repeated suites on healthy machines (tests/tools/suite_limits.py). "declared": limits of other rows.
The first entry whose keys agree with a row's counts, and TOLERANCE without one. Rows with the limit
null are shown but not judged. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common.errors import CheckFailed, listed
from common.measure import published, report
from common.measure.files import read_json, write_json
from common.measure.tables import Section, Table
from common.records.json_lines import is_number
from common.suggestions import unknown
from common.text_tables import number

TOLERANCE = 0.03  # fraction below the baseline that passes, for rows without an entry in LIMITS
BASELINES = Path(__file__).with_name("baselines")
LIMITS = Path(__file__).with_name("limits.json")
PASS = "PASS"
FAIL = "FAIL"
NOT_JUDGED = "not judged"
NOT_MEASURED = "not measured"

Results = Iterable[dict[str, Any]]  # results as `result.read` returns them
MeasuredTable = tuple[str, Table, dict[str, Any]]  # part of the suite, table, result


@dataclass(frozen=True)
class BaselineRow:
    """A value to compare with.

    `table`: name of the table. `keys`: values that identify the row. `column`: key of the column.
    """

    table: str
    keys: dict[str, Any]
    column: str
    value: float


@dataclass(frozen=True)
class Baseline:
    """Values to compare a suite with, and where they come from."""

    gpu: str  # GPU kind, or "CPU"
    source: str
    rows: tuple[BaselineRow, ...]


@dataclass(frozen=True)
class BaselineVerdict:
    """A row of the comparison, as text."""

    name: str  # table and keys
    column: str  # head of the column
    baseline: str
    value: str  # "-" if no row was measured, the error if it failed
    change: float | None  # relative to the baseline; -0.05 means 5 % below it
    verdict: str  # PASS, FAIL, NOT_JUDGED or NOT_MEASURED
    limit: float | None  # fraction below the baseline that passes; None: not judged
    part: str  # part of the suite that measured the row, "" if none did


# --- sources of a baseline ------------------------------------------------------------------------


def of_results(results: Results) -> Baseline:
    """Return a baseline with every measured row of `results`, which are of one machine."""
    rows = []
    gpu = ""
    source = ""
    for data in results:
        gpu = report.gpu_kind(data) or "CPU"
        source = f"{report.date(data)}, commit {data['versions'].get('commit', 'unknown')}"
        if "uuid" in data["machine"]:
            source += f", on {data['machine']['uuid']}"
        for table in data["tables"]:
            rows += _rows_of(table, data)
    return Baseline(gpu, f"measured {source}", tuple(rows))


def _rows_of(table: Table, data: dict[str, Any]) -> list[BaselineRow]:
    if not table.larger_is_better:
        return []
    rows = []
    for row in report.rows_of(table, data):
        value = row.get(table.value)
        if value is not None and "error" not in row:
            keys = {key: row.get(key) for key in table.keys}
            rows.append(BaselineRow(table.name, keys, table.value, value))
    return rows


def of_published(gpu: str, tables: Iterable[Table]) -> Baseline:
    """Return a baseline with the published values of `gpu` for columns of `tables`."""
    rows = []
    for table in tables:
        for wanted in table.published:
            if not wanted.match or not wanted.compared:
                continue
            for row in published.tables()[wanted.table].rows:
                if row["gpu"] == gpu and row[wanted.value] is not None:
                    keys = {key: row[key] for key in wanted.match}
                    rows.append(BaselineRow(table.name, keys, wanted.value, row[wanted.value]))
    return Baseline(gpu, f"published for {gpu} (common/measure/published.json)", tuple(rows))


def find(name: str, tables: Iterable[Table]) -> Baseline:
    """Return the baseline `name`: a file, or a GPU kind.

    For a GPU kind it is baselines/<GPU>.json if that exists, otherwise the published numbers.
    `tables`: the tables of all measurements. Raises ConfigError for an unknown name, DataError for
    a file that is not a baseline.
    """
    path = Path(name)
    if path.is_file():
        return read(path)
    measured = {file.stem.lower(): file for file in BASELINES.glob("*.json")}
    if name.lower() in measured:
        return read(measured[name.lower()])
    tables = list(tables)
    known = {}
    for gpu in sorted(published.gpus()):
        baseline = of_published(gpu, tables)
        if baseline.rows:
            known[gpu.lower()] = baseline
    if name.lower() in known:
        return known[name.lower()]
    names = [file.stem for file in measured.values()]
    names += [baseline.gpu for baseline in known.values()]
    do = "choose one of them, or a file of --save-baseline"
    raise unknown(f"unknown baseline --against {name}", name, sorted(names), do)


def read(path: Path) -> Baseline:
    """Return the baseline in the file at `path`. Raises DataError if it is not a baseline."""

    def parse(data: dict[str, Any]) -> Baseline:
        rows = tuple(BaselineRow(**row) for row in data["rows"])
        for row in rows:
            if not isinstance(row.keys, dict):
                raise TypeError(f"keys is {row.keys!r}, not an object")
            if not is_number(row.value) or row.value <= 0:
                raise ValueError(f"value is {row.value!r}, not a number above 0")
        return Baseline(str(data["gpu"]), str(data["source"]), rows)

    return read_json(
        path,
        parse,
        f"{path} is not a baseline",
        "save one with ./run_and_time.sh throughput suite --save-baseline FILE",
    )


def write(path: Path, baseline: Baseline) -> None:
    """Write `baseline` to the file at `path`. Raises StorageError."""
    write_json(path, asdict(baseline))


# --- comparison -----------------------------------------------------------------------------------


def read_limits() -> list[dict[str, Any]]:
    """Return the entries of limits.json: table, keys and limit. The first that agrees counts."""
    content = json.loads(LIMITS.read_text())
    return [*content["measured"], *content["declared"]]


def limit_of(row: BaselineRow, entries: list[dict[str, Any]]) -> float | None:
    """Return the fraction below the baseline that passes, None if `row` is not judged."""
    for entry in entries:
        if entry["table"] == row.table and agrees(row.keys, entry["keys"]):
            return entry["limit"]
    return TOLERANCE


def compare(
    baseline: Baseline, results: dict[str, dict[str, Any]], tolerance: float | None
) -> list[BaselineVerdict]:
    """Return one verdict for each row of the baseline, failures first.

    `results`: part of the suite -> result. A row fails if it is further below the baseline than
    its limit, or if its measurement failed. `tolerance` replaces the limits of judged rows. A row
    that this suite does not measure is NOT_MEASURED, which is not a failure.
    """
    tables = [(part, table, data) for part, data in results.items() for table in data["tables"]]
    entries = read_limits()
    verdicts = []
    for row in baseline.rows:
        limit = limit_of(row, entries)
        if limit is not None and tolerance is not None:
            limit = tolerance
        verdicts.append(_verdict(row, tables, limit))
    order = (FAIL, PASS, NOT_JUDGED, NOT_MEASURED)
    return sorted(verdicts, key=lambda verdict: order.index(verdict.verdict))


def _verdict(row: BaselineRow, tables: list[MeasuredTable], limit: float | None) -> BaselineVerdict:
    """Compare one row of a baseline with the measured `tables`. `limit`: from `limit_of`."""
    keys = ", ".join(str(value) for value in row.keys.values() if value)
    errors = []
    values = []
    head = row.column
    form = ",.4g"
    measured_by = ""
    for part, table, data in tables:
        if table.name != row.table:
            continue
        for column in table.columns:
            if column.key == row.column:
                head = column.head
                form = column.format
        for measured in report.rows_of(table, data):
            if not agrees(measured, row.keys):
                continue
            measured_by = measured_by or part
            if "error" in measured:
                errors.append(measured["error"])
            elif measured.get(row.column) is not None:
                values.append(measured[row.column])
    verdict_of = partial(
        BaselineVerdict,
        f"{row.table}: {keys}",
        head,
        number(row.value, form),
        limit=limit,
        part=measured_by,
    )
    if not values:
        verdict = FAIL if errors else NOT_MEASURED
        return verdict_of(value=errors[0] if errors else "-", change=None, verdict=verdict)
    # Several rows may match, for example if a part was measured again, or if a published number
    # does not name the library. The best one counts.
    value = max(values)
    change = value / row.value - 1
    verdict = NOT_JUDGED
    if limit is not None:
        verdict = PASS if change >= -limit else FAIL
    return verdict_of(value=number(value, form), change=change, verdict=verdict)


def agrees(row: dict[str, Any], keys: dict[str, Any]) -> bool:
    """Return whether `row` has the values `keys`. A missing key, None and "" are equal."""
    return all((row.get(key) or None) == (value or None) for key, value in keys.items())


def summary(verdicts: list[BaselineVerdict]) -> str:
    """Return the result of a comparison as one line, which begins with PASS or FAIL."""
    counts = {
        name: sum(verdict.verdict == name for verdict in verdicts)
        for name in (PASS, FAIL, NOT_JUDGED)
    }
    total = counts[PASS] + counts[FAIL]
    if not total:
        return "FAIL: no judged row in common with the baseline"
    others = f", {counts[NOT_JUDGED]} more not judged" if counts[NOT_JUDGED] else ""
    if counts[FAIL]:
        return f"FAIL: {counts[FAIL]} of {total} rows{others}"
    return f"PASS: {total} rows{others}"


def failure(baseline: Baseline, verdicts: list[BaselineVerdict], page: Path) -> CheckFailed | None:
    """Return the error that names the rows that fail, or None if the comparison is a PASS.

    `page`: path of the page with all rows.
    """
    if all(verdict.verdict in (NOT_JUDGED, NOT_MEASURED) for verdict in verdicts):
        return CheckFailed(
            f"no judged row in common with the baseline of {baseline.gpu}",
            "the options of this suite measure none of its rows that are judged",
            "measure more, without --quick or on more GPUs, or name another baseline",
        )
    failing = [_failing_row(verdict) for verdict in verdicts if verdict.verdict == FAIL]
    if not failing:
        return None
    count = "1 row is" if len(failing) == 1 else f"{len(failing)} rows are"
    return CheckFailed(
        f"{count} below the baseline of {baseline.gpu}, in two measurements",
        listed(failing),
        f"see the comparison in {page}; --tolerance accepts a larger difference",
    )


def _failing_row(verdict: BaselineVerdict) -> str:
    """Describe a row that fails, for an error."""
    if verdict.change is None:
        return f"{verdict.name} failed ({verdict.value})"
    return f"{verdict.name} has {verdict.column} {verdict.value} ({verdict.change:+.1%})"


def section(baseline: Baseline, verdicts: list[BaselineVerdict]) -> Section:
    """Return the section of the page that shows a comparison."""
    heads = ("Row", "Column", "Baseline", "Here", "Change", "Limit", "Verdict")
    rows = tuple(
        (
            verdict.name,
            verdict.column,
            verdict.baseline,
            verdict.value,
            "-" if verdict.change is None else f"{verdict.change:+.1%}",
            "-" if verdict.limit is None else f"{-verdict.limit:.1%}",
            verdict.verdict,
        )
        for verdict in verdicts
    )
    notes = (
        f"Baseline: {baseline.gpu}, {baseline.source}.",
        "A row fails if it is below its limit in two measurements, or if its measurement fails. "
        "Rows without a limit vary too much on a healthy machine to be judged. "
        "A row that this suite does not measure is not counted.",
    )
    numbers = (False, False, True, True, True, True, False)
    return Section("Comparison with the baseline", "", heads, numbers, rows, notes)
