"""Report of `preflight --nodes`: results of all checks, its files, and its text for a terminal."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path

from common.atomic_write import write_whole
from launch.preflight.check_row import CheckRow, overall, table
from launch.preflight.nodes import page
from launch.preflight.nodes.judge import Pair


@dataclass
class Report:
    """Results of all checks. Rates are in Gb/s."""

    nodes: list[str]
    rows: dict[str, list[CheckRow]]  # node -> rows
    cluster: list[CheckRow] = field(default_factory=list)  # rows about the network
    facts: dict[str, dict] = field(default_factory=dict)  # node -> facts.read
    links: dict[Pair, dict] = field(default_factory=dict)  # (from, to) -> links.probe
    pairs: dict[Pair, float] = field(default_factory=dict)  # two nodes -> rate of their all-reduce
    proposal: dict[str, str] = field(default_factory=dict)  # variables proposed for NCCL and RCCL
    # The user's own variables of NCCL and RCCL. They take precedence over the proposal.
    nccl: dict[str, str] = field(default_factory=dict)

    def passes(self, node: str) -> bool:
        """Return whether no check of `node` refuses it."""
        return overall(self.rows[node]) != "refuse"

    @property
    def passing(self) -> list[str]:
        """The nodes that pass."""
        return [node for node in self.nodes if self.passes(node)]

    def reasons(self, node: str) -> list[str]:
        """Return why `node` fails: the rows that refuse it."""
        return [f"{row.check}: {row.value}" for row in self.refusing(node)]

    def refusing(self, node: str) -> list[CheckRow]:
        """Return the rows that refuse `node`."""
        return [row for row in self.rows[node] if row.verdict == "refuse"]

    @property
    def rates(self) -> dict[Pair, float]:
        """Rate of each measured link in Gb/s."""
        return {pair: link["gbit_s"] for pair, link in self.links.items() if "gbit_s" in link}

    def as_dict(self) -> dict:
        """Return the content of nodes.json."""
        return {
            "passing": self.passing,
            "failing": {node: self.reasons(node) for node in self.nodes if not self.passes(node)},
            "rows": {node: [asdict(row) for row in rows] for node, rows in self.rows.items()},
            "cluster": [asdict(row) for row in self.cluster],
            "links": [{"from": a, "to": b, **link} for (a, b), link in self.links.items()],
            "pairs": [{"nodes": pair, "all-reduce": rate} for pair, rate in self.pairs.items()],
            "proposal": self.proposal,
            "facts": self.facts,
        }


def write(report: Report, folder: Path) -> None:
    """Write the lists of passing and failing nodes, the page, and nodes.json. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    failing = [node for node in report.nodes if not report.passes(node)]
    passing_lines = [f"{node}\n" for node in report.passing]
    failing_lines = [f"{node}\t{'; '.join(report.reasons(node))}\n" for node in failing]
    files = {
        "passing_nodes.txt": "".join(passing_lines),
        "failing_nodes.txt": "".join(failing_lines),
        "nodes.json": json.dumps(report.as_dict(), indent=1),
        "nodes.html": page.page(report.as_dict()),
    }
    for name, content in files.items():
        write_whole(folder / name, content.encode())


def text(report: Report) -> str:
    """Return the report as text: each node with reasons, advice and warnings.

    Then follow the network's table and lines that export the proposed variables.
    """
    lines = []
    for node in report.nodes:
        lines.append(f"{'PASS' if report.passes(node) else 'FAIL'}  {node}")
        for row in report.refusing(node):
            lines.append(f"      {row.check}: {row.value}")
            if row.do:
                lines.append(f"      do: {row.do}")
        warnings = [row for row in report.rows[node] if row.verdict == "warn"]
        lines += [f"      warn: {row.check}: {row.value}" for row in warnings]
    proposed = [f"export {name}={shlex.quote(value)}" for name, value in report.proposal.items()]
    return "\n".join([*lines, "", table(report.cluster), *proposed])
