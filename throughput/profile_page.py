"""`python -m throughput.profile_page DIR`: DIR/profile.html from DIR/profile.json, and the same tables for a terminal.

The page is self-contained: no script, nothing from outside. No torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from html import escape
from pathlib import Path

from common.errors import DataError, RunError, StorageError

TABLE = "profile.json"
# Key of a row -> format.
COLUMNS = {"ms": ",.3f", "share": ".1%", "us_per_token": ".3f", "kernel_ms": ",.3f", "hidden_ms": ",.3f"}
COLUMNS |= {"launches": ",.0f", "tflops": ".4g"}
PARTS = {"classes": "kernel class", "products": "matrix product, M x N x K", "others": "name in class other"}
CLOCK_AGREES = 0.01  # the trace's step against the clock's
OTHERS_PRINTED = 3
STYLE = """:root { color-scheme: light dark } body { font: 15px/1.5 system-ui; max-width: 1100px; margin: auto; padding: 16px }
table { border-collapse: collapse; width: 100%; margin: 24px 0 } td, th { text-align: right; padding: 3px 8px; white-space: nowrap }
td:first-child, th:first-child { text-align: left; white-space: normal; overflow-wrap: anywhere } tr { border-bottom: 1px solid #8886 }"""


def heading(profile: dict) -> list[str]:
    """What was profiled, its step, and a NOTE if trace and clock disagree."""
    over_clock, cost = profile["window_ms"] / profile["clock_ms"] - 1, profile["clock_ms"] / profile["bench_ms"] - 1
    what = "ops of the main thread, each without the ops it calls" if profile["device"] == "cpu" else "kernels"
    lines = [
        f"PROFILE {profile['benchmark']} {profile['config']} {profile['precision']}, {profile['layers']} layers, rank 0 of "
        f"{profile['world_size']} on {profile['device']}, torch {profile['torch']}, {profile['steps']} steps of "
        f"{profile['tokens_per_step_per_rank']:,} tokens; {what}",
        f"step {profile['window_ms']:.2f} ms in the trace, {profile['clock_ms']:.2f} by the clock ({over_clock:+.2%}), "
        f"{profile['bench_ms']:.2f} without profiler (which costs {cost:+.1%})",
    ]
    note = f"NOTE: trace and clock differ by more than {CLOCK_AGREES:.0%}; the table is of the trace's step"
    return [*lines, note] if abs(over_clock) > CLOCK_AGREES else lines


def cells(row: dict) -> list[str]:
    return [row["name"], *("" if row[key] is None else format(row[key], form) for key, form in COLUMNS.items())]


def text(profile: dict) -> str:
    """For a terminal."""
    lines = heading(profile)
    for part, title in PARTS.items():
        rows = profile[part][:OTHERS_PRINTED] if part == "others" else profile[part]
        width = min(60, max([len(title), *(len(row["name"]) for row in rows)]))
        table = [[title, *COLUMNS], *map(cells, rows)] if rows else []
        lines += ["", *(f"{name[:width]:{width}}" + "".join(f"{cell:>13}" for cell in rest) for name, *rest in table)]
    return "\n".join(lines)


def render(profile: dict) -> str:
    """The page. The background of a row's name is a bar: the row's share of the step."""
    title = escape(f"{profile['benchmark']} {profile['config']}: profile")
    body = [f"<h1>{title}</h1>", *(f"<p>{escape(line)}</p>" for line in heading(profile))]
    for part, name in PARTS.items():
        rows = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in (name, *COLUMNS)) + "</tr>"]
        for row in profile[part]:
            bar = f"background: linear-gradient(90deg, #4a90d966 {row['share']:.2%}, transparent 0)"
            first, *rest = map(escape, cells(row))
            rows.append(f'<tr><td style="{bar}">{first}</td>' + "".join(f"<td>{cell}</td>" for cell in rest) + "</tr>")
        body.append(f"<table>{''.join(rows)}</table>")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title><style>{STYLE}</style>'
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(body)}</body></html>\n"


def write(path: Path, content: str) -> Path:
    """Raises StorageError."""
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {path}", str(error), "free space, or make the directory writable") from error
    return path


def write_page(folder: Path) -> Path:
    """Write profile.html beside profile.json. Raises DataError, StorageError."""
    try:
        page = render(json.loads((folder / TABLE).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError) as error:
        why = f"{type(error).__name__}: {error}"
        raise DataError(f"cannot read {folder / TABLE}", why, "make it with ./run_and_time.sh <benchmark> profile") from None
    return write(folder / "profile.html", page)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="throughput.profile_page", description="Write profile.html beside profile.json.")
    parser.add_argument("directory", type=Path)
    try:
        print(write_page(parser.parse_args().directory))
    except RunError as error:
        print(error.lines(), file=sys.stderr)
        sys.exit(error.exit_code)
