"""Suggest what a word that is not known was meant to be. Standard library only.

All commands ask `unknown` or `nearest`. They know the names that other tools have for our settings,
and otherwise compare spellings.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from common.errors import ConfigError, listed
from common.values import plain

# Share of equal letters of a misspelled word: `plna` and `plan` have 0.75. So have A100 and H100,
# which are two names: if the first letters differ, more must be equal.
SIMILAR = 0.75
OTHER_INITIAL = 0.8
MAX_LISTED = 16  # names that an error lists
TABLE = Path(__file__).with_name("other_names.txt")


class Meaning(NamedTuple):
    """Our name for a word, and what differs. The name is "" if there is nothing to set."""

    ours: str
    note: str = ""


def _read() -> list[tuple[Meaning, str]]:
    """Return the meaning and the word of each entry of TABLE."""
    entries = []
    for line in TABLE.read_text().replace("\n    ", " ").splitlines():
        if line.startswith("#"):
            continue
        head, _, words = line.partition(": ")
        ours, _, note = head.rstrip(")").partition(" (")
        entries += [(Meaning(ours.lstrip("-") and ours, note), word) for word in words.split()]
    return entries


ENTRIES = _read()
BY_WORD: dict[str, list[Meaning]] = {}
for _meaning, _word in ENTRIES:
    BY_WORD.setdefault(plain(_word), []).append(_meaning)
VARIABLES = {  # name of a variable in another tool -> its meaning
    word: meaning
    for meaning, word in ENTRIES
    if word.isupper() and len(word) > 1 and meaning.ours.isupper()
}


def nearest(word: str, known: Iterable[str]) -> Meaning | None:
    """Return the one of the `known` names that `word` means, None if there is none.

    In this order: the name itself in another spelling, our name for another tool's, and the most
    similar name.
    """
    names: dict[str, str] = {}
    for name in known:
        names.setdefault(plain(name), name)
    key = plain(word)
    if key in names:
        return Meaning(names[key])
    for meaning in BY_WORD.get(key, ()):
        option = meaning.ours.partition(" ")[0]
        if plain(option) in names:
            return meaning
        if not meaning.ours and "globalbatchsize" in names:  # keys were asked for
            return meaning
    ratios = {name: difflib.SequenceMatcher(None, name, key).ratio() for name in names}
    best = max(ratios, key=lambda name: ratios[name], default="")  # of equal ones, the first
    least = SIMILAR if best[:1] == key[:1] else OTHER_INITIAL
    return Meaning(names[best]) if best and ratios[best] >= least else None


def unknown(
    what: str, word: str, known: Iterable[str], otherwise: str = "choose one of them"
) -> ConfigError:
    """Return the error `what` about a `word` that is none of the `known` ones.

    It suggests the meaning of the word that `nearest` returns. If there is none, it says
    `otherwise`.
    """
    names = [*known]
    meaning = nearest(word, names)
    do = suggestion(*meaning) if meaning else otherwise
    return ConfigError(what, f"known: {listed(names, MAX_LISTED)}", do)


def suggestion(name: str, note: str = "") -> str:
    """Return the sentence that suggests `name`, which may be "" if the note says it all."""
    if not name:
        return f"leave it out: {note}"
    return f"did you mean {name} ({note})?" if note else f"did you mean {name}?"
