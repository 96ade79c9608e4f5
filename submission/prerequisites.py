"""Demands of `package` that can be checked before the first run: names, environment and checkout.

`package` asks here, and so do the first screen of a run, `preflight` and `describe`. Standard
library only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from common.errors import ConfigError
from common.repository import changes_of, commit_of
from common.training.log_keys import submission_texts

ORG = "MLPERF_SUBMISSION_ORG"
MARK = "REHEARSAL-"  # begins the names of the organization and the system in a rehearsal
# Pattern of the name of an organization, system or implementation, which are names of directories.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
NAME_WORDS = "only letters, digits and _ . + - are allowed, and no leading dot"
PLACEHOLDERS = (  # names that stand in for an organization's
    "unnamed",
    "org",
    "yourorg",
    "your_org",
    "myorg",
    "example",
    "test",
    "todo",
    "none",
    "organisation",  # the British spelling too
    "organization",
)


def require_name(option: str, name: str) -> None:
    """Raise ConfigError unless `name`, the value of `option`, can be the name of a directory."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{option}: {name!r} cannot be the name of a directory in a submission",
            NAME_WORDS,
            "choose another name",
        )


def require_org(option: str, org: str, rehearsal: bool = False) -> None:
    """Raise ConfigError unless `org`, the value of `option`, can be the submitter's name.

    `rehearsal`: whether it may be marked as that of a rehearsal.
    """
    require_name(option, org)
    if org.lower() in PLACEHOLDERS or "placeholder" in org.lower():
        raise ConfigError(
            f"{option}: {org!r} is a placeholder",
            "package accepts the name of an organization only",
            f"give the name of your organization, the same in {ORG} of the runs, --submitter of"
            " describe and --org of package",
        )
    if org.upper().startswith(MARK) and not rehearsal:
        raise ConfigError(
            f"{option}: {org!r} marks a rehearsal",
            "a rehearsal cannot be submitted",
            "give the name of your organization, and package series of real runs",
        )


def require_file_name(option: str, path: Path) -> None:
    """Raise ConfigError unless the name of the description at `path` has the form that tools need.

    `option`: the option that named it.
    """
    if path.suffix != ".json" or not NAME.fullmatch(path.stem):
        raise ConfigError(
            f"{option} {path}",
            f"its name is the system ID and .json; {NAME_WORDS}",
            "choose a name such as MI355X_1x8_pytorch.json",
        )


def require_names(environment: Mapping[str, str]) -> None:
    """Raise ConfigError if a variable MLPERF_SUBMISSION_* has a value that `package` refuses."""
    submission_texts(environment)
    if ORG in environment:
        require_org(ORG, environment[ORG])


def refusal_reasons(root: Path, environment: Mapping[str, str]) -> list[str]:
    """Return the reasons, as far as known, why `package` would refuse a run of this checkout."""
    reasons = []
    commit = commit_of(root)
    changes = changes_of(root)
    if commit is None or changes is None:
        reasons.append(
            f"the commit of {root} is unknown: git is missing, or this is not a repository of its "
            "own, or it belongs to another user (git status says which)"
        )
    elif changes:
        first = changes[0].split(maxsplit=1)[-1]
        count = len(changes)
        reasons.append(f"{count} changed or untracked files in the checkout, such as {first}")
    if ORG not in environment:
        reasons.append(f"{ORG} is not set")
    try:
        require_names(environment)
    except ConfigError as error:
        reasons.append(f"{error.what}: {error.why}")
    return reasons
