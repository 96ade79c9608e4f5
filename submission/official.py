"""The official tools of mlperf-logging that look at a whole submission, run as programs; their text is believed, never their exit code.

All four end with 0 whatever they found, so success is what each says in words, and nothing in its text that speaks against it.
They run in a directory of their own: they leave log files wherever they are started. Standard library only.
"""

from __future__ import annotations

import csv
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from submission.checker import checker_version

LIMIT_S = 600.0
BAD_LINE = re.compile(
    r"\bERROR\b|Traceback|^\w*(Error|Exception)\b|Skipping benchmark|CHECKS FAILED|FOUND ERRORS|Compliance check failed in"
)


@dataclass(frozen=True)
class Answer:
    """What one tool said about one submission."""

    tool: str
    passed: bool
    complaints: tuple[str, ...]
    text: str  # all that it printed
    scores: dict[str, float] = field(default_factory=dict)  # minutes by benchmark, of the summarizer


def system_description(path: Path, ruleset: str) -> Answer:
    """Raises PreflightError where mlperf-logging is missing or too old; so do the others here."""
    text = _run("system_desc_checker", str(path.resolve()), "training", ruleset)
    return _answer("system_desc_checker", text, "System description checker passed" in text)


def package(org_dir: Path, ruleset: str, benchmarks: int, missed: int = 0) -> Answer:
    """Number of files, compliance, seeds and RCP. `missed`: how many result sets hold the one run that olympic scoring forgives.

    The checker skips what it does not know and forgives any one log; here each of `benchmarks` result sets must have passed
    its RCP test, and no more logs may be forgiven than `missed`.
    """
    text = _run("package_checker", str(org_dir.resolve()), "training", ruleset)
    passed = "PACKAGE CHECKER FOUND NO ERRORS, SUCCESS !" in text and text.count("RCP Test Passed") == benchmarks
    return _answer("package_checker", text, passed and text.count("accepting this under olympic scoring") == missed)


def summary(org_dir: Path, ruleset: str, benchmarks: list[str], missed: int = 0) -> Answer:
    """The score of each benchmark, with the RCP factor if the package checker ran before (it writes the factor that this one reads)."""
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "summary.csv")
        text = _run("result_summarizer", str(org_dir.resolve()), "training", ruleset, "--csv", str(table))
        rows = list(csv.DictReader(table.open())) if table.is_file() else []
    scores = {name: float(rows[0][name]) for name in benchmarks if len(rows) == 1 and rows[0].get(name)}
    forgiven = text.count("Dropping non-converged run(s)") == missed == text.count("Compliance check failed in")
    answer = _answer("result_summarizer", text, set(scores) == set(benchmarks) and forgiven, missed)
    return Answer(answer.tool, answer.passed, answer.complaints, text, scores)


def repository(org_dir: Path, ruleset: str) -> Answer:
    text = _run("repo_checker", str(org_dir.resolve()), "training", ruleset)
    return _answer("repo_checker", text, "ALL CHECKS PASSED." in text)


def _answer(tool: str, text: str, said_success: bool, forgiven: int = 0) -> Answer:
    bad = [line.strip() for line in text.splitlines() if BAD_LINE.search(line)]
    passed = said_success and len(bad) <= forgiven
    complaints = tuple(bad) if bad or passed else (f"{tool} did not say that all is well; its last words: {text.strip()[-300:]!r}",)
    return Answer(tool, passed, () if passed else complaints, text)


def _run(tool: str, *arguments: str) -> str:
    checker_version()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", f"mlperf_logging.{tool}", *arguments]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"ERROR: {tool} gave no answer within {LIMIT_S:.0f} s"
    return done.stdout
