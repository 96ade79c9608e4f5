"""`python3 -m tests.tools.survey --results DIR`: score all results of a repository.

DIR has the layout of mlcommons' training_results_v*: <submitter>/systems/*.json and
<submitter>/results/<system>/<benchmark>/result_*.txt. The command prints one row for each result
set of our benchmarks. It has the verdicts and scores of the official tools and of this project. For
each of our rules, it has the number of logs with a finding.

With --round 5.1, the command writes the results into common/records/published.json instead. Rows of
other rounds are kept.

Exit code: 0 every score equals the official one (relative difference up to 1e-9), 20 one does not,
2 wrong usage, 17 the table cannot be written, 18 no official tools.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from common import benchmarks
from common.command_line import exit_code_of
from common.errors import CheckFailed, ConfigError, RunError, write_text
from common.records.published import DATA, Published
from common.terminal import Progress
from common.text_tables import number
from submission import official_tools, output, result_set
from submission.examined_log import NOT_CLEAN, ExaminedLog, examine
from submission.findings import ERROR, Finding
from submission.official_tools import CLOSED_RULESETS, RULESETS
from submission.series import read_series, result, ten_runs

TOLERANCE = 1e-9  # relative difference of scores that counts as equal


@dataclass
class ResultSet:
    """The logs of one system and benchmark, with verdicts and scores."""

    folder: Path  # <submitter>/results/<system>/<benchmark>
    examined: list[ExaminedLog] = field(default_factory=list)
    official: str = "no verdict"  # of the package checker: "passed", or its first complaint
    official_score: float | None = None  # minutes, from the summarizer
    score: float | None = None  # minutes, from submission.score

    @property
    def name(self) -> tuple[str, str]:
        """The system and the benchmark."""
        return self.folder.parent.name, self.folder.name

    @property
    def submitter(self) -> Path:
        """The submitter's folder."""
        return self.folder.parents[2]

    @property
    def verdict(self) -> str:
        """CLEAN, ACCEPTED or NOT_CLEAN: the verdict of `check` on the folder."""
        return result_set.verdict(self.examined)

    @property
    def set_findings(self) -> list[Finding]:
        """Findings about the logs as a set."""
        return result_set.findings(self.examined)

    @property
    def scores_agree(self) -> bool:
        """True if our score equals the official one, or cannot be compared with it.

        If a set passed and has no official score, the summarizer crashed, for example on a set with
        power logs.
        """
        if self.official_score is None:
            return self.score is None or self.official == "passed"
        if self.score is None:
            return False
        return math.isclose(self.official_score, self.score, rel_tol=TOLERANCE)

    def logs_by_rule(self) -> Counter[str]:
        """Return, for each of our rules, the number of logs with a finding.

        Findings about the set count as well. Complaints of the official checker do not.
        """
        counts: Counter[str] = Counter()
        for examined in self.examined:
            official = examined.verdict.complaints
            ours = [finding for finding in examined.findings if finding not in official]
            counts.update({_label(finding) for finding in ours})
        counts.update(f"set: {_label(finding)}" for finding in self.set_findings)
        return counts


def _label(finding: Finding) -> str:
    """Return the name of the finding's rule, with its severity unless it is an error."""
    return finding.rule if finding.severity == ERROR else f"{finding.rule} ({finding.severity})"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m tests.tools.survey",
        description="Score all results of a repository, and compare with the official tools.",
    )
    parser.add_argument(
        "--results",
        type=Path,
        required=True,
        metavar="DIR",
        help="checkout of mlcommons/training_results_v*",
    )
    parser.add_argument(
        "--ruleset", choices=RULESETS, help="MLPerf ruleset (default: detected from the logs)"
    )
    parser.add_argument(
        "--round",
        metavar="R",
        help="write the rows of this round (such as 5.1) to the table; do not run the tools",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=DATA,
        metavar="FILE",
        help="table to update with --round (default: common/records/published.json)",
    )
    options = parser.parse_args(arguments)
    if options.round:
        return exit_code_of(
            lambda: write(options.out, options.round, list(rows(options.results, options.round)))
        )
    return exit_code_of(lambda: survey(options.results, options.ruleset))


def result_sets(results: Path) -> list[Path]:
    """Return the folders <submitter>/results/<system>/<benchmark> of our benchmarks in `results`.

    Raises ConfigError if there is none.
    """
    folders = []
    for name in benchmarks.names():
        folders += [path for path in results.glob(f"*/results/*/{name}") if path.is_dir()]
    if not folders:
        raise ConfigError(
            f"{results}: no results",
            "it has no <submitter>/results/<system>/<benchmark> of a known benchmark"
            f" ({', '.join(benchmarks.names())})",
            "name a checkout of mlcommons/training_results_v*",
        )
    return sorted(folders)


# Comparison with the official tools.


def survey(results: Path, ruleset: str | None) -> int:
    """Print the comparison with the official tools; return the exit code.

    `ruleset`: ruleset for the logs (default: chosen by their keys). Raises ConfigError if there are
    no results, PreflightError without the official tools.
    """
    official_tools.checker_version()
    sets = [ResultSet(path) for path in result_sets(results) if any(path.glob("result_*.txt"))]
    with Progress("reading results", len(sets), "sets") as progress:
        for submitter, group in itertools.groupby(sets, lambda each: each.submitter):
            members = list(group)
            _judge_all(submitter, members, ruleset)
            progress.advance(len(members))
    print("\n".join([*table(sets), "", *summary(sets)]))
    return 0 if all(each.scores_agree for each in sets) else CheckFailed.exit_code


