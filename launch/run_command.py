"""Train to the target, then check the log.

NEXP=10 makes ten good runs. A run is good if it reaches the target and its log passes the checks.
After a failed attempt another one starts, until more than --max-failures have failed. Every attempt
has its own directory and a random seed, and starts with an empty page cache. SEED sets the seed of
a single run, for debugging. LOGDIR/<benchmark>/attempts.jsonl records the start and end of every
attempt. No result is ever overwritten.

--checkpoint saves the training state in checkpoints/ of the run's directory and keeps the newest
one. --continue RUN resumes from there in a new directory, on any number of GPUs. Seed, config,
options and directories are those of RUN. The clock starts again from zero, so `package` refuses the
run. See docs/checkpoints.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from common.benchmarks import divisions, names_mlperf
from common.command_line import Parser, refuse_without
from common.config import RunConfig
from common.errors import ConfigError
from common.paths import ROOT
from common.records.rcp import SUBMISSION_RUNS
from common.records.trackers import TRACKERS
from common.terminal import inform, plural
from common.training.log_keys import submission_texts
from common.values import number_between, seconds
from launch import run_directory, series, system_settings
from launch.job import ensure_data, job_from, trainer_command
from launch.job_command import (
    job_main,
    job_parser,
    note_refusal,
    print_header,
    require_software,
    ships_configs,
)
from launch.processes.supervise import GRACE_S
from launch.run import run_all
from launch.selection.request import OF_CONFIG
from submission.prerequisites import ORG, refusal_reasons, require_names

ABOUT_OWN = """Train the model that the config describes, and save it in RUN/model.

LoRA's adapters are saved in RUN/adapter instead.

The training state is saved every ten minutes and at Ctrl-C. --continue RUN goes on from there in a
new directory, on any number of GPUs. Seed, config, options and directories are those of RUN. Only
the newest state is kept, in RUN/checkpoints, with 12 bytes per trained weight. --checkpoint sets
another interval, --checkpoint none saves nothing. See docs/checkpoints.md.

