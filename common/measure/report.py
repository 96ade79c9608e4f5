"""table.md and page.html of one result, or of several of the same measurement.

Standard library only, except for the page, which needs jinja2.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import text_tables
from common.errors import PreflightError, write_text
from common.html import page
from common.html.page import Block
from common.measure import charts, published
from common.measure.tables import Column, Plot, Section, Table

MAX_BARS = 20  # a comparison with more rows has no plot


# --- one result -----------------------------------------------------------------------------------

# Keys of machine and versions -> their names on a page. In other keys, _ becomes a space.
FACTS = {
    "started": "Date",
    "command": "Command",
    "gpu": "GPU",
    "kind": "GPU kind",
    "gpus": "GPUs",
    "uuid": "GPU UUID",
    "gpu_memory_gib": "GPU memory, GiB",
    "peak_tflops_16_bits": "Dense peak, BF16 and FP16, TFLOP/s",
    "peak_tflops_fp8": "Dense peak, FP8, TFLOP/s",
    "power_limit_w": "Power limit, W",
    "vboost": "Boost slider (vboost)",
    "power_profiles": "Power profiles",
    "cpu": "CPU",
    "cpu_sockets": "CPU sockets",
    "cpu_cores_per_socket": "CPU cores per socket",
    "host_memory": "Host memory",
    "os": "Operating system",
    "threads": "Threads",
    "commit": "Commit",
    "driver": "Driver",
    "python": "Python",
    "cuda": "CUDA",
    "rocm": "ROCm",
    "nccl": "NCCL",
    "status": "Status",
    "peak": "Dense peak",
}


def title(what: str, data: dict[str, Any]) -> str:
    """Return the title of a page: measurement, machine and, if it is known, the date."""
    day = f" · {date(data)}" if "started" in data else ""
    return f"{what} · {machine_name(data)}{day}"


def machine_name(data: dict[str, Any]) -> str:
    return "CPU" if data.get("device") == "cpu" else data["machine"].get("gpu", "unknown GPU")


def date(data: dict[str, Any]) -> str:
    """Return the date on which a measurement started, in UTC, such as 2026-11-26."""
    return time.strftime("%Y-%m-%d", time.gmtime(data["started"]))


def date_and_time(data: dict[str, Any]) -> str:
    """Return when a measurement started, in UTC, such as 2026-11-26 14:03 UTC."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(data["started"]))


def profiled(profile: dict[str, Any]) -> str:
    """Return the line on what a profile describes. `profile`: has the facts of `facts_of`."""
    return (
        f"{profile['benchmark']} {profile['config']} {profile['precision']}, "
        f"{profile['layers']} layers, rank 0 of {profile['world_size']} on {profile['device']}, "
        f"torch {profile['torch']}, {profile['steps']} steps"
    )


def profile_facts(profile: dict[str, Any]) -> Section:
    """Return the section about the run of a profile."""
    rows = (
        ("Date", date_and_time(profile)),
        ("Command", profile["command"]),
        ("Machine", profile["device"]),
        ("Benchmark", f"{profile['benchmark']}, {profile['layers']} layers"),
        ("Config", f"{profile['config']}, {profile['precision']}"),
        ("Profiled", f"{profile['steps']} steps of rank 0 of {profile['world_size']}"),
        ("Tokens per step and rank", f"{profile['tokens_per_step_per_rank']:,}"),
        ("Commit", profile["commit"]),
        ("torch", profile["torch"]),
    )
    return Section("Machine and software", "", ("", ""), (False, False), rows)


def gpu_kind(data: dict[str, Any]) -> str:
    """Return the GPU kind that was measured, "" for a CPU."""
    return data["machine"].get("kind", "")


def sections(data: dict[str, Any]) -> list[Section]:
    """Return the sections of a result that `result.read` returned.

    They are machine and software, each measured table, and the published tables of the same GPU.
    """
    return [
        facts_section([("", data)]),
        *measured_sections(data),
        *published_sections(data["tables"], {gpu_kind(data)}),
    ]


def published_sections(tables: Iterable[Table], gpus: set[str]) -> list[Section]:
    """Return the published tables that `tables` name, each once, with the rows of `gpus`.

    Tables without such rows are left out.
    """
    names: dict[str, None] = {}
    for table in tables:
        names |= dict.fromkeys(wanted.table for wanted in table.published)
    sections = [published_section(name, gpus) for name in names]
    return [section for section in sections if section.rows]


