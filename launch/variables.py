"""Judge the environment variables that are set, before a command starts.

An unknown option is refused, because it would be silently ignored. A variable may belong to another
program, so it is refused only if it clearly is a misspelled one of ours that decides the run or its
log. Otherwise a note names it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from common.command_line import PROGRAM
from common.errors import ConfigError
from common.suggestions import VARIABLES, Meaning, nearest, suggestion
from common.terminal import inform
from common.values import plain
from common.variables import CONFIG, TABLE

OURS = re.compile("(MLPERF_|DGX)", re.IGNORECASE)  # begin names that no other program reads
# Variables that users misspell: all that they set themselves.
KNOWN = [
    name
    for name, variable in TABLE.items()
    if variable.set_by in ("user", CONFIG) and not variable.is_prefix
]
LETTERS = {plain(name): name for name in KNOWN}
SHORT = 6  # letters below which a name that differs by one letter may be another word
# Variables that choose what is run, and those that only the log of a run has.
CHOOSING = ("DGXSYSTEM", "DGXNGPU", "GPU_KIND", "MODEL", "NEXP", "SEED")
DECIDE = re.compile("|".join((*CHOOSING, "DATADIR", r"\w+_ENGINE", r"MLPERF_SUBMISSION_\w+")))


def judge(environment: Mapping[str, str], command: str, read: tuple[str, ...]) -> None:
    """Print a note on each variable that is misspelled, or that the command does not read.

    `read`: variables of CHOOSING that the command reads, () if it chooses nothing. Raise
    ConfigError for `run`, if a misspelled variable decides the run or its log.
    """
    for name, meaning in misspelled(environment):
        ours, note = meaning
        do = f"unset {name}"
        if ours:
            do = suggestion(ours if note else f"{ours}={environment[name]}", note)
        is_foreign = name in VARIABLES and not OURS.match(name)
        if command == "run" and DECIDE.fullmatch(ours) and not is_foreign:
            why = "no code reads it, and the run or its log would be another one"
            raise ConfigError(f"unknown environment variable: {name!r}", why, do)
        inform(f"NOTE       the variable {name!r} is not read; {do}")
    unread = [name for name in CHOOSING if environment.get(name) and name not in read]
    if read and unread:
        inform(f"NOTE       {PROGRAM} {command} does not read {', '.join(unread)}")


def misspelled(environment: Mapping[str, str]) -> Iterator[tuple[str, Meaning]]:
    """Yield the variables that seem to be meant for us, and their meaning, "" if it is unknown."""
    for name in environment:
        if name in TABLE or not environment[name]:
            continue
        meaning = VARIABLES.get(name) or Meaning(_similar(name))
        if meaning.ours or OURS.match(name):
            yield name, meaning


def _similar(name: str) -> str:
    """Return the variable whose name has the same letters or differs by one, "" if there is none.

    A name that begins like ours may differ more.
    """
    if OURS.match(name):
        meaning = nearest(name, KNOWN)
        return meaning.ours if meaning else ""
    letters = plain(name)
    size = len(letters)
    near = [known for known in LETTERS if sorted(known) == sorted(letters)]
    if not near and size > 1:  # one letter too few, too many or wrong
        long = [known for known in LETTERS if len(known) >= SHORT and abs(len(known) - size) <= 1]
        near = get_close_matches(letters, long, 1, (size - 1) / size)
    return LETTERS[near[0]] if near else ""
