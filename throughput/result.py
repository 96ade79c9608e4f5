"""The result of one measurement: a directory with result.json, table.md and page.html.

result.json is saved after every row, and the other two are made from it. A measurement that fails
adds failure.json (kind, exit_code, what, why, do). The keys of result.json:

- `what`: name of the measurement; `started`: Unix time
- `device`, `command`, `machine`, `versions`
- `status`: "running", then "finished"
- `tables`: declarations of the tables (common/measure/tables.py)
- `notes`: name -> value, for example the roofs of a plot
- `rows`

A row is a flat object: "table", "source" (always "measured"), the keys of the table's columns, and
"ms", "ms_p10", "ms_p90" and "samples" if something was timed. A failed row has "error".
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import ConfigError, RunError, StorageError
from common.estimate.mfu import peak_tflops
from common.measure import report
from common.measure.files import read_json, write_json
from common.measure.tables import Table
from common.model.shapes import TokenFlops
from common.paths import results_folder
from launch import run_directory
from throughput.memory import OUT_OF_MEMORY, ran_out_of_memory
from throughput.timing import spread

NAME = "result.json"
FAILURE = "failure.json"


class TimedRow(NamedTuple):
    """Values of a row, and the times that were measured for it."""

    values: dict[str, Any]  # by key of the table's columns
    samples_ms: list[float]


def default_directory(what: str) -> Path:
    """Create a directory LOGDIR/throughput/<what>-<date>. LOGDIR defaults to `results`.

    Raises StorageError if it cannot be created.
    """
    log_dir = results_folder(os.environ)
    return run_directory.create_new(log_dir / "throughput" / f"{what}-{run_directory.date()}")


class Result:
    """A result that is saved after every row.

    `what`: name of the measurement. `folder`: directory of the files. `device`: "cuda" or "cpu".
    `machine` and `versions`: from throughput/machine.py. The constructor raises ConfigError if
    `folder` contains files.
    """

    def __init__(
        self,
        what: str,
        tables: tuple[Table, ...],
        folder: Path,
        device: str,
        machine: dict[str, Any],
        versions: dict[str, Any],
    ):
        self.folder = folder
        self.device = device
        self.tables = {table.name: table for table in tables}
        command = shlex.join(["python3", "-m", "throughput", *sys.argv[1:]])
        self.data: dict[str, Any] = {
            "what": what,
            "status": "running",
            "started": time.time(),
            "device": device,
            "command": command,
            "machine": machine,
            "versions": versions,
            "tables": [table.as_dict() for table in tables],
            "notes": {},
            "rows": [],
        }
        claim(folder)
        self._write()

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.data["rows"]

    def percent(
        self, tflops: float, precision: str, flops: TokenFlops | None = None
    ) -> float | None:
        """Return TFLOP/s of one GPU as a percentage of its dense peak.

        `precision`: "bf16", "fp16" or "fp8", of all products, or with `flops` of the linear layers.
        Return None for other precisions, for a GPU without a known peak, and on a CPU.
        """
        keys = {
            "bf16": "peak_tflops_16_bits",
            "fp16": "peak_tflops_16_bits",
            "fp8": "peak_tflops_fp8",
        }
        peak = self.data["machine"].get(keys.get(precision))
        if peak and flops:
            peak = peak_tflops(flops, peak, self.data["machine"][keys["bf16"]])
        return 100 * tflops / peak if peak else None

    def add(self, row: dict[str, Any], samples_ms: list[float] | None = None) -> None:
        """Append `row`, print it as one line, and save.

        `row`: a flat dict with "table" (default: the first table). `samples_ms`: times, from which
        "ms", "ms_p10", "ms_p90" and "samples" are computed.
        """
        row = {"table": next(iter(self.tables)), "source": "measured"} | row
        if samples_ms:
            row |= spread(samples_ms)
        self.rows.append(row)
        self._write()
        print(line(row, self.tables[row["table"]]), flush=True)

    def attempt(self, row: dict[str, Any], work: Callable[[], TimedRow]) -> bool:
        """Add `row` with the values of `work`, or with its error. Return whether it succeeded.

        The measurement continues after a failure, such as out of memory or a product that the
        device or torch does not support. Any other RunError of `work` is raised, because its text
        is for the user.
        """
        try:
            timed = work()
        except Exception as error:  # libraries and drivers raise exceptions of any class
            if isinstance(error, RunError) and not ran_out_of_memory(error):
                raise
            self.add(row | {"error": why_failed(error)})
            return False
        self.add(row | timed.values, timed.samples_ms)
        return True

    def note(self, name: str, value: Any) -> None:
        self.data["notes"][name] = value

    def finish(self) -> None:
        """Write table.md and page.html, and print where they are.

        Raises RunError if every row failed.
        """
        self.data["status"] = "finished"
        self._write()
        report.write(
            self.folder,
            report.title(self.data["what"], self.data),
            report.sections(read(self.folder)),
        )
        if self.rows and all("error" in row for row in self.rows):
            raise RunError(
                "nothing was measured",
                f"each of the {len(self.rows)} rows failed",
                f"see {self.folder / NAME}",
            )

    def fail(self, error: RunError) -> None:
        """Write failure.json, the error that ended the measurement, if the folder can be written.

        Without rows, also remove result.json, so that the folder can be named again.
        """
        with contextlib.suppress(OSError, StorageError):
            if not self.rows:
                (self.folder / NAME).unlink(missing_ok=True)
            write_json(self.folder / FAILURE, error.as_dict())

    def _write(self) -> None:
        write_json(self.folder / NAME, self.data)


def why_failed(error: Exception) -> str:
    """Return the error of a row as one line."""
    if ran_out_of_memory(error):
        return OUT_OF_MEMORY
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"[:200]


def line(row: dict[str, Any], table: Table) -> str:
    """Return `row` as one line of progress."""
    cells = []
    for column in table.columns:
        if row.get(column.key) in (None, ""):
            continue
        text = column.text(row)
        if column.format:
            text = f"{column.title} {text} {column.unit}".rstrip()
        cells.append(text)
    if "error" in row:
        cells.append(row["error"])
    return ", ".join(cells)


def claim(folder: Path) -> None:
    """Create `folder`, and remove the failure.json of an earlier attempt.

    Raises ConfigError if it contains other files, StorageError if it cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not any(path.name != FAILURE for path in folder.iterdir()):
            (folder / FAILURE).unlink(missing_ok=True)
            return
    except OSError as error:
        raise StorageError(
            f"cannot write to {folder}",
            error.strerror or str(error),
            "name another directory with --out",
        ) from None
    raise ConfigError(
        f"{folder} contains files",
        "a result is never overwritten",
        "name a new directory with --out",
    )


def read_failure(folder: Path) -> str:
    """Return the error of failure.json as one line, or "" if there is none."""
    try:
        failure = json.loads((folder / FAILURE).read_text())
        parts = [str(failure["what"]), str(failure["why"])]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return ": ".join(part for part in parts if part)


def read(folder: Path) -> dict[str, Any]:
    """Return the content of result.json in `folder`, with its "tables" as objects of class Table.

    Raises DataError if the file is not a result.
    """
    path = folder / NAME

    def parse(data: dict[str, Any]) -> dict[str, Any]:
        data["tables"] = [Table.from_dict(table) for table in data["tables"]]
        if not {"what", "machine", "versions", "rows", "notes"} <= data.keys():
            raise KeyError("what, machine, versions, rows or notes")
        return data

    return read_json(
        path,
        parse,
        f"{path} is not the result of a measurement",
        "name the directory that a measurement printed at its end",
    )
