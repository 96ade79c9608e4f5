"""apply and revert: what is written, in which order, and what stops it.

Every file goes through the same steps. Apply: read; save the old text and fsync; read again; write; read back. Revert: read; compare with
what is ours; write the old value; read back; note in the journal. A kill between any two leaves either nothing changed or a saved text.
"""

from __future__ import annotations

import dataclasses
import errno

from system_tuning.files import Refused, Tree, value_of
from system_tuning.journal import Entry, Journal
from system_tuning.knobs import Found, Knob, Options, Setting, look, offered

DONE = ("written", "already", "follows", "reverted", "unchanged", "stale", "planned")
NOT_PERMITTED = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one file. `status` is one of DONE, or `denied`, `refused`, `failed`, `foreign`, `unsupported`."""

    knob: str
    path: str
    status: str
    before: str = ""
    after: str = ""
    why: str = ""

    @property
    def is_failure(self) -> bool:
        """Something that was asked for and not done. What this host does not have was not asked for in earnest."""
        return self.status not in DONE and self.status != "unsupported"


def plan(knobs: list[Knob], tree: Tree, journal: Journal, options: Options, force: bool = False) -> list[Outcome]:
    """What apply would do, file by file, in its order. Writes nothing."""
    outcomes = []
    for knob in knobs:
        found = look(knob, tree, options)
        outcomes += _hindrances(knob, found)
        outcomes += [outcome for _, outcome in _ahead(found.settings, tree, journal, force)]
    return outcomes


def apply(knobs: list[Knob], tree: Tree, journal: Journal, options: Options, force: bool = False) -> list[Outcome]:
    """Write what plan says, knob by knob. `journal` is locked by the caller. Raises JournalError; nothing is written after that."""
    stale = [entry for entry in journal.entries.values() if _is_stale(entry, journal)]
    journal.append([{"op": "closed", "path": entry.path, "how": "stale"} for entry in stale])
    outcomes = []
    for knob in knobs:
        found = look(knob, tree, options)
        outcomes += _hindrances(knob, found)
        ahead = _ahead(found.settings, tree, journal, force)
        to_save = [setting for setting, outcome in ahead if outcome.status in ("planned", "follows") and not knob.one_shot]
        journal.append([{"op": "save", "knob": s.knob, "path": s.path, "old": s.raw, "new": s.want} for s in to_save])
        outcomes += [_write(setting, knob, tree) if outcome.status == "planned" else outcome for setting, outcome in ahead]
        if knob.one_shot and any(outcome.status == "written" for outcome in outcomes[-len(ahead) :]):
            journal.append([{"op": "done", "knob": knob.name}])
    return outcomes


def _hindrances(knob: Knob, found: Found) -> list[Outcome]:
    outcomes = [Outcome(knob.name, "", "refused", why=problem) for problem in found.problems]
    return outcomes + ([Outcome(knob.name, "", "unsupported", why=found.missing)] if found.missing else [])


def _ahead(settings: list[Setting], tree: Tree, journal: Journal, force: bool) -> list[tuple[Setting, Outcome]]:
    """What apply would do with each file. One that only follows is saved if the one before it will be written, else left out."""
    ahead: list[tuple[Setting, Outcome]] = []
    for setting in settings:
        if not setting.follows:
            ahead.append((setting, _ahead_of_one(setting, tree, journal, force)))
        elif ahead and ahead[-1][1].status == "planned":
            why = "the kernel changes it along with the governor"
            ahead.append((setting, Outcome(setting.knob, setting.path, "follows", setting.now, setting.want, why)))
    return ahead


def _ahead_of_one(setting: Setting, tree: Tree, journal: Journal, force: bool) -> Outcome:
    """`planned` or `already`, or what stands in the way."""
    outcome = Outcome(setting.knob, setting.path, "planned", setting.now, setting.want)
    if setting.raw and setting.now == setting.want:
        return dataclasses.replace(outcome, status="already")
    try:
        if error := tree.why_not_writable(setting.path):
            return _failed(outcome, error)
        if setting.want not in offered(tree, setting.path):
            return dataclasses.replace(outcome, status="refused", why=f"the kernel does not offer {setting.want}")
    except (OSError, Refused) as error:
        return _failed(outcome, error)
    entry = journal.entries.get(setting.path)
    if entry and not _is_stale(entry, journal) and not _is_known(setting.raw, entry) and not force:
        why = f"another process changed it since our apply (it was {value_of(entry.old)} before); --force writes over it"
        return dataclasses.replace(outcome, status="foreign", why=why)
    return outcome


def _write(setting: Setting, knob: Knob, tree: Tree) -> Outcome:
    """Write one file whose old text is saved, unless it has changed since it was read."""
    outcome = Outcome(setting.knob, setting.path, "written", setting.now, setting.want)
    try:
        if knob.one_shot:
            tree.sync()
            tree.write(setting.path, setting.want)
            return outcome
        if (now := tree.read(setting.path)) != setting.raw:
            return dataclasses.replace(outcome, status="foreign", why=f"became {value_of(now)} while we were at it; run apply again")
        tree.write(setting.path, setting.want)
        if (now := value_of(tree.read(setting.path))) != setting.want:
            return dataclasses.replace(outcome, status="failed", why=f"reads back as {now}")
    except (OSError, Refused) as error:
        return _failed(outcome, error)
    return outcome


def revert(tree: Tree, journal: Journal, force: bool = False, dry_run: bool = False) -> list[Outcome]:
    """Put back every old text in the journal, in the order of saving (the governor before what follows it). May run any number of times."""
    outcomes, closed = [], []
    for entry in list(journal.entries.values()):
        outcome = _put_back(entry, tree, journal, force, dry_run)
        outcomes.append(outcome)
        if outcome.status in ("reverted", "unchanged", "stale"):
            closed.append({"op": "closed", "path": entry.path, "how": outcome.status})
    if not dry_run:
        journal.append(closed)  # at the end: until then a kill only makes the next revert look again at what is already back
    return outcomes


def _put_back(entry: Entry, tree: Tree, journal: Journal, force: bool, dry_run: bool) -> Outcome:
    old = value_of(entry.old)
    outcome = Outcome(entry.knob, entry.path, "reverted", after=old)
    if _is_stale(entry, journal):
        return dataclasses.replace(outcome, status="stale", why="from before the last boot, which has put it back")
    try:
        now = tree.read(entry.path)
        outcome = dataclasses.replace(outcome, before=value_of(now))
        if now == entry.old:
            return dataclasses.replace(outcome, status="unchanged")
        if not _is_known(now, entry) and not force:
            why = f"another process changed it: neither ours ({', '.join(sorted(entry.ours))}) nor the old one; --force writes over it"
            return dataclasses.replace(outcome, status="foreign", why=why)
        if old not in offered(tree, entry.path):  # also a journal that somebody has edited
            return dataclasses.replace(outcome, status="refused", why=f"the kernel does not offer {old!r}")
        if error := tree.why_not_writable(entry.path):
            return _failed(outcome, error)
        if dry_run:
            return dataclasses.replace(outcome, status="planned")
        tree.write(entry.path, old)
        if (now := tree.read(entry.path)) != entry.old:
            return dataclasses.replace(outcome, status="failed", why=f"reads back as {value_of(now)}")
    except (OSError, Refused) as error:
        return _failed(outcome, error)
    return outcome


def _is_known(raw: str, entry: Entry) -> bool:
    return value_of(raw) == value_of(entry.old) or value_of(raw) in entry.ours


def _is_stale(entry: Entry, journal: Journal) -> bool:
    return entry.boot != journal.boot


def _failed(outcome: Outcome, error: OSError | Refused) -> Outcome:
    if isinstance(error, Refused):
        return dataclasses.replace(outcome, status="refused", why=str(error))
    status = "denied" if error.errno in NOT_PERMITTED else "failed"
    return dataclasses.replace(outcome, status=status, why=error.strerror or str(error))
