"""The door: python3 -m system_tuning check|plan|apply|revert|status. Exit codes as the package's: 0, 2 usage, 17 journal, 18 not done."""

from __future__ import annotations

import argparse
import json
import os
import sys

from system_tuning import actions, report
from system_tuning.files import Refused, Tree, open_tree
from system_tuning.journal import NAME, Journal, JournalError, boot_id
from system_tuning.knobs import KNOBS, NAMES, Knob, Options, look

DONE, USAGE, JOURNAL, NOT_DONE = 0, 2, 17, 18
OF_ROOT = "/var/lib/system_tuning"


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        knobs = _chosen(options)
        tree = open_tree(options.root)
    except (OSError, Refused, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    try:
        return _VERBS[options.verb](options, knobs, tree)
    except JournalError as error:
        print(f"error: {error}" + (f"\n  do:  {error.do}" if error.do else ""), file=sys.stderr)
        return JOURNAL
    except KeyboardInterrupt:
        print("interrupted; `revert --yes` puts back what was set", file=sys.stderr)
        return 130
    finally:
        tree.close()


def check(options: argparse.Namespace, knobs: list[Knob], tree: Tree) -> int:
    """Read-only, for any user. With --strict 18 if something would be better or cannot be looked at."""
    found = [(knob, look(knob, tree, _values(options))) for knob in KNOBS if knob in knobs or (knob.name == "aslr" and not options.only)]
    states = [report.state_of(knob, result, knob in knobs) for knob, result in found]
    if options.json:
        print(json.dumps([report.check_object(*pair, state) for pair, state in zip(found, states, strict=True)], indent=1))
    else:
        for pair, state in zip(found, states, strict=True):
            report.show(report.check_lines(*pair, state))
        print(f"{states.count('better')} settings would be better; plan shows the writes, apply --yes does them, as root")
    return NOT_DONE if options.strict and {"better", "problem"} & set(states) else DONE


def plan(options: argparse.Namespace, knobs: list[Knob], tree: Tree) -> int:
    """The writes of apply, one a line, in order."""
    outcomes = actions.plan(knobs, tree, _journal(options, tree).read(), _values(options), options.force)
    _print(outcomes)
    print("nothing was written; apply --yes does it")
    _explain(outcomes, options)
    return NOT_DONE if options.strict and any(o.is_failure for o in outcomes) else DONE


def apply(options: argparse.Namespace, knobs: list[Knob], tree: Tree) -> int:
    """Dry run unless --yes. 18 if something could not be set; what this host does not have is said, and no failure."""
    if not options.yes:
        return plan(options, knobs, tree)
    journal = _journal(options, tree).read()
    outcomes = actions.plan(knobs, tree, journal, _values(options), options.force)
    if any(o.status == "planned" for o in outcomes):  # else there is nothing to keep, and no journal is made
        with journal.locked("apply"):
            outcomes = actions.apply(knobs, tree, journal, _values(options), options.force)
    _print(outcomes)
    if journal.entries:
        print(f"old values are in {journal.path}; `revert --yes` puts them back; none of this outlives a reboot")
    _explain(outcomes, options)
    return NOT_DONE if any(o.is_failure for o in outcomes) else DONE


def revert(options: argparse.Namespace, knobs: list[Knob], tree: Tree) -> int:
    """Dry run unless --yes. Puts back everything in the journal, whatever --only says."""
    journal = _journal(options, tree).read()
    if not options.yes or not journal.entries:
        outcomes = actions.revert(tree, journal, options.force, dry_run=True)
    else:
        with journal.locked("revert"):
            outcomes = actions.revert(tree, journal, options.force)
    _print(outcomes)
    if not options.yes and outcomes:
        print("nothing was written; revert --yes does it")
    _explain(outcomes, options)
    return NOT_DONE if any(o.is_failure for o in outcomes) and (options.yes or options.strict) else DONE


def status(options: argparse.Namespace, knobs: list[Knob], tree: Tree) -> int:
    """What the journal says, and what is there now. Read-only."""
    report.show(report.status_lines(_journal(options, tree).read(), tree))
    return DONE


def _print(outcomes: list[actions.Outcome]) -> None:
    report.show([*report.outcome_lines(outcomes), report.counted(outcomes)])


def _explain(outcomes: list[actions.Outcome], options: argparse.Namespace) -> None:
    """How to do what was not permitted. Paths are made absolute, since the command changes directory."""
    arguments = [options.verb, "--yes"] if options.verb in ("apply", "revert") else ["apply", "--yes"]
    if options.only is not None:
        arguments += ["--only", options.only]
    if options.skip:
        arguments += ["--skip", options.skip]
    flags = {"--aslr-off": options.aslr_off, "--force": options.force, "--strict": options.strict}
    arguments += [flag for flag, is_set in flags.items() if is_set]
    if options.thp_defrag != Options().thp_defrag:
        arguments += ["--thp-defrag", options.thp_defrag]
    if os.path.realpath(options.root) != "/":
        arguments += ["--root", os.path.realpath(options.root)]
    if options.journal:
        arguments += ["--journal", os.path.abspath(options.journal)]
    report.show(report.hint(outcomes, arguments), sys.stderr)


def _values(options: argparse.Namespace) -> Options:
    return Options(thp_defrag=options.thp_defrag, aslr_off=options.aslr_off)


def _chosen(options: argparse.Namespace) -> list[Knob]:
    """The knobs of --only less those of --skip; aslr is among them only with --aslr-off. Raises ValueError."""
    only = NAMES if options.only is None else tuple(options.only.split(","))
    skip = tuple(options.skip.split(",")) if options.skip else ()
    for name in (*only, *skip):
        if name not in NAMES:
            raise ValueError(f"there is no setting {name!r}; there are {', '.join(NAMES)}")
    if options.only is not None and "aslr" in only and not options.aslr_off:
        raise ValueError("aslr weakens the whole host, so it needs --aslr-off")
    wanted = {*only, *(["aslr"] if options.aslr_off else [])} - set(skip)
    return [knob for knob in KNOBS if knob.name in wanted and (knob.name != "aslr" or options.aslr_off)]


def _journal(options: argparse.Namespace, tree: Tree) -> Journal:
    """--journal; within a rehearsed tree its own; root's where it exists or may be made; else the user's."""
    own = os.path.join(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"), "system_tuning")
    if options.journal:
        directory = os.path.abspath(options.journal)
    elif tree.root != "/":
        directory = tree.root + OF_ROOT
    else:
        directory = OF_ROOT if os.geteuid() == 0 or os.path.exists(os.path.join(OF_ROOT, NAME)) else own
    return Journal(directory, tree.root, boot_id(tree))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 -m system_tuning",
        description="Settings of the operating system and the CPUs for training: check (what is, what would be better), plan (the exact "
        "writes), apply, revert, status (the journal). apply and revert are dry runs unless --yes. GPU clocks and power are never touched.",
        epilog=report.knob_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("verb", choices=tuple(_VERBS))
    parser.add_argument("--yes", action="store_true", help="apply, revert: really write")
    parser.add_argument("--only", metavar="NAMES", help="these settings, separated by commas")
    parser.add_argument("--skip", metavar="NAMES", help="not these settings")
    parser.add_argument("--aslr-off", action="store_true", help="also address-space randomisation off: a security regression of the host")
    defrag = ("defer+madvise", "always", "madvise")
    parser.add_argument("--thp-defrag", choices=defrag, default=Options().thp_defrag, help="default %(default)s; AMD uses always")
    parser.add_argument("--force", action="store_true", help="write over a value that another process has set since")
    parser.add_argument(
        "--strict",
        action="store_true",
        help="check, plan, dry runs: 18 instead of 0 if something is not as it should be, or could not be set",
    )
    parser.add_argument("--json", action="store_true", help="check: one JSON object per setting")
    parser.add_argument("--journal", metavar="DIR", help=f"where old values are kept (root: {OF_ROOT}, else ~/.local/state/system_tuning)")
    parser.add_argument("--root", metavar="DIR", default="/", help="rehearse on plain files in DIR/proc and DIR/sys")
    return parser


_VERBS = {"check": check, "plan": plan, "apply": apply, "revert": revert, "status": status}

if __name__ == "__main__":
    sys.exit(main())
