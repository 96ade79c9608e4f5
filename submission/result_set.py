"""Rules for a result set: the files result_*.txt of one folder, as submitted.

Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from common.records.rcp import SUBMISSION_RUNS
from submission.examined import Examined
from submission.log_rules import Finding

NAME = re.compile(r"result_.*\.txt")  # the pattern of the official tools
UNREADABLE = "line_format"  # rule of lines that the official parser cannot read


def folders(logs: Iterable[Path]) -> dict[Path, list[Examined]]:
    """Return an empty list of examined logs for each folder that holds a result set."""
    return {path.parent: [] for path in logs if NAME.fullmatch(path.name)}


def findings(logs: Sequence[Examined]) -> list[Finding]:
    """Return the findings about the logs as a set: their number, and seeds.

    The seeds must be readable for the official seed checker, and no two logs may share one.
    """
    findings = []
    logs = [each for each in logs if NAME.fullmatch(each.path.name)]
    if len(logs) != SUBMISSION_RUNS:
        message = f"{len(logs)} logs; a result set has {SUBMISSION_RUNS}"
        findings.append(Finding(0, "number", message, "TR Benchmark Results"))
    first: dict[tuple[str, str, str], str] = {}
    for each in logs:
        unreadable = [finding for finding in each.verdict.complaints if finding.rule == UNREADABLE]
        if unreadable:
            line = unreadable[0].line
            message = f"{each.path.name}: the seed checker crashes at line {line}"
            findings.append(Finding(0, "seed", f"{message}: {unreadable[0].message}", "SEED"))
        for event in each.seeds:
            seed = (
                str(event.metadata.get("file")),
                str(event.metadata.get("lineno")),
                str(event.value),
            )
            other = first.setdefault(seed, each.path.name)
            if other != each.path.name:
                message = f"{other} and {each.path.name} have the same seed {event.value!r}"
                source = "SEED; TR Random numbers: the runs are independent"
                findings.append(Finding(0, "seed", message, source))
    return findings