def _judge_all(submitter: Path, sets: list[ResultSet], ruleset: str | None) -> None:
    """Set the verdicts and scores of `sets`, which are all sets of one submitter."""
    rulesets: Counter[str] = Counter()
    for each in sets:
        shown = result_set.shown_rounds(each.folder)
        for path in sorted(each.folder.glob("result_*.txt")):
            with contextlib.suppress(ConfigError):  # its set has too few logs
                each.examined.append(examine(path, ruleset, project_root=None, set_rounds=shown))
        rulesets.update(examined.verdict.rules for examined in each.examined)
        each.score = our_score(each.folder, ruleset)
    if not ruleset:
        ruleset = rulesets.most_common(1)[0][0] if rulesets else CLOSED_RULESETS[-1]
    # The summarizer reads the RCP factors that the package checker writes. Both run on a copy that
    # contains only these sets.
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, submitter.name)
        (copy / "systems").mkdir(parents=True)
        for each in sets:
            shutil.copytree(
                each.folder,
                copy / each.folder.relative_to(submitter),
                ignore=shutil.ignore_patterns("scaling.json"),
            )
            system, _ = each.name
            description = submitter / "systems" / f"{system}.json"
            if description.is_file():  # without it, the package checker reports an error
                shutil.copy(description, copy / "systems")
        verdicts = official_tools.package(copy, ruleset, len(sets)).verdicts
        scores = official_tools.summary(copy, ruleset, len(sets)).scores
    for each in sets:
        each.official = verdicts.get(each.name, "no verdict")
        each.official_score = scores.get(each.name)


def our_score(folder: Path, ruleset: str | None) -> float | None:
    """Return the score of the set in `folder` in minutes, with the RCP factor, or None."""
    try:
        return ten_runs(read_series([folder], ruleset=ruleset or "")).score
    except RunError:
        return None


def table(sets: list[ResultSet]) -> list[str]:
    """Return the lines of a table of `sets`. A "!" marks a score that is not the official one."""
    rows = [
        (
            "result set",
            "benchmark",
            "official",
            "ours",
            "official score",
            "our score",
            "our findings: logs by rule",
        )
    ]
    for each in sorted(sets, key=lambda each: (each.folder.name, each.folder)):
        system, benchmark = each.name
        counts = sorted(each.logs_by_rule().items())
        findings = ", ".join(f"{name} {count}" for name, count in counts)
        mark = "" if each.scores_agree else " !"
        rows.append(
            (
                f"{each.submitter.name}/{system}",
                benchmark,
                each.official,
                each.verdict,
                number(each.official_score, ".6f"),
                number(each.score, ".6f") + mark,
                findings or "-",
            )
        )
    return output.table(rows)


def summary(sets: list[ResultSet]) -> list[str]:
    """Return lines with the numbers of sets and logs by verdict, and of equal scores."""
    examined: list[ExaminedLog] = []
    for each in sets:
        examined += each.examined
    verdicts = Counter(each.verdict for each in sets)
    refused = sum(each.verdict == NOT_CLEAN and each.official == "passed" for each in sets)
    let_pass = sum(each.verdict != NOT_CLEAN and each.official != "passed" for each in sets)
    agree = sum(each.scores_agree for each in sets)
    scored = sum(each.official_score is not None for each in sets)
    passed = sum(each.verdict.passed for each in examined)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
    return [
        f"{len(sets)} sets, {len(examined)} logs; the compliance checker passes {passed}",
        f"verdicts: {counts}; {refused} refused only by us, {let_pass} passed only by us",
        f"scores: equal to a relative {TOLERANCE:g} for {agree} of {len(sets)} sets;"
        f" {scored} have an official score",
    ]


# Rows of the published table.


def rows(results: Path, round_: str) -> Iterator[Published]:
    """Yield one row for each result set in `results` that has a result.

    `round_`: round of the results, such as 5.1. Sets without a result are named on stderr. Raises
    ConfigError if there are no sets.
    """
    for folder in result_sets(results):
        try:
            series = read_series([folder])
            ten = ten_runs(series)
        except RunError as error:
            print(f"{folder}: {error.what}: {error.why}", file=sys.stderr)
            continue
        row = replace(
            result(series, ten),
            round=round_,
            submitter=folder.parents[2].name,
            system=folder.parent.name,
        )
        if row.batch is None or row.minutes is None:
            print(f"{folder}: no result: {ten.invalid or 'no global batch'}", file=sys.stderr)
        else:
            yield row


def write(path: Path, round_: str, results: list[Published]) -> int:
    """Replace the rows of `round_` in the table at `path` by `results`; return the exit code.

    Numbers are rounded to seven digits. Raises StorageError if the table cannot be written.
    """
    columns = [column.name for column in fields(Published)]
    table = json.loads(path.read_text()) if path.is_file() else {"sources": {}, "rows": []}
    table["sources"][round_] = (
        f"mlcommons/training_results_v{round_}, result logs and system descriptions"
    )
    rows = [row for row in table["rows"] if row[0] != round_]
    for published in results:
        rows.append([_rounded(getattr(published, column)) for column in columns])
    rows.sort(key=lambda row: [str(value) for value in row[:6]])
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    sources = json.dumps(table["sources"], indent=2)
    head = f'{{"columns": {json.dumps(columns)},\n "sources": {sources},\n "rows": [\n  '
    write_text(path, f"{head}{lines}]}}\n")
    return 0


def _rounded(value: object) -> object:
    return float(f"{value:.7g}") if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
