"""Known issues of software versions (known_issues.toml), and which of them affect this machine.

Preflight, the launcher's first screen and the self-test use this module. Versions are read without
importing a package: torch's from its metadata, ROCm's and CUDA's from torch/version.py, AOTriton's
from the name of its library. Standard library only.
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
from common.packages import release, version_of

SOFTWARE = ("torch", "triton", "rocm", "cuda", "aotriton", "aiter", "driver")
ABSENT = "absent"  # instead of a range: the software is not installed
PACKAGES = {
    "torch": ("torch",),
    "triton": ("triton", "pytorch-triton-rocm", "triton-rocm"),
    "aiter": ("amd-aiter", "aiter"),
}
ALLOW = "ALLOW_KNOWN_ISSUES"  # environment variable: names of issues that warn instead of refusing


@dataclass(frozen=True)
class KnownIssue:
    """An entry of known_issues.toml, whose header describes the fields."""

    name: str
    verdict: str  # refuse, warn or suspect
    symptom: str
    cure: str
    source: str  # address of the thread that reports it
    gpus: tuple[str, ...] = ()  # architectures or names of GPU kinds; empty: all
    ranges: tuple[tuple[str, str], ...] = ()  # (software, range or ABSENT); all must match
    ops: tuple[str, ...] = ()  # ops of the self-test that may fail, as prefixes
    text: str = ""  # regular expression that the line of the failed check must match

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


def within(version: str, text: str) -> bool:
    """Return whether `version` is in a range of >= and < bounds, such as ">=3.7, <3.8".

    `version`: "" if it is not installed or unknown. Only the range ABSENT has it.
    """
    if text == ABSENT:
        return not version
    numbers = release(version)
    for part in text.split(","):
        bound = re.fullmatch(r"\s*(>=|<)\s*([\d.]+)\s*", part)
        assert bound is not None, text
        comparison, end = bound.groups()
        is_above = numbers >= release(end)
        if is_above != (comparison == ">="):
            return False
    return bool(numbers)


def installed(driver: str = "") -> dict[str, str]:
    """Return software -> version, for all software in SOFTWARE whose version can be found.

    `driver`: version of the GPU's driver.
    """
    versions = {"driver": driver}
    for software, names in PACKAGES.items():
        for name in names:
            versions[software] = versions.get(software) or version_of(name)
    spec = importlib.util.find_spec("torch")
    if spec and spec.origin:
        versions |= _libraries_of_torch(Path(spec.origin).parent, versions["torch"])
    return {software: version for software, version in versions.items() if version}


def _libraries_of_torch(folder: Path, torch: str) -> dict[str, str]:
    """Return the versions of ROCm, CUDA and AOTriton, "" for those that torch is not built with.

    `folder`: of the package torch. `torch`: its version.

    From ROCm 10.0 on, HIP has another version than ROCm: `hip` is 7.15 in torch for ROCm 10.0.
    `rocm` is ROCm's (pytorch#168097), but missing from older builds.
    """
    text = (folder / "version.py").read_text()
    variables = dict(re.findall(r"^(\w+)\b[^=\n]*= *['\"]([^'\"]+)['\"]", text, re.MULTILINE))
    local = re.search(r"\+rocm(\d+(\.\d+)*)", torch)
    rocm = variables.get("rocm") or (local[1] if local else variables.get("hip", ""))
    libraries = [path.name for path in folder.glob("lib/libaotriton_v2.so.*")]
    aotriton = [name.partition(".so.")[2] for name in libraries]
    return {
        "rocm": rocm,
        "cuda": variables.get("cuda", ""),
        "aotriton": max(aotriton, key=release, default=""),
    }


def newer(versions: Mapping[str, str]) -> dict[str, str]:
    """Return the software whose first two numbers are higher than in the list of known issues."""

    def major_minor(version: str) -> tuple[int, ...]:
        return (*release(version), 0, 0)[:2]

    return {
        name: text
        for name, text in versions.items()
        if name in NEWEST and major_minor(text) > major_minor(NEWEST[name])
    }


def matching(kind: GpuKind, versions: Mapping[str, str]) -> list[KnownIssue]:
    """Return the issues of this GPU with these versions, refusing ones first.

    If a version is newer than the list of known issues, an issue only warns instead of refusing,
    because it may have been fixed.
    """
    newer_software = newer(versions)
    issues = []
    for issue in ISSUES:
        if issue.gpus and kind.name not in issue.gpus and kind.arch not in issue.gpus:
            continue
        if not all(within(versions.get(name, ""), text) for name, text in issue.ranges):
            continue
        may_be_fixed = any(name in newer_software for name, _ in issue.ranges)
        if may_be_fixed and issue.verdict == "refuse":
            issue = replace(issue, verdict="warn")
        issues.append(issue)
    return sorted(issues, key=lambda issue: ("refuse", "warn", "suspect").index(issue.verdict))


def suspects(
    failures: Sequence[tuple[str, str]], kind: GpuKind, versions: Mapping[str, str]
) -> list[KnownIssue]:
    """Return the issues that may have caused the self-test's failure.

    `failures`: (op, line) of each failed check. An issue may be the cause if the op begins with one
        of its ops and the line matches its text.
    """
    issues = []
    for issue in matching(kind, versions):
        for op, line in failures:
            if issue.ops and op.startswith(issue.ops) and re.search(issue.text, line):
                issues.append(issue)
                break
    return issues


def shown(
    kind: GpuKind, versions: Mapping[str, str], environment: Mapping[str, str]
) -> list[KnownIssue]:
    """Return the issues to show before a run: those that refuse or warn.

    The environment variable ALLOW_KNOWN_ISSUES turns refusals into warnings.
    """
    allowed = set(environment.get(ALLOW, "").replace(",", " ").split())
    issues = []
    for issue in matching(kind, versions):
        if issue.verdict == "suspect":
            continue
        if issue.name in allowed:
            issue = replace(issue, verdict="warn")
        issues.append(issue)
    return issues


def unseen(versions: Mapping[str, str]) -> list[str]:
    """Return a note for each software that is newer than the list of known issues."""
    return [
        f"{name} {text} is newer than the list of known issues"
        for name, text in newer(versions).items()
    ]


def _software(issue: KnownIssue, versions: Mapping[str, str]) -> str:
    """Return names and versions of the software by which an issue was found."""
    names = [name for name, text in issue.ranges if text != ABSENT]
    return ", ".join(f"{name} {versions[name]}" for name in names)


def notes(kind: GpuKind, versions: Mapping[str, str], environment: Mapping[str, str]) -> list[str]:
    """Return the notes for the first screen."""
    issues = shown(kind, versions, environment)
    lines = [f"known issue {issue}; {_software(issue, versions)}: {issue.cure}" for issue in issues]
    return lines + unseen(versions)


def refusals(
    kind: GpuKind, versions: Mapping[str, str], environment: Mapping[str, str]
) -> list[PreflightError]:
    """Return an error for each issue that refuses a run."""
    errors = []
    for issue in shown(kind, versions, environment):
        if issue.verdict == "refuse":
            error = PreflightError(
                f"{_software(issue, versions)} is known to compute wrongly on {kind.name}",
                str(issue),
                f"{issue.cure}; if your build has the fix, set {ALLOW}={issue.name}",
            )
            errors.append(error)
    return errors
