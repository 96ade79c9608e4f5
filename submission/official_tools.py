"""Programs of mlperf-logging that judge a submission or its system description.

Their exit code is always 0, so a tool passed if its output says so and contains no error. The
programs write log files into their working directory, so each runs in a temporary one.
submission/compliance_checker.py and submission/rcp.py call the checkers of logs.

Each function that runs a tool raises PreflightError if mlperf-logging is missing or too old.
"""

from __future__ import annotations

import csv
import logging
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from common import benchmarks
from common.command_line import raise_if_interrupted
from common.errors import PreflightError
from common.packages import pip_install, version_of

# Ruleset -> submission deadline of its round, oldest first: all that contain one of the benchmarks.
# Source: mlcommons/training, README.md, headings "MLPerf Training v... (Submission Deadline ...)".
DEADLINES = {
    "4.0.0": "2024-05-10",
    "4.1.0": "2024-10-11",
    "5.0.0": "2025-05-02",
    "5.1.0": "2025-10-10",
    "6.0.0": "2026-05-15",
    "6.1.0": "2026-10-16",
}
RULESETS = tuple(DEADLINES)
CLOSED_RULESETS = RULESETS[3:]  # the rulesets that contain both benchmarks
OLDEST_CHECKER = (4, 1, 68)  # 4.1.59 does not yet require the nine disclosure keys of 6.1.0
BYPASS_FILE = "package_checker_params"
RCP_BYPASS = "rcp-bypass"
SEED_BYPASS = "seed-checker-bypass"
INSTALL = pip_install(f"mlperf-logging=={'.'.join(map(str, OLDEST_CHECKER))}")
# Where a user reads how to make what `package` does not: open division, two systems, power.
BY_HAND = '"By hand" in docs/submission.md'

BAD_LINE = re.compile(
    r"\bERROR\b|Traceback|^\w*(Error|Exception)\b|Skipping benchmark|CHECKS FAILED|FOUND ERRORS"
    r"|Compliance check failed in"
)


def checker_version() -> str:
    """Return the version of the installed mlperf-logging.

    Raises PreflightError if it is missing, or too old to require the disclosure keys of 6.1.0.
    """
    version = version_of("mlperf-logging")
    if not version:
        why = f"{sys.executable} has no mlperf-logging"
        raise PreflightError("the official compliance checker is not installed", why, INSTALL)
    if tuple(int(part) for part in version.split(".")[:3] if part.isdigit()) < OLDEST_CHECKER:
        raise PreflightError(
            f"mlperf-logging {version} is too old",
            "it accepts logs without the keys that 6.1.0 requires",
            INSTALL,
        )
    return version


def bypasses(folder: Path) -> set[str]:
    """Return the checks that the package checker leaves out for the result set in `folder`.

    The files BYPASS_FILE of the set and of its system name them. The checker compares whole lines,
    so a line that ends with a newline has no effect.
    """
    lines: set[str] = set()
    for place in (folder, folder.parent):
        if (path := place / BYPASS_FILE).is_file():
            lines |= {*path.read_text(errors="replace").splitlines(keepends=True)}
    return lines & {RCP_BYPASS, SEED_BYPASS}


@contextmanager
def silent() -> Iterator[None]:
    """Suppress the messages that the official modules log inside the block.

    If the root logger had no handler, they would add one that prints. Raises Interrupted after a
    signal, since the official modules catch every exception and take it for a fault of the log.
    """
    root = logging.getLogger()
    handler = logging.NullHandler()
    before = logging.root.manager.disable
    root.addHandler(handler)
    logging.disable(logging.CRITICAL)
    try:
        yield
        raise_if_interrupted()
    finally:
        logging.disable(before)
        root.removeHandler(handler)


@dataclass(frozen=True)
class ToolVerdict:
    """The verdict of one tool on one submission."""

    tool: str
    passed: bool
    complaints: tuple[str, ...]
    text: str  # stdout and stderr
    # (system, benchmark) -> "passed", or the first complaint; from the package checker.
    verdicts: dict[tuple[str, str], str] = field(default_factory=dict)
    # (system, benchmark) -> score in minutes; from the summarizer.
    scores: dict[tuple[str, str], float] = field(default_factory=dict)


