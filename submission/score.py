"""Score a series of runs and test it against the reference convergence points.

The logs may come from any submitter to our benchmarks: LOGDIR/<benchmark> with its ledger (its
benchmark means it too), a folder of result_<n>.txt, single logs, or a directory that `package`
wrote, of which each result set is scored. RESULT is another directory, or words that name a
published result (--against "AMD MI300X 5.1"). With --against, the first argument may also be such
words. Without it, the best published result on the same GPUs is used. Which ten runs count is in
docs/submission.md. The RCP test uses the pruned points, as the official tools do.

Exit code 0 if the series has a score, or is a miniature of which at most one run did not converge;
20 if the RCP test failed or the series is not valid, 2 for wrong usage, 18 without mlperf-logging.
Nothing is written.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.benchmarks import OPEN
from common.command_line import PROGRAM, Parser, complete, program
from common.errors import CheckFailed, ConfigError
from common.folder_walk import walk
from common.gpu_kinds import KINDS
from common.records import ledger, published
from common.records.published import Published
from common.values import count, gpu_kind, path
from submission.comparison import comparison, comparison_as_dict
from submission.official_tools import BY_HAND, RULESETS
from submission.options import add_series_option, runs_folder
from submission.published_results import best_published, find, listed, listing, matching
from submission.run import numbered_logs
from submission.score_output import as_dict, report
from submission.series import check_same, read_series, result, ten_runs


class ScoreParser(Parser):
    """The parser of `score`: logs are required unless --list is given."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options = super().parse_args(args, namespace)
        if not options.logs and options.list is None:
            self.error("the following arguments are required: DIR_OR_LOG")
        return options


def parser() -> Parser:
    """Return the argument parser of `score`."""
    parser = ScoreParser(
        "score",
        __doc__,
        [
            "score results/llama31_8b",
            "score results/llama31_8b --json",
            'score "AMD MI300X 5.1" --against "AMD MI300X 5.0"',
            "score --list H200",
        ],
    )
    parser.add_argument(
        "logs",
        type=lambda text: str(runs_folder(text)),
        nargs="*",
        metavar="DIR_OR_LOG",
        help="LOGDIR/<benchmark>, a folder of result_<n>.txt, a submission, or a log;"
        " with --against also words of a published result",
    )
    against = parser.add_argument(
        "--against",
        metavar="RESULT",
        help="another directory, or words of a published result, to compare with"
        " (default: the best published result on the same GPUs)",
    )
    parser.add_argument(
        "--list",
        nargs="?",
        const="",
        type=gpu_kind,
        metavar="GPU",
        help="list the published results, for all GPU kinds or for one, and exit",
    )
    parser.add_argument(
        "--ruleset",
        choices=RULESETS,
        default="",
        help="MLPerf ruleset (default: detected from the log)",
    )
    gpu = parser.add_argument(
        "--gpu",
        type=gpu_kind,
        metavar="KIND",
        help="GPU kind, such as H200, if the logs do not name it",
    )
    complete(gpu, KINDS)
    complete(against, {row.gpu: None for row in published.RESULTS if row.gpu})
    parser.add_argument(
        "--gpus", type=count, metavar="N", help="number of GPUs, if the logs do not give it"
    )
    add_series_option(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _score(options: argparse.Namespace) -> int:
    """Print the list, the score or the comparison; return the exit code.

    Raises ConfigError if a result cannot be found or read, PreflightError without mlperf-logging.
    """
    if options.list is not None:
        return _list_published(options)
    is_comparison = options.against is not None and len(options.logs) == 1
    if is_comparison and not path(options.logs[0]).exists():
        return _compare_published(options)
    return _score_series(options)


def _list_published(options: argparse.Namespace) -> int:
    """Print the published results of --list; return 0."""
    if options.json:
        print(json.dumps([asdict(row) for row in listed(options.list)], indent=1))
    else:
        print("\n".join(listing(options.list)))
    return 0


def _compare_published(options: argparse.Namespace) -> int:
    """Print the comparison of a published result with --against; return 0."""
    mine = find(options.logs[0])
    other = find(options.against, options.ruleset, mine)
    if options.json:
        print(json.dumps(comparison_as_dict(mine, other), indent=1))
    else:
        print("\n".join(comparison(mine, other)))
    return 0


def _score_series(options: argparse.Namespace) -> int:
    """Print the score of the series at the given paths, and a comparison; return the exit code."""
    for name in options.logs:
        _require_logs(name)
    if len(options.logs) == 1 and (sets := _sets_below(path(options.logs[0]))):
        codes = []
        for folder in sets:
            if not options.json:
                print(f"--- {folder}")
            of_folder = vars(options) | {"logs": [str(folder)]}
            codes.append(_score_series(argparse.Namespace(**of_folder)))
        return max(codes)
    series = read_series([path(name) for name in options.logs], options.series, options.ruleset)
    for run in series.runs:
        run.gpu = options.gpu or run.gpu
        run.gpus = options.gpus or run.gpus
    if series.first.division == OPEN:
        raise ConfigError(
            f"{series.name} is a series in the open division",
            "a score needs reference convergence points, and there are none for its rules",
            "see its results with ./run_and_time.sh report or runs; MLCommons' summarizer computes"
            f" the score of an open entry: {BY_HAND}",
        )
    check_same(series)
    ten = ten_runs(series)
    mine = result(series, ten)
    other: Published | None = None
    if options.against is not None:
        other = find(options.against, options.ruleset, mine)
    elif not series.first.is_miniature:
        other = best_published(mine)
    if options.json:
        facts = {**as_dict(series, ten), "against": comparison_as_dict(mine, other)}
        print(json.dumps(facts, indent=1))
    elif series.first.is_miniature and other is None:
        print("\n".join(report(series, ten)))
    else:
        lines = ["", "comparison with another result", *comparison(mine, other)]
        print("\n".join([*report(series, ten), *lines]))
    return 0 if ten.passed else CheckFailed.exit_code


def _sets_below(folder: Path) -> list[Path]:
    """Return the folders of the result sets below `folder`, as in the tree of a submission.

    There are none if `folder` itself is a series.
    """
    if not folder.is_dir() or (folder / ledger.NAME).is_file() or numbered_logs(folder):
        return []
    return sorted(path for path, _, _ in walk(folder) if path != folder and numbered_logs(path))


def _require_logs(name: str) -> None:
    """Raise ConfigError if `name` is not a path but words of a published result."""
    if path(name).exists() or not matching(name):
        return
    raise ConfigError(
        f"{name!r} names a published result, not a directory or log",
        "a published result has a score already, and can only be compared with another one",
        f'{PROGRAM} score "{name}" --against RESULT, or score --list for all results',
    )


main = program(parser, _score)

if __name__ == "__main__":
    sys.exit(main())
