"""The page that lists the runs in a LOGDIR, with links to their pages."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

from common.html import page
from common.html.page import Block, Link, Section
from common.terminal import plural
from submission import run_list
from submission.run_list import RunRow

NO_PAGE = "A run without a link has no page yet; ./run_and_time.sh report DIR writes it."


def run_list_page(rows: list[RunRow], folder: Path, refresh_s: float | None = None) -> str:
    """Return the page that lists `rows` as HTML text, for a file in `folder`.

    `folder`: LOGDIR or LOGDIR/<benchmark>. `refresh_s`: see `page.render`. Raises PreflightError
    without jinja2.
    """
    tiles = [("runs", f"{len(rows)}")]
    tiles += [(name, f"{count}") for name, count in run_list.counts_of(rows).items()]
    sections: list[Section] = [("", [{"tiles": tiles}])]
    for benchmark, of_benchmark in run_list.by_benchmark(rows).items():
        sections.append((benchmark, _blocks(of_benchmark, folder)))
    first = rows[0].started[:10]
    last = rows[-1].started[:10]
    dates = first if first == last else f"{first} to {last}"
    names = " and ".join(run_list.by_benchmark(rows))
    title = f"{names} · {plural(len(rows), 'run')} · {dates}"
    return page.render(title, sections, str(folder.resolve()), refresh_s)


def _blocks(rows: list[RunRow], folder: Path) -> list[Block]:
    """Return a table of `rows`, the newest first, for a page in `folder`."""
    columns = run_list.columns_of(rows)
    lines: list[list[str | Link]] = []
    for row in reversed(rows):
        _, state, *values = run_list.cells(row, columns)
        if row.reason:
            state = f"{state}: {row.reason}"
        lines.append([_link(row, folder), state, *values])
    text_columns = [number for number, column in enumerate(columns) if column.is_text]
    table = page.table([column.head for column in columns], lines, text_columns)
    missing = [NO_PAGE] if any(not row.report for row in rows) else []
    return [table, {"notes": missing}]


def _link(row: RunRow, folder: Path) -> str | Link:
    if not row.report:
        return row.run
    return Link(row.run, quote(Path(os.path.relpath(row.report, folder)).as_posix()))