def facts_section(results: list[tuple[str, dict[str, Any]]]) -> Section:
    """Return a section with a row for each fact and a column for each (label, result)."""
    columns = [facts_of(data) for _, data in results]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = tuple(
        (
            FACTS.get(name, name.replace("_", " ")),
            *(column.get(name, "-") for column in columns),
        )
        for name in names
    )
    heads = ("", *(label for label, _ in results))
    return Section("Machine and software", "", heads, (False,) * len(heads), rows)


def facts_of(data: dict[str, Any]) -> dict[str, str]:
    """Return date, command, machine and versions of a result, name -> text."""
    known: dict[str, Any] = {}
    if "started" in data:
        known["started"] = date_and_time(data)
    known |= {"command": data.get("command", "-"), **data["machine"], **data["versions"]}
    if data.get("status") != "finished":
        known["status"] = "the measurement did not finish: rows may be missing"
    if gpu_kind(data) == "unknown":
        known["peak"] = "unknown for this GPU: there are no percentages of a peak"
    return {name: str(value) for name, value in known.items()}


def rows_of(table: Table, data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a table in its order. In a sorted table, failed rows are last."""
    rows = [row for row in data["rows"] if row.get("table") == table.name]
    if table.sort:
        rows.sort(key=lambda row: -(row.get(table.sort) or 0.0))
    return rows


def measured_sections(data: dict[str, Any]) -> list[Section]:
    """Return a section for each table of a result that has rows."""
    sections = []
    for table in data["tables"]:
        rows = rows_of(table, data)
        if rows:
            sections.append(_measured_section(table, rows, data))
    return sections


def _measured_section(table: Table, rows: list[dict[str, Any]], data: dict[str, Any]) -> Section:
    """Return the section of a table with these rows. In a failed row, the error is the value."""
    parts: list[tuple[str, bool, list[str]]] = []  # head, whether the cells are numbers, cells
    for column in table.columns:
        cells = []
        for row in rows:
            error = row.get("error") if column.key == table.value else None
            cells.append(error or column.text(row))
        parts.append((column.head, bool(column.format), cells))
        parts += published_columns(column, table, rows, gpu_kind(data))
    drawn: list[Block] = []
    for plot in table.plots:
        drawn += charts_of(plot, table, rows, data["notes"])
    heads, numbers, columns = zip(*parts, strict=True)
    return Section(
        table.title,
        "measured here",
        heads,
        numbers,
        tuple(zip(*columns, strict=True)),
        table.formulas,
        tuple(drawn),
    )


def published_columns(
    column: Column, table: Table, rows: list[dict[str, Any]], gpu: str
) -> list[tuple[str, bool, list[str]]]:
    """Return the columns to the right of `column`, with the values published for `gpu`.

    They appear beside the column with the same key or, if there is none, beside the column of the
    table's value.
    """
    parts = []
    keys = {own.key for own in table.columns}
    for wanted in table.published:
        beside_key = wanted.value if wanted.value in keys else table.value
        if not wanted.match or column.key != beside_key:
            continue
        cells = [published.values_text(row, wanted, gpu) for row in rows]
        if set(cells) != {"-"}:
            head = published.tables()[wanted.table].column(wanted.value).head
            parts.append((f"{head}, published", False, cells))
    return parts


def charts_of(
    plot: Plot, table: Table, rows: Iterable[dict[str, Any]], notes: dict[str, Any]
) -> list[Block]:
    """Return the blocks that show `plot`, [] if no row has all of its values."""
    columns = {column.key: column for column in table.columns}
    names = plot.x.split(", ")
    points = []
    for row in rows:
        if not all(_has(row, key) for key in (plot.y, *names)):
            continue
        x = row[names[0]]
        if len(names) > 1:
            x = ", ".join(columns[key].text(row) for key in names)
        points.append((x, row[plot.y], str(row.get(plot.by, ""))))
    if not points:
        return []
    labels = (columns[names[0]].head, columns[plot.y].head)
    return charts.blocks(plot, labels, points, notes.get("roofline", {}))


def _has(row: dict[str, Any], key: str) -> bool:
    return row.get(key) not in (None, "")


def published_section(name: str, gpus: set[str]) -> Section:
    """Return the section of the published table `name`, with the rows of `gpus`."""
    table = published.tables()[name]
    rows = []
    for row in table.rows:
        if row["gpu"] in gpus:
            rows.append(tuple(column.text(row) for column in table.columns))
    numbers = tuple(bool(column.format) for column in table.columns)
    return Section(
        table.title,
        f"published: {table.source}",
        tuple(column.head for column in table.columns),
        numbers,
        tuple(rows),
        table.notes,
    )


# --- several results ------------------------------------------------------------------------------


def comparison_sections(results: list[tuple[str, dict[str, Any]]]) -> list[Section]:
    """Return the sections that compare results of the same measurement, given as (label, result).

    For each combination of a table's `keys`, they show the `value` in each result, and its ratio to
    that in the first result.
    """
    sections = [facts_section(results)]
    labels = [label for label, _ in results]
    tables = {table.name: table for _, data in results for table in data["tables"]}
    for table in tables.values():
        keyed = [_by_keys(table, data) for _, data in results]
        keys: dict[tuple, None] = {}
        for rows in keyed:
            keys |= dict.fromkeys(rows)
        if keys:
            sections.append(_side_by_side(table, labels, keyed, list(keys)))
    gpus = {gpu_kind(data) for _, data in results}
    return sections + published_sections(tables.values(), gpus)


def _by_keys(table: Table, data: dict[str, Any]) -> dict[tuple, dict]:
    """Return values of the table's keys -> row."""
    return {tuple(row.get(key) for key in table.keys): row for row in rows_of(table, data)}


def _side_by_side(
    table: Table, labels: list[str], keyed: list[dict[tuple, dict]], keys: list[tuple]
) -> Section:
    """Return the section that compares one table of several results.

    `labels`: names of the results. `keyed`: the rows of each result by their keys. `keys`: keys of
    the rows to show.
    """
    by_key = {column.key: column for column in table.columns}
    named = [by_key[key] for key in table.keys]
    value = by_key[table.value]
    ratio = Column("ratio", "ratio", "", ".3f")
    heads = [column.head for column in named] + [f"{label}: {value.head}" for label in labels]
    heads += [f"{label} / {labels[0]}" for label in labels[1:]]
    cells = []
    for key in keys:
        matching = [rows.get(key, {}) for rows in keyed]
        own_key = dict(zip(table.keys, key, strict=True))
        line = [column.text(own_key) for column in named]
        line += [row["error"] if "error" in row else value.text(row) for row in matching]
        first = matching[0].get(table.value)
        for row in matching[1:]:
            has_both = first and row.get(table.value)
            line.append(ratio.text({"ratio": row[table.value] / first} if has_both else {}))
        cells.append(tuple(line))
    points = []
    for label, rows in zip(labels, keyed, strict=True):
        for key in keys:
            measured_value = rows.get(key, {}).get(table.value)
            if measured_value is not None:
                points.append((" ".join(map(str, key)), measured_value, label))
    drawn: tuple[Block, ...] = ()
    if points and len(keys) <= MAX_BARS:
        drawn = (page.bars(value.head, points),)
    numbers = tuple(bool(column.format) for column in named) + (True,) * (len(heads) - len(named))
    return Section(
        table.title, "measured here", tuple(heads), numbers, tuple(cells), table.formulas, drawn
    )


# --- files ----------------------------------------------------------------------------------------


def write(folder: Path, title: str, sections: list[Section]) -> None:
    """Write table.md and page.html into `folder`, and print where they are.

    page.html is written only if jinja2 is installed. Raises StorageError.
    """
    write_text(folder / "table.md", markdown(title, sections))
    try:
        html = page.render(title, [(section.title, _blocks(section)) for section in sections])
    except PreflightError:
        print(
            f"result: {folder}, table.md. There is no page, because jinja2 is missing: "
            f"install it and run throughput compare {folder}"
        )
        return
    write_text(folder / "page.html", html)
    print(f"result: {folder}, table.md, page.html")


def _blocks(section: Section) -> list[Block]:
    if section.tiles:
        return [{"tiles": section.rows}, {"notes": section.notes}]
    text_columns = [column for column, number in enumerate(section.numbers) if not number]
    heads = section.heads if any(section.heads) else ()
    return [
        {"notes": [section.mark] if section.mark else []},
        page.table(heads, section.rows, text_columns),
        {"notes": section.notes},
        *section.charts,
    ]


def markdown(title: str, sections: list[Section]) -> str:
    """Return the sections as Markdown, for table.md."""
    parts = [f"# {title}\n"]
    for section in sections:
        parts.append(f"## {section.title}\n")
        if section.mark:
            parts.append(f"{section.mark[:1].upper()}{section.mark[1:]}.\n")
        alignment = "".join(">" if number else "<" for number in section.numbers)
        parts.append(text_tables.markdown(section.heads, section.rows, alignment))
        parts += [f"{note}\n" for note in section.notes]
    return "\n".join(parts)


def with_prefix(sections: list[Section], what: str) -> list[Section]:
    """Return the sections with `what` before each title, for a page with several measurements."""
    return [replace(section, title=f"{what}: {section.title}") for section in sections]
