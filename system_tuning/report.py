"""What is printed: one block per knob for people, one object per knob for programs."""

from __future__ import annotations

import errno
import os
import re
import shlex
import sys
from collections import Counter
from typing import TextIO

from system_tuning.actions import Outcome
from system_tuning.files import Tree, value_of
from system_tuning.journal import Journal
from system_tuning.knobs import KNOBS, Found, Knob, Setting


def show(lines: list[str], file: TextIO | None = None) -> None:
    """Print, one line for one line: what a file or the journal holds must not move the cursor or look like a line of ours."""
    for line in lines:
        print("".join(c if c.isprintable() else repr(c)[1:-1] for c in line), file=file)


def state_of(knob: Knob, found: Found, is_wanted: bool) -> str:
    """`good`, `better` (could be), `once` (a one-shot), `left` (not asked for), `unsupported` or `problem`."""
    if found.problems:
        return "problem"
    if not found.settings:
        return "unsupported"
    if not is_wanted:
        return "left"
    if knob.one_shot:
        return "once"
    return "good" if all(setting.now == setting.want or setting.follows for setting in found.settings) else "better"


def check_lines(knob: Knob, found: Found, state: str) -> list[str]:
    """What is, what would be better, what that is worth, and the risk."""
    lines = [f"{knob.name}: {_HEADINGS[state]}"]
    lines += [f"    problem: {problem}" for problem in found.problems]
    lines += [f"    {found.missing}"] if found.missing else []
    lines += [f"    {line}" for line in _grouped(found.settings)]
    if state not in ("good", "unsupported"):
        lines += [f"    what:   {knob.what}", f"    worth:  {knob.worth}", f"    risk:   {knob.risk}", f"    source: {knob.source}"]
    return lines


_HEADINGS = {
    "good": "good as it is",
    "better": "would be better",
    "once": "done once, by apply",
    "left": "left alone unless asked for",
    "unsupported": "not supported here",
    "problem": "cannot be looked at",
}


def check_object(knob: Knob, found: Found, state: str) -> dict:
    files = [{"path": s.path, "now": s.now, "want": s.want} for s in found.settings if not s.follows]
    words = {"what": knob.what, "worth": knob.worth, "risk": knob.risk, "source": knob.source}
    return {"knob": knob.name, "state": state, "missing": found.missing, "problems": found.problems, "files": files, **words}


def _grouped(settings: list[Setting]) -> list[str]:
    """One line for all files that differ by their CPU number only."""
    groups = Counter(
        (re.sub(r"(cpu|policy)[0-9]+", r"\1*", s.path), s.now or "-", s.now if s.now == s.want else s.want, s.note)
        for s in settings
        if not s.follows
    )
    lines = []
    for (path, now, want, note), count in groups.items():
        change = now if now == want else f"{now} -> {want}"
        lines.append(f"{path}: {change}" + (f" ({count} files)" if "*" in path else "") + (f"  [{note}]" if note else ""))
    return lines


def outcome_lines(outcomes: list[Outcome]) -> list[str]:
    """Every file on its own line: a plan is exact."""
    lines = []
    for o in outcomes:
        if o.status == "unsupported":
            lines.append(f"{'not here':<10} {o.knob}: {o.why}")
            continue
        change = f"{o.before or '-'} -> {o.after}" if o.status not in ("already", "unchanged") else o.after
        lines.append(f"{_WORDS[o.status]:<10} {o.path or o.knob}" + (f": {change}" if o.path else "") + (f"  ({o.why})" if o.why else ""))
    return lines


_WORDS = {
    "planned": "would set",
    "written": "set",
    "already": "as it is",
    "follows": "saved",
    "reverted": "put back",
    "unchanged": "as it was",
    "stale": "forgotten",
    "denied": "NOT SET",
    "refused": "REFUSED",
    "failed": "FAILED",
    "foreign": "NOT OURS",
}


def counted(outcomes: list[Outcome]) -> str:
    counts = Counter(_WORDS.get(o.status, "not here") for o in outcomes)
    return ", ".join(f"{count} {word}" for word, count in counts.items()) or "nothing to do"


def hint(outcomes: list[Outcome], arguments: list[str]) -> list[str]:
    """For what was not permitted: the one command to run, or that a container is not the place."""
    if not any(o.status == "denied" for o in outcomes):
        return []
    if os.geteuid() == 0 or all(o.why == os.strerror(errno.EROFS) for o in outcomes if o.status == "denied"):
        return ["error: the files marked NOT SET are read-only here, for root too", "  do:  run it on the host, not in a container"]
    return [
        "error: without root the files marked NOT SET cannot be written",
        "  why: they are the kernel's; this program never becomes root by itself",
        f"  do:  {root_command(arguments)}",
    ]


def root_command(arguments: list[str]) -> str:
    """One line that does the same as root. -B: root must leave no bytecode in the user's folder."""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return f"cd {shlex.quote(folder)} && sudo {shlex.join([sys.executable or 'python3', '-B', '-m', 'system_tuning', *arguments])}"


def status_lines(journal: Journal, tree: Tree) -> list[str]:
    """The journal: what is open, with the value now."""
    lines = [f"journal: {journal.path} ({journal.num_lines} lines)"]
    if journal.cut:
        lines.append("its last line is cut and ignored: the process died while writing it, before the write to the system that it was for")
    for entry in journal.entries.values():
        try:
            now = value_of(tree.read(entry.path))
        except Exception as error:  # whatever is wrong with one file, the others are listed
            now = f"unreadable ({error})"
        age = "" if entry.boot == journal.boot else "  (from before the last boot, which has put it back)"
        lines.append(f"    {entry.path}: now {now}, ours {', '.join(sorted(entry.ours))}, before {value_of(entry.old)}{age}")
    num_open = len(journal.entries)
    return [*lines, f"{num_open} files can be reverted: revert --yes" if num_open else "nothing to revert"]


def knob_help() -> str:
    return "settings:\n" + "\n".join(f"  {knob.name:<15} {knob.what}" for knob in KNOBS)
