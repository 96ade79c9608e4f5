"""The command line: python3 -m system_tuning check|plan|apply|revert.

Exit codes as everywhere in this package: 0 done, 2 usage, 17 the journal cannot be used, 18 something could not be done.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shlex
import sys
from collections import Counter

from system_tuning.files import Host, Refused, check_writable, value_of
from system_tuning.journal import Journal, JournalError
from system_tuning.settings import SETTINGS, File, Found, Setting

DONE, USAGE, JOURNAL, NOT_DONE = 0, 2, 17, 18
ONE_SHOTS = [setting.name for setting in SETTINGS if setting.is_one_shot]
FAILURES = ("not permitted", "refused", "failed", "changed since")


@dataclasses.dataclass(frozen=True)
class Step:
    """One file in a plan, or what became of it. `status` is printed; those in FAILURES end with exit code 18."""

    setting: str
    path: str
    status: str
    before: str = ""
    after: str = ""
    why: str = ""

    def became(self, status: str, why: str = "") -> Step:
        return dataclasses.replace(self, status=status, why=why)


def main(arguments: list[str] | None = None, root: str = "/") -> int:
    """`root`: the tests' copy of a host's /proc and /sys."""
    options = _parser().parse_args(arguments)
    names = options.only.split(",") if options.only else [setting.name for setting in SETTINGS if setting.is_default]
    if unknown := set(names) - {setting.name for setting in SETTINGS}:
        print(f"error: unknown setting {', '.join(sorted(unknown))}\n  do:  --help lists the settings", file=sys.stderr)
        return USAGE
    chosen, host = [setting for setting in SETTINGS if setting.name in names], Host(root)
    try:
        if options.verb == "check":
            return check(chosen, host, options.thp_defrag)
        journal = Journal(host)
        if journal.is_stale:
            print("the journal is from before the last boot, which has reset all settings: there is nothing to revert")
        is_revert, dry_run = options.verb == "revert", options.verb == "plan" or not options.yes
        if is_revert:
            steps = revert(host, journal, options.force, dry_run)
        else:
            steps = plan(chosen, host, options.thp_defrag) if dry_run else apply(chosen, host, journal, options.thp_defrag)
    except JournalError as error:
        print(f"error: {error}\n  do:  mend the cause, then run this again; nothing more was written", file=sys.stderr)
        return JOURNAL
    print(*(_grouped(steps) or ["nothing to do"]), sep="\n")
    if dry_run:
        print(f"nothing was written; {'revert' if is_revert else 'apply'} --yes does it")
    elif journal.files:
        print(f"old values are in {journal.path}; `revert --yes` puts them back; a reboot does so too")
    _explain(steps, sys.argv[1:] if arguments is None else arguments)
    return NOT_DONE if any(step.status in FAILURES for step in steps) and not dry_run else DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 -m system_tuning",
        description="Operating-system and CPU settings for training: check (what could be better), plan (the exact writes), apply, revert. "
        "apply and revert write nothing without --yes. GPU clocks and power limits are never touched.",
        epilog="settings:\n" + "\n".join(f"  {setting.name:<15} {setting.what}" for setting in SETTINGS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("verb", choices=("check", "plan", "apply", "revert"))
    parser.add_argument("--yes", action="store_true", help="apply, revert: really write")
    parser.add_argument("--only", metavar="NAMES", help="these settings, separated by commas; default: all but aslr")
    defrag = ("defer+madvise", "always", "madvise")
    parser.add_argument("--thp-defrag", choices=defrag, default=defrag[0], help="default %(default)s; AMD uses always")
    parser.add_argument("--force", action="store_true", help="revert: also overwrite values that another program has set since")
    return parser


def check(settings: list[Setting], host: Host, defrag: str) -> int:
    """Print what is, what would be better, the benefit and the risk. Read-only, for any user."""
    states = []
    for setting in settings:
        found = setting.look(host, defrag)
        states.append(_state(setting, found))
        steps = [Step(setting.name, file.path, "", file.now, file.want, file.note) for file in found.files if not file.follows]
        lines = [*found.problems, found.unsupported, *_grouped(steps)]
        if states[-1] not in ("good", "not supported here"):
            lines += [f"what:    {setting.what}", f"benefit: {setting.benefit}", f"risk:    {setting.risk}", f"source:  {setting.source}"]
        print(f"{setting.name}: {states[-1]}", *(f"    {line}" for line in lines if line), sep="\n")
    print(f"{states.count('could be better')} settings could be better; plan shows the writes, apply --yes does them, as root")
    return DONE


def _state(setting: Setting, found: Found) -> str:
    if found.problems:
        return "cannot be read"
    if not found.files:
        return "not supported here"
    if setting.is_one_shot:
        return "done once, by apply"
    return "good" if all(file.is_good for file in found.files) else "could be better"


def plan(settings: list[Setting], host: Host, defrag: str) -> list[Step]:
    """What apply would do, file by file, in its order. Writes nothing."""
    steps = []
    for setting in settings:
        found = setting.look(host, defrag)
        steps += [Step(setting.name, "", "refused", why=problem) for problem in found.problems]
        steps += [Step(setting.name, "", "not supported", why=found.unsupported)] if found.unsupported else []
        steps += [_planned(setting, file, host) for file in found.files]
    return steps


def _planned(setting: Setting, file: File, host: Host) -> Step:
    step = Step(setting.name, file.path, "would set", file.now, file.want)
    if file.follows:
        return step.became("kept", "the kernel changes it together with the governor")
    if file.is_good:
        return step.became("already")
    try:
        check_writable(file.path, file.now or file.want)  # the old value must be one that revert can write
        return step if host.may_write(file.path) else step.became("not permitted")
    except (OSError, Refused) as error:
        return step.became("refused", str(error))


def apply(settings: list[Setting], host: Host, journal: Journal, defrag: str) -> list[Step]:
    """Write the plan, after its old values are in the journal. Raises JournalError; nothing is written after that."""
    steps = plan(settings, host, defrag)
    if not any(step.status == "would set" for step in steps):
        return steps  # no journal is made
    with journal.locked():
        steps = plan(settings, host, defrag)
        changes = [step for step in steps if step.status in ("would set", "kept") and step.setting not in ONE_SHOTS]
        journal.add({step.path: (step.before, step.after) for step in changes})
        return [_write(step, host, "set") if step.status == "would set" else step for step in steps]


def revert(host: Host, journal: Journal, force: bool, dry_run: bool) -> list[Step]:
    """Put back every old value in the journal, in the order of writing. May run any number of times."""
    if dry_run or not journal.files:
        return [_put_back(path, entry, host, force, dry_run) for path, entry in journal.files.items()]
    with journal.locked():
        steps = [_put_back(path, entry, host, force, dry_run) for path, entry in journal.files.items()]
        journal.remove([step.path for step in steps if step.status in ("put back", "unchanged")])
        return steps


def _put_back(path: str, entry: dict, host: Host, force: bool, dry_run: bool) -> Step:
    step = Step("", path, "would set", after=entry["old"])
    try:
        now = value_of(host.read(path))
        step = dataclasses.replace(step, before=now)
        if now == entry["old"]:
            return step.became("unchanged")
        if now not in entry["ours"] and not force:
            return step.became("changed since", f"by another program: apply wrote {' or '.join(entry['ours'])}; --force overwrites it")
        if not host.may_write(path):
            return step.became("not permitted")
        return step if dry_run else _write(step, host, "put back")
    except (OSError, Refused) as error:
        return step.became("failed", str(error))


def _write(step: Step, host: Host, done: str) -> Step:
    is_one_shot = step.setting in ONE_SHOTS
    try:
        if is_one_shot:
            os.sync()  # dropping the page cache leaves dirty pages where they are
        host.write(step.path, step.after)
        now = step.after if is_one_shot else value_of(host.read(step.path))
        return step.became(done) if now == step.after else step.became("failed", f"reads back as {now}")
    except (OSError, Refused) as error:
        return step.became("failed", str(error))


def _grouped(steps: list[Step]) -> list[str]:
    """One line for all files that differ only in their CPU number."""
    groups = Counter(dataclasses.replace(step, path=re.sub(r"(cpu|policy)[0-9]+", r"\1*", step.path)) for step in steps)
    lines = []
    for step, count in groups.items():
        change = step.after if step.before == step.after else f"{step.before or '-'} -> {step.after}"
        text = f"{step.path}: {change}" if step.path else step.setting
        notes = f" ({count} files)" * (count > 1) + f"  [{step.why}]" * bool(step.why)
        lines.append(f"{step.status:<14} {text}{notes}" if step.status else text + notes)
    return lines


def _explain(steps: list[Step], arguments: list[str]) -> None:
    """What to do about files that may not be written."""
    if not any(step.status == "not permitted" for step in steps):
        return
    folder = shlex.quote(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    command = shlex.join([sys.executable or "python3", "-B", "-m", "system_tuning", *arguments])  # -B: root leaves no bytecode here
    what, do = "only root can write some of these files", f"cd {folder} && sudo {command}"
    if os.geteuid() == 0:
        what, do = "some of these files are read-only here, for root too", "run this on the host, not in a container"
    print(f"error: {what}\n  do:  {do}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
