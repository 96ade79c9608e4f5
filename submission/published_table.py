"""`python -m submission.published_table --results DIR --round 5.1 [--out FILE]`: the rows of records/published.json from logs.

DIR has the layout of mlcommons' training_results: <org>/results/<system>/<benchmark>/result_0.txt and <org>/systems/<system>.json.
Each set of both benchmarks is scored as `score` does, and becomes one row; rows of other rounds in FILE stay. A set that cannot be
read is named on stderr, and is no row. Exit code: 0, or 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import astuple, fields, replace
from pathlib import Path

from common.errors import ConfigError, RunError, StorageError
from records.published import DATA, Published
from submission import terminal
from submission.log_rules import BENCHMARKS
from submission.series import read_series, result, ten_runs


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="submission.published_table", description="Make the table of published results from their logs.")
    parser.add_argument("--results", type=Path, required=True, metavar="DIR", help="a results repository")
    parser.add_argument("--round", required=True, metavar="R", help="such as 5.1")
    parser.add_argument("--source", default="", help="what to say of where DIR is from; default: mlcommons/training_results_vR")
    parser.add_argument("--out", type=Path, default=DATA, metavar="FILE")
    options = parser.parse_args(arguments)
    return terminal.run(lambda: write(options.out, options.round, list(rows(options.results, options.round)), options.source))


def result_sets(results: Path) -> list[Path]:
    """<submitter>/results/<system>/<benchmark> of our benchmarks below `results`. Raises ConfigError if there is none."""
    folders = sorted(path for name in BENCHMARKS for path in results.glob(f"*/results/*/{name}") if path.is_dir())
    if not folders:
        why = f"there is no <submitter>/results/<system>/<benchmark> of {', '.join(BENCHMARKS)} in it"
        raise ConfigError(f"{results}: no results", why, "name a checkout of mlcommons/training_results_v*")
    return folders


def rows(results: Path, round_: str) -> Iterator[Published]:
    """One row per set below `results`, of ten logs or fewer. Raises ConfigError if there is none."""
    for folder in result_sets(results):
        try:
            series = read_series([folder])
            ten = ten_runs(series)
        except RunError as error:
            print(f"{folder}: {error.what}: {error.why}", file=sys.stderr)
            continue
        found = replace(result(series, ten), round=round_, submitter=folder.parents[2].name, system=folder.parent.name)
        if found.batch is None or found.minutes is None:
            print(f"{folder}: no result: {ten.invalid or 'no global batch'}", file=sys.stderr)
        else:
            yield found


def write(path: Path, round_: str, found: list[Published], source: str) -> int:
    """Put `found` into the table at `path` in place of the rows of their round. Raises StorageError."""
    columns = [column.name for column in fields(Published)]
    table = json.loads(path.read_text()) if path.is_file() else {"sources": {}, "rows": []}
    table["sources"][round_] = source or f"mlcommons/training_results_v{round_}, result logs and system descriptions"
    kept = [row for row in table["rows"] if row[0] != round_]
    kept += [[float(f"{value:.7g}") if isinstance(value, float) else value for value in astuple(result)] for result in found]
    lines = ",\n  ".join(json.dumps(row) for row in sorted(kept, key=lambda row: [str(value) for value in row[:6]]))
    text = f'{{"columns": {json.dumps(columns)},\n "sources": {json.dumps(table["sources"], indent=2)},\n "rows": [\n  {lines}]}}\n'
    try:
        path.write_text(text)
    except OSError as error:
        raise StorageError(f"cannot write {path}", error.strerror or str(error), "choose another --out") from None
    return 0


if __name__ == "__main__":
    sys.exit(main())
