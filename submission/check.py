"""Check MLPerf logs with the official checker and with additional rules.

Each log gets the verdict of the official compliance checker, and the findings of additional rules.
A log with an error is NOT CLEAN. A warning is a violation of the written rules that the official
tools accept: a log with warnings and no errors is ACCEPTED. A log without either is CLEAN, whether
it has notes or not. Each finding names its line, rule and source.

Logs that this project wrote must also follow its own conventions (docs/submission.md#check). The
log names its benchmark. Without --ruleset, the keys and the date of the log decide the ruleset, and
a miniature is checked by the miniature's rules. With --ruleset, every log is checked by that closed
ruleset. A folder stands for all result.txt and result_<n>.txt below it, also one that `package`
wrote. The files result_<n>.txt of one folder are a result set: the newest round that one of them
shows decides the ruleset of all, and they get one verdict together, which allows one run that did
not converge. Logs that are named one by one are no set.

Exit code 0 if no result set and no other log has an error (with --werror: nor a warning), 20 if one
has, 2 for wrong usage or an unreadable log, 17 if the disk fails, 18 without the official checker.
Nothing is written.
"""

from __future__ import annotations

import sys
from pathlib import Path

from common.command_line import Parser, program
from common.errors import CheckFailed, ConfigError, StorageError, failure_of
from common.folder_walk import walk
from common.records.ledger import LOG
from submission import official_tools, result_set
from submission.check_output import json_line, lines, set_lines
from submission.examined_log import (
    ACCEPTED,
    CLEAN,
    NOT_CLEAN,
    ExaminedLog,
    examine,
    verdict_of,
)
from submission.official_tools import RULESETS
from submission.options import runs_folder
from submission.run import NUMBERED_LOG


def parser() -> Parser:
    """Return the argument parser of `check`."""
    parser = Parser(
        "check",
        __doc__,
        ["check results/llama31_8b/*/result.txt", "check DIR --json"],
    )
    parser.add_argument(
        "paths",
        type=runs_folder,
        nargs="+",
        metavar="LOG_OR_FOLDER",
        help="log, or folder with logs in it or below it; a benchmark means LOGDIR/<benchmark>",
    )
    parser.add_argument(
        "--ruleset", choices=RULESETS, help="MLPerf ruleset (default: detected from the log)"
    )
    parser.add_argument(
        "--werror",
        action="store_true",
        help="treat warnings as errors, including the official checker's",
    )
    parser.add_argument(
        "--json", action="store_true", dest="as_json", help="print one JSON object per log"
    )
    return parser


def _check_all(paths: list[Path], ruleset: str | None, werror: bool, as_json: bool) -> int:
    """Check the logs at `paths`, print their verdicts, and return the exit code of the command.

    Raises ConfigError if a folder has no logs, PreflightError without the official checker.
    """
    logs: list[Path] = []
    sets: dict[Path, list[ExaminedLog]] = {}
    for path in paths:
        named = _logs(path)
        logs += named
        if path.is_dir():
            sets |= result_set.folders(named)
    set_rounds: dict[Path, list[str]] = {}
    if not ruleset:
        set_rounds = {folder: result_set.shown_rounds(folder) for folder in sets}
    version = official_tools.checker_version()
    if not as_json:
        suffix = ", warnings are errors (--werror)" if werror else ""
        print(f"official checker: mlperf-logging {version}{suffix}")
    codes = []
    verdicts = []
    for path in logs:
        try:
            examined = examine(path, ruleset, set_rounds=set_rounds.get(path.parent, ()))
        except (ConfigError, StorageError) as error:
            failure = failure_of(error) or error
            print(failure.lines(), file=sys.stderr)
            codes.append(failure.exit_code)
            continue
        print(json_line(examined, werror) if as_json else "\n".join(lines(examined, werror)))
        verdict = verdict_of(examined.findings, werror)
        verdicts.append(verdict)
        if path.parent in sets and NUMBERED_LOG.fullmatch(path.name):
            sets[path.parent].append(examined)
        elif verdict == NOT_CLEAN:
            codes.append(CheckFailed.exit_code)
    for folder, members in sets.items():
        print("\n".join(set_lines(folder, members, werror, as_json)))
        if result_set.verdict(members, werror) == NOT_CLEAN:
            codes.append(CheckFailed.exit_code)
    if len(logs) > 1 and not as_json:
        counts = ", ".join(
            f"{verdicts.count(verdict)} {verdict.lower()}"
            for verdict in (CLEAN, ACCEPTED, NOT_CLEAN)
        )
        print(f"\n{len(logs)} logs: {counts}")
    for code in (StorageError.exit_code, ConfigError.exit_code, CheckFailed.exit_code):
        if code in codes:
            return code
    return 0


def _logs(path: Path) -> list[Path]:
    """Return the logs that `path` stands for: itself, or all logs below a folder.

    Raises ConfigError if a folder has none.
    """
    if not path.is_dir():
        return [path]
    logs = []
    for folder, _, names in walk(path):
        own = [name for name in names if name == LOG or NUMBERED_LOG.fullmatch(name)]
        logs += [folder / name for name in own]
    logs = [log for log in logs if log.is_file()]
    if not logs:
        raise ConfigError(
            f"{path}: no log",
            f"there is no {LOG} and no result_<n>.txt in it or below it",
            "name a log, or the folder of a run or of a result set",
        )
    return sorted(logs, key=lambda log: (log.parent, len(log.name), log.name))


main = program(parser, lambda options: _check_all(**vars(options)))

if __name__ == "__main__":
    sys.exit(main())