def system_description(path: Path, ruleset: str) -> ToolVerdict:
    """Return the verdict of the system description checker on the file at `path`."""
    text = run_tool("system_desc_checker", str(path.resolve()), "training", ruleset)
    return _tool_verdict("system_desc_checker", text, "System description checker passed" in text)


def package(org_dir: Path, ruleset: str, sets: int, missed: int = 0) -> ToolVerdict:
    """Return the verdict of the package checker: number of files, compliance, seeds and RCP.

    `org_dir`: directory of the submission. `sets`: number of its result sets. `missed`: number of
    result sets with a run that did not converge, which olympic scoring accepts.

    The checker skips directories that it does not know, and accepts one bad log in each result set.
    Therefore every result set must have passed its RCP test, and the number of accepted logs must
    be exactly `missed`.
    """
    text = run_tool("package_checker", str(org_dir.resolve()), "training", ruleset)
    parts = re.split(r"Running compliance checks in dir (.+)\n", text)
    verdicts = {}
    for folder, output in zip(parts[1::2], parts[2::2], strict=True):
        errors = []
        for line in output.splitlines():
            if re.search(r"^ERROR\b|Traceback|^\w*Error\b", line):
                errors.append(line.strip())
        verdict = "passed"
        if errors:
            verdict = errors[0][:60]
        elif "RCP Test Passed" not in output:
            verdict = "no RCP test"
        verdicts[Path(folder).parent.name, Path(folder).name] = verdict
    passed = (
        "PACKAGE CHECKER FOUND NO ERRORS, SUCCESS !" in text
        and len(verdicts) == sets
        and set(verdicts.values()) == {"passed"}
        and text.count("accepting this under olympic scoring") == missed
    )
    return replace(_tool_verdict("package_checker", text, passed), verdicts=verdicts)


def summary(org_dir: Path, ruleset: str, sets: int, missed: int = 0) -> ToolVerdict:
    """Return the summarizer's verdict, with the score of each result set in minutes.

    Call `package` before: the package checker writes the RCP factors that the summarizer reads.
    `sets` and `missed`: as in `package`.
    """
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "summary.csv")
        text = run_tool(
            "result_summarizer", str(org_dir.resolve()), "training", ruleset, "--csv", str(table)
        )
        rows = list(csv.DictReader(table.open())) if table.is_file() else []
    scores = {}
    for row in rows:
        for name in benchmarks.names():
            if row.get(name):
                scores[Path(row["details_url"]).stem, name] = float(row[name])
    dropped = text.count("Dropping non-converged run(s)")
    refused = text.count("Compliance check failed in")
    passed = len(scores) == sets and dropped == missed == refused
    return replace(_tool_verdict("result_summarizer", text, passed, missed), scores=scores)


def repository(org_dir: Path, ruleset: str) -> ToolVerdict:
    """Return the verdict of the repo checker on the files in `org_dir`."""
    text = run_tool("repo_checker", str(org_dir.resolve()), "training", ruleset)
    return _tool_verdict("repo_checker", text, "ALL CHECKS PASSED." in text)


def _tool_verdict(tool: str, text: str, reported_success: bool, accepted: int = 0) -> ToolVerdict:
    """Return the verdict of `tool` from its output `text`.

    It passed if it reported success and its output has at most `accepted` lines with an error.
    """
    bad = [line.strip() for line in text.splitlines() if BAD_LINE.search(line)]
    if reported_success and len(bad) <= accepted:
        return ToolVerdict(tool, True, (), text)
    if not bad:
        bad = [f"{tool} did not report success; its output ends with: {text.strip()[-300:]!r}"]
    return ToolVerdict(tool, False, tuple(bad), text)


def run_tool(tool: str, *arguments: str) -> str:
    """Run a program of mlperf-logging in an empty directory; return its stdout and stderr."""
    checker_version()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", f"mlperf_logging.{tool}", *arguments]
        return subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder
        ).stdout
