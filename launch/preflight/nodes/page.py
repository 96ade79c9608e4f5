"""HTML page of `preflight --nodes`: all nodes with reasons, the network, and every check's row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common.html import page as html
from common.html.page import Block, Section

Matrix = Mapping[tuple[str, str], float]
COLUMNS = ("verdict", "check", "value", "expected", "do")  # of a table of rows


def page(result: dict) -> str:
    """Return the page of a report (Report.as_dict)."""
    return html.render("Preflight of several nodes", sections(result))


def sections(result: dict) -> list[Section]:
    """Return the sections of the page: nodes, network, matrices, and the rows of each node."""
    nodes = list(result["rows"])
    rates = {(link["from"], link["to"]): link["gbit_s"] for link in _measured(result)}
    trips = {(link["from"], link["to"]): link["trip_s"] * 1e6 for link in _measured(result)}
    pairs = {tuple(pair["nodes"]): pair["all-reduce"] for pair in result["pairs"]}
    pairs |= {(b, a): rate for (a, b), rate in pairs.items()}
    verdicts = [_verdict(node, result) for node in nodes]
    cluster = [_cells(row) for row in result["cluster"]]
    proposed = [[name, value] for name, value in result["proposal"].items()]
    refused = [row["check"] for row in result["cluster"] if row["verdict"] == "refuse"]
    state = "bad" if result["failing"] or refused else "good"
    summary = f"{len(result['passing'])} of {len(nodes)} nodes pass"
    all_columns = range(len(COLUMNS))
    page_sections: list[Section] = [
        ("", [html.banner(state, summary, *result["failing"], *refused)]),
        ("Nodes", [html.table(("node", "verdict", "reasons"), verdicts, (0, 1, 2))]),
        ("Network", [html.table(COLUMNS, cluster, all_columns), html.table((), proposed)]),
        ("TCP in Gb/s", _matrix(nodes, rates, ".2f")),
        ("Round trip in µs", _matrix(nodes, trips, ".0f")),
        ("All-reduce in pairs in Gb/s", _matrix(nodes, pairs, ".2f")),
    ]
    for node, rows in result["rows"].items():
        cells = [_cells(row) for row in rows]
        page_sections.append((node, [html.table(COLUMNS, cells, all_columns)]))
    return page_sections


def _measured(result: dict) -> list[dict]:
    """Return the links whose rate was measured."""
    return [link for link in result["links"] if "gbit_s" in link]


def _verdict(node: str, result: dict) -> list[str]:
    """Return the node's row in the table of nodes: name, PASS or FAIL, warnings or reasons."""
    reasons = result["failing"].get(node)
    if reasons is None:
        warnings = [row["check"] for row in result["rows"][node] if row["verdict"] == "warn"]
        return [node, "PASS", f"warnings: {', '.join(warnings)}" if warnings else ""]
    return [node, "FAIL", "; ".join(reasons)]


def _cells(row: dict) -> list[str]:
    return [row[name] for name in COLUMNS]


def _matrix(nodes: Sequence[str], values: Matrix, form: str) -> list[Block]:
    """Return the table of `values` by (row, column), with a dash where nothing was measured."""
    shown = [node for node in nodes if any(node in pair for pair in values)]
    rows = []
    for start in shown:
        cells = [format(values[start, to], form) if (start, to) in values else "-" for to in shown]
        rows.append([start, *cells])
    return [html.table(("from \\ to", *shown), rows)]
