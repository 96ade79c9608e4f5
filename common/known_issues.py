"""Known failures of the software versions installed here (known_issues.toml). Used by preflight,
the launcher's first screen and the self-test.

Versions are read without importing a package: torch's from its metadata, ROCm's and CUDA's from
torch/version.py. Standard library only.
"""

from __future__ import annotations

import importlib.util
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from common.errors import PreflightError
from common.gpu_kinds import GpuKind
from common.packages import version_of

SOFTWARE = ("torch", "triton", "rocm", "cuda", "aiter", "driver")
PACKAGES = {
    "torch": ("torch",),
    "triton": ("triton", "pytorch-triton-rocm", "triton-rocm"),
    "aiter": ("amd-aiter", "aiter"),
}
ALLOW = "ALLOW_KNOWN_ISSUES"  # environment variable: names of issues that warn instead of refusing


@dataclass(frozen=True)
class KnownIssue:
    name: str
    verdict: str  # refuse, warn or suspect
    symptom: str
    cure: str
    source: str
    gpus: tuple[str, ...] = ()  # architectures or names of kinds; empty: all
    ranges: tuple[tuple[str, str], ...] = ()  # (software, range) pairs: all must match
    ops: tuple[str, ...] = ()  # ops of the self-test
    text: str = ""  # regular expression that the self-test's line must match

    def __str__(self) -> str:
        return f"{self.name}: {self.symptom} ({self.source})"


def _issue(entry: dict) -> KnownIssue:
    ranges = tuple((name, entry.pop(name)) for name in SOFTWARE if name in entry)
    lists = {name: tuple(entry.pop(name, ())) for name in ("gpus", "ops")}
    return KnownIssue(**entry, gpus=lists["gpus"], ops=lists["ops"], ranges=ranges)


TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
ISSUES = [_issue(entry) for entry in TABLE["issue"]]
# newest version of each software that the list was made for
NEWEST: dict[str, str] = TABLE["newest"]


def release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, without trailing zeros: "3.7.0+amd.rocm7.0" -> (3,
    7).
    """
    found = re.match(r"\d+(\.\d+)*", version.strip())
    numbers = [int(part) for part in found[0].split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def within(version: str, text: str) -> bool:
    """Return whether `version` is in a range like ">=3.7, <3.8". The comparisons are >= and <."""
    here = release(version)
    for part in text.split(","):
        bound = re.fullmatch(r"\s*(>=|<)\s*([\d.]+)\s*", part)
        assert bound is not None, text
        comparison, end = bound.groups()
        if (here >= release(end)) != (comparison == ">="):
            return False
    return bool(here)


def installed(driver: str = "") -> dict[str, str]:
    """Return software -> version for all software whose version can be found without importing
    it.
    """
    found = {"driver": driver}
    for software, names in PACKAGES.items():
        for name in names:
            found[software] = found.get(software) or version_of(name)
    spec = importlib.util.find_spec("torch")
    text = Path(spec.origin).with_name("version.py").read_text() if spec and spec.origin else ""
    for software, variable in (("rocm", "hip"), ("cuda", "cuda")):
        match = re.search(rf"^{variable}\b[^=]*= *['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        found[software] = match[1] if match else ""
    return {software: version for software, version in found.items() if version}


def newer(versions: Mapping[str, str]) -> dict[str, str]:
    """Return the software that is newer than the list of known issues."""
    return {
        name: text
        for name, text in versions.items()
        if name in NEWEST and release(text)[:2] > release(NEWEST[name])
    }


def matching(kind: GpuKind, versions: Mapping[str, str]) -> list[KnownIssue]:
    """Return the issues of this GPU with these versions, refusing ones first.

    For a version newer than the list, an issue whose range has no upper end only warns.
    """
    unseen = newer(versions)
    found = []
    for issue in ISSUES:
        on_this_gpu = not issue.gpus or kind.name in issue.gpus or kind.arch in issue.gpus
        if on_this_gpu and all(
            name in versions and within(versions[name], text) for name, text in issue.ranges
        ):
            open_ended = any(name in unseen for name, _ in issue.ranges)
            found.append(
                replace(issue, verdict="warn")
                if open_ended and issue.verdict == "refuse"
                else issue
            )
    return sorted(found, key=lambda issue: ("refuse", "warn", "suspect").index(issue.verdict))


def suspects(
    failures: Sequence[tuple[str, str]], kind: GpuKind, versions: Mapping[str, str]
) -> list[KnownIssue]:
    """Return the issues that may have caused the self-test's failure.

    `failures`: the op and the line of each failed check. An op belongs to an issue if its name
        begins with one of the issue's ops.
    """

    def may_cause(issue: KnownIssue, op: str, line: str) -> bool:
        return (
            bool(issue.ops) and op.startswith(issue.ops) and re.search(issue.text, line) is not None
        )

    issues = matching(kind, versions)
    return [issue for issue in issues if any(may_cause(issue, *failure) for failure in failures)]


def shown(
    kind: GpuKind, versions: Mapping[str, str], environment: Mapping[str, str]
) -> list[KnownIssue]:
    """Return the issues to show before a run, those that refuse or warn. ALLOW_KNOWN_ISSUES turns a
    refusal into a warning.
    """
    allowed = set(environment.get(ALLOW, "").replace(",", " ").split())
    issues = [issue for issue in matching(kind, versions) if issue.verdict != "suspect"]
    return [replace(issue, verdict="warn") if issue.name in allowed else issue for issue in issues]


def unseen(versions: Mapping[str, str]) -> list[str]:
    return [
        f"{name} {text} is newer than the list of known issues"
        for name, text in newer(versions).items()
    ]


def notes(
    kind: GpuKind, versions: Mapping[str, str], environment: Mapping[str, str], refuse: bool
) -> list[str]:
    """Return the notes for the first screen. With `refuse`, raise PreflightError for an issue that
    refuses.
    """
    found = shown(kind, versions, environment)
    for issue in found:
        if refuse and issue.verdict == "refuse":
            have = ", ".join(f"{name} {versions[name]}" for name, _ in issue.ranges)
            what = f"{have} is known to compute wrongly on {kind.name}"
            raise PreflightError(
                what,
                str(issue),
                f"{issue.cure}; if your build has the fix, set {ALLOW}={issue.name}",
            )
    return [f"known issue {issue}; {issue.cure}" for issue in found] + unseen(versions)
