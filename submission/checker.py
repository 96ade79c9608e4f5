"""The official MLPerf compliance checker, run as a program of its own; its text and its exit code must agree.

The closed division has the checker's own rule files. A miniature has ours: the closed rules with the numbers of the benchmark's
`rules.MINIATURE`, filled into a template, because the official files fix the sequence length and the target.
Standard library only; the checker comes with the package mlperf-logging.
"""

from __future__ import annotations

import importlib.metadata
import string
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError, PreflightError
from llama2_70b_lora import rules as llama2_70b_lora_rules
from llama31_8b import rules as llama31_8b_rules

CLOSED_RULESETS = ("5.1.0", "6.0.0", "6.1.0")
OLDEST_CHECKER = (4, 1, 68)  # 4.1.59 does not yet demand the nine disclosure keys of 6.1.0
INSTALL = f"pip install mlperf-logging=={'.'.join(map(str, OLDEST_CHECKER))}"
TEMPLATES = Path(__file__).parent
MINIATURES = {rules.BENCHMARK: rules.MINIATURE for rules in (llama31_8b_rules, llama2_70b_lora_rules)}
CHECK_LIMIT_S = 120.0
# How the checker's own complaints begin; the rest of its text repeats log lines and its internal state.
COMPLAINTS = ("CHECK for", "failed test:", "Required ", "Failed ", "^^", "Could not find", "Log lines had", "No log lines")


@dataclass(frozen=True)
class Verdict:
    rules: str  # a ruleset such as 6.1.0, or miniature
    passed: bool
    messages: tuple[str, ...]


def closed_verdict(log: Path, ruleset: str) -> Verdict:
    """What the official checker says about `log` under `ruleset`. Raises PreflightError where there is no usable checker."""
    return _run(log, ruleset, ["--ruleset", ruleset])


def miniature_verdict(log: Path, benchmark: str) -> Verdict:
    """The same checker with the project's rules for the miniature. Raises PreflightError, ConfigError for an unknown benchmark."""
    if benchmark not in MINIATURES:
        known = ", ".join(MINIATURES)
        raise ConfigError(f"{log}: no rules for a miniature of {benchmark!r}", f"known are {known}", "check the log's first lines")
    with tempfile.TemporaryDirectory() as folder:
        rule_file = Path(folder, f"miniature_{benchmark}.yaml")
        rule_file.write_text(miniature_rules(benchmark))
        return _run(log, "miniature", ["--config", str(rule_file)])


def miniature_template(benchmark: str) -> string.Template:
    return string.Template("\n".join((TEMPLATES / f"miniature_{part}.yaml").read_text() for part in ("common", benchmark)))


def miniature_rules(benchmark: str) -> str:
    """The rule file of the miniature, with the constants of the benchmark's `rules.MINIATURE` filled in under their own names."""
    rules = MINIATURES[benchmark]
    return miniature_template(benchmark).substitute(vars(rules), benchmark=benchmark, init_limit_ms=rules.init_limit_s * 1000)


def checker_version() -> str:
    """Version of the installed mlperf-logging. Raises PreflightError if there is none, or one too old to know 6.1.0."""
    try:
        version = importlib.metadata.version("mlperf-logging")
    except importlib.metadata.PackageNotFoundError:
        raise PreflightError(
            "the official compliance checker is not installed", f"{sys.executable} has no mlperf-logging", INSTALL
        ) from None
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if numbers < OLDEST_CHECKER:
        raise PreflightError(f"mlperf-logging {version} is too old", "it lets logs pass that lack the keys of 6.1.0", INSTALL)
    return version


def _run(log: Path, rules: str, arguments: list[str]) -> Verdict:
    checker_version()
    with tempfile.TemporaryDirectory() as folder:
        log_output = Path(folder, "checker.log")  # the checker appends: a file used twice keeps old verdicts
        command = [sys.executable, "-m", "mlperf_logging.compliance_checker", "--usage", "training", *arguments]
        command += ["--werror", "--log_output", str(log_output), str(log.resolve())]
        try:
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=CHECK_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return Verdict(rules, False, (f"the checker gave no verdict within {CHECK_LIMIT_S:.0f} s",))
        text = log_output.read_text(errors="replace") if log_output.exists() else ""
    if "No module named" in done.stderr:
        raise PreflightError("the official compliance checker cannot start", done.stderr.strip().splitlines()[-1], INSTALL)
    return _verdict(rules, done.returncode, text, done.stderr)


def _verdict(rules: str, exit_code: int, text: str, stderr: str) -> Verdict:
    last = text.strip().splitlines()[-1] if text.strip() else ""
    if exit_code == 0 and last == "INFO - SUCCESS":
        return Verdict(rules, True, ())
    if last != "ERROR - FAILED":
        reason = stderr.strip().splitlines()[-1] if stderr.strip() else "it said nothing"
        return Verdict(rules, False, (f"the checker broke off without a verdict (exit code {exit_code}): {reason}",))
    return Verdict(rules, False, _complaints(text))


def _complaints(text: str) -> tuple[str, ...]:
    lines = [line.removeprefix("WARNING - ").strip() for line in text.splitlines()]
    return tuple(line for line in lines if line.startswith(COMPLAINTS)) or (text.strip(),)