A run succeeds after max_samples sequences or, if the config sets target_loss, at the first
evaluation at or below it. NEXP=3 trains three models. Each run has its own directory and a random
seed; SEED sets the seed of a single run. LOGDIR/<benchmark>/attempts.jsonl records the start and
end of every attempt. No result is ever overwritten.
"""
EXAMPLES = ("{}", "{} --set max_samples=2048", "{} --config {} --print")


def parser(benchmark: str) -> Parser:
    """Return the argument parser of `run`."""
    shipped = ships_configs(benchmark)
    note = "; such a run cannot be submitted" if shipped else ""
    about = __doc__ if shipped else ABOUT_OWN
    parser = job_parser(benchmark, "run", about, EXAMPLES, note)
    parser.add_argument(
        "--max-failures",
        type=int,
        metavar="N",
        help="end the series after more than N failed attempts "
        f"(default: {series.MAX_FAILURES}; 0 for a single run)",
    )
    parser.add_argument(
        "--name",
        type=_name,
        help="name in the directories of the runs, instead of the config's",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue the last unfinished series in LOGDIR, with the same config, code, data and "
        "GPUs; a larger NEXP adds runs",
    )
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="with --resume, also if the series' launcher is on another machine or in another "
        "container and has not been heard of for ten minutes",
    )
    parser.add_argument(
        "--no-submission",
        action="store_true",
        help="with NEXP of at least 10: start the series although package would refuse its runs, "
        "for example in a checkout with changes"
        if shipped
        else argparse.SUPPRESS,
    )
    _add_options_of_one_run(parser, shipped)
    parser.variables = (*OF_CONFIG, "NEXP", "SEED", "DATADIR", "LOGDIR")
    if any(rules.lora_rank for rules in divisions(benchmark).values()):
        parser.variables += ("MODEL",)
    return parser


def _add_options_of_one_run(parser: Parser, shipped: bool) -> None:
    parser.add_argument(
        "--save",
        action="store_true",
        help="after the clock stops, save the trained model for transformers in model/ of the "
        "run's directory"
        if shipped
        else argparse.SUPPRESS,  # such a run always saves it
    )
    parser.add_argument(
        "--system-tuning",
        action="store_true",
        help="apply the settings of `system-tuning apply` for the duration of the run (needs sudo) "
        "and restore them afterwards",
    )
    parser.add_argument(
        "--track",
        action="append",
        default=[],
        choices=TRACKERS,
        help="send losses, speed, GPU samples and config to this package during the run",
    )
    parser.add_argument(
        "--checkpoint",
        metavar="WHEN",
        help="save the training state: 2 for every second evaluation, 10m for every ten minutes, "
        f"none for never (default: {'none' if shipped else '600s, on one node'})",
    )
    parser.add_argument(
        "--grace",
        type=number_between(1, 86400, seconds),
        metavar="SECONDS",
        help="time after a signal to save a checkpoint and end, if the run saves any "
        f"(default: {GRACE_S:g})",
    )
    parser.add_argument(
        "--continue",
        dest="continues",
        type=Path,
        metavar="RUN",
        help="resume from the checkpoint in this run's directory; auto: continue the last "
        "unfinished run with this config, if there is one"
        + (" (for research only; cannot be submitted)" if shipped else ""),
    )


def _name(text: str) -> str:
    """Parse --name, which becomes part of the name of a directory."""
    if not re.fullmatch(r"[A-Za-z0-9_.+=-]{1,60}", text):
        raise argparse.ArgumentTypeError(f"'{text}' is not 1 to 60 letters, digits and _.+=-")
    return text


def start(benchmark: str, options: argparse.Namespace) -> int:
    """Start one timed run or a series, or print its command with --print. Return the exit code.

    Raises the errors of `job_from`, and ConfigError for options that conflict, for a name that
    cannot be submitted, and for a series that cannot.
    """
    if not options.resume:
        refuse_without("--resume", {"--take-over": options.take_over})
    request = series.request_from(
        os.environ, options.max_failures, options.resume, options.take_over
    )
    require_names(os.environ)
    request = replace(request, name=options.name or "")
    submission_texts(os.environ)  # raises ConfigError now, instead of in the ranks
    if options.continues:  # also if --continue auto finds no run
        series.require_single_run(request)
    job = job_from(benchmark, options)
    if job.continues:
        request = series.continued(request, job.continues, benchmark, job.config)
    print_header(job, (job.data_dir, job.log_dir))
    if job.checkpoint:
        inform(f"saves      the training state: --checkpoint {job.checkpoint}, and at Ctrl-C")
    if not job.config.miniature and names_mlperf(benchmark, job.config):
        inform(_final_line(job.config, request.goal))
        _judge_checkout(request.goal, options.no_submission)
        if not options.system_tuning and (advice := system_settings.advice()):
            inform(f"NOTE       {advice}: {system_settings.remedy()}")
    require_software(job, only_note=options.print)
    if options.print:
        run_directory.require_possible(job.log_dir / benchmark)
        if not job.config.miniature:  # whose data a run builds
            note_refusal(ensure_data, job)
        print(shlex.join(trainer_command(job, Path("DIR"), 0)))
        return 0
    with system_settings.applied(ROOT) if options.system_tuning else contextlib.nullcontext():
        return run_all(job, request)


def _final_line(config: RunConfig, goal: int) -> str:
    """Return the line on what no later command can change: names in the log, and number of runs.

    `goal`: number of good runs, 0 for that of the resumed series.
    """
    texts = submission_texts(os.environ, config.platform)
    named = []
    for key, words in (("org", "organization"), ("platform", "platform"), ("status", "status")):
        is_default = f"MLPERF_SUBMISSION_{key.upper()}" not in os.environ
        named.append(f'{words} "{texts[key]}"{" (default)" if is_default else ""}')
    runs = plural(goal, "run") if goal else "as many runs as the series has"
    return f"log        {', '.join(named)}; {runs}"


def _judge_checkout(goal: int, no_submission: bool) -> None:
    """Print a note on each reason why `package` would refuse the runs.

    Raise ConfigError for a series of ten or more, unless no submission is meant.
    """
    reasons = refusal_reasons(ROOT, os.environ)
    if reasons and goal >= SUBMISSION_RUNS and not no_submission:
        raise ConfigError(
            f"package would refuse these {goal} runs",
            "; ".join(reasons),
            f"commit, ignore or remove the files, and set {ORG}; or add --no-submission, if the"
            " runs are not meant for a submission",
        )
    for reason in reasons:
        inform(f"NOTE       {reason}: package will refuse these runs")


main = job_main("run", parser, start)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
