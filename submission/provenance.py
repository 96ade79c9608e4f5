"""Provenance of runs on a page: the facts that differ among them, the equal facts, and anomalies.

The facts come from the log, the self-test, versions.json and config.toml.
"""

from __future__ import annotations

import json
from collections import Counter

from common import engines
from common.html.page import Block, Section, table
from submission.log_rules import PRECISION_KEYS
from submission.run import Run

# Facts that the page shows. The reader has to unfold the others.
SHOWN_KEYS = (
    "submission_platform",
    "config_filename",
    "commit",
    "seed",
    "torch",
    "driver",
    "engines",
    "variables",
    "system_tuning",
)
# Keys of the log that are facts.
LOG_KEYS = (
    "submission_org",
    "submission_platform",
    "submission_division",
    "submission_status",
    "config_filename",
    "global_batch_size",
    "micro_batch_size",
    "gradient_accumulation_steps",
    "context_parallelism",
    "opt_base_learning_rate",
    *PRECISION_KEYS,
)
Labeled = tuple[str, Run]  # label on a page of several runs ("" for one run), run


def compared_facts(
    runs: list[Labeled], ask_all: bool = True
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return the facts that differ among the runs, and the facts that are equal, as (name, text).

    `ask_all`: whether a missing fact counts as a difference. If not, a run without the fact is left
    out of the comparison, because it may have ended before the fact was logged.
    """
    facts = [(label, _facts(run, len(runs) == 1, ask_all)) for label, run in runs]
    keys: dict[str, None] = {}
    for _, of_run in facts:
        keys |= dict.fromkeys(of_run)
    same = []
    differing = []
    for key in keys:
        labels_of_value: dict[str, list[str]] = {}
        for label, of_run in facts:
            if ask_all or key in of_run:
                labels_of_value.setdefault(of_run.get(key, "-"), []).append(label)
        if len(labels_of_value) == 1:
            same.append((key, next(iter(labels_of_value))))
            continue
        lines = []
        for value, labels in labels_of_value.items():
            names = ", ".join(labels).replace(", attempt ", ", ")
            lines.append(f"{names}: {value}")
        differing.append((key, "\n".join(lines)))
    return differing, same


def sections(runs: list[Labeled], ask_all: bool = True) -> list[Section]:
    """Return three sections: the facts that differ among the runs, equal facts, and notes.

    `ask_all`: as in `compared_facts`.
    """
    differing, same = compared_facts(runs, ask_all)
    config = {"text": runs[0][1].config if len(runs) == 1 else "", "title": "Config, as resolved"}
    notes = []
    for label, run in runs:
        notes += [f"{label} {note}".strip() for note in run.notes]
    return [
        ("What differs", [table((), differing)]),
        ("Provenance", [*_folded(same), config]),
        ("Anomalies", [{"notes": notes}]),
    ]


def _folded(facts: list[tuple[str, str]]) -> list[Block]:
    """Return a table of the SHOWN_KEYS facts, in that order, and a folded table of the others."""
    named = dict(facts)
    important = [(key, named[key]) for key in SHOWN_KEYS if key in named]
    others = [(key, value) for key, value in facts if key not in SHOWN_KEYS]
    return [table((), important), table((), others, title=f"{len(others)} more")]


def _facts(run: Run, alone: bool, with_seed: bool) -> dict[str, str]:
    """Return the facts in the log, the self-test and versions.json.

    `alone`: whether the page is about this run only. Otherwise the keys of config.toml are added,
    so that they are compared. `with_seed`: whether the seed is a fact, which differs in a series.
    """
    facts = {}
    for key in (*LOG_KEYS, "seed") if with_seed else LOG_KEYS:
        value = run.log.value(key)
        if value is not None:
            facts[key] = value
    facts |= run.versions
    if torch := run.versions.get("packages", {}).get("torch"):
        facts["torch"] = torch
    if run.engines:
        facts["engines"] = run.engines
    if not alone:
        facts |= run.settings
        # The engines are compared: a series' first run chooses those that variables pin later.
        pins = engines.VARIABLES.values()
        facts["variables"] = {k: v for k, v in run.variables.items() if k not in pins} or None
    return {str(key): _plain(value) for key, value in facts.items() if value is not None}


def _plain(value: object) -> str:
    """Return a value of JSON or TOML as one line. Equal names in a list are counted."""
    if isinstance(value, str):
        return value or "none"
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        names = []
        for name, count in Counter(value).items():
            names.append(f"{count} x {name}" if count > 1 else name)
        return ", ".join(names) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    return json.dumps(value, default=str)
