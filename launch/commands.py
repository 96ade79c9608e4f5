"""Command line of `run`, `bench` and `profile`: `python -m launch.commands COMMAND BENCHMARK`.

NEXP=10 makes ten good runs: the target reached and the log clean. A failed attempt is followed by
another one, until more than --max-failures have failed. Every attempt has its own directory and a
random seed. The page cache is cleared before each attempt. SEED fixes the seed of a single run, for
debugging. LOGDIR/<benchmark>/attempts.jsonl records when every attempt started and how it ended.
Nothing is ever overwritten.

--checkpoint WHEN saves the training state into checkpoints/ in the run's directory and keeps only
the newest checkpoint. --continue RUN resumes from there in a new directory, with the same seed and
config, on the same or another number of GPUs. The new log says so and its clock starts again from
zero, so `package` refuses it. See docs/checkpoints.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
from pathlib import Path

from common.command_line import PROGRAM, Parser, count, exit_code_of
from common.known_issues import installed
from common.paths import ROOT
from common.terminal import inform, outlive_readers
from launch import profilers, series, tuning
from launch.bench import bench, bench_command, profile, profile_directory
from launch.console import header
from launch.job import job_from, trainer_command
from launch.monitor.trackers import TRACKERS
from launch.processes.supervise import raise_at_signals
from launch.run import run_all
from launch.run_directory import doubts
from launch.torch_build import missing_compiler, require_fitting_torch

EXAMPLES = {
    "run": ("{}", "{} --set max_samples=2048", "{} --config configs/{}/CPU_1x1.toml --print"),
    "bench": ("{} bench", "{} bench --steps 20 --layers 4"),
    "profile": (
        "{} profile --steps 3 --out profile",
        "{} profile --memory",
        "{} profile --with nsys",
    ),
}


def parser(name: str, benchmark: str) -> Parser:
    """Return the argument parser of subcommand `name`."""
    about = {
        "run": "Train to the target and check the log."
        + (__doc__ or "")[(__doc__ or "").index("\n\n") :].rstrip()
    }
    about |= {
        "bench": "Measure throughput on synthetic tokens; no data is read.",
        "profile": "The same, then a profile of some steps.",
    }
    parser = Parser(
        f"{benchmark} {name}",
        about[name],
        [line.format(benchmark, benchmark) for line in EXAMPLES[name]],
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--config", metavar="FILE", help="config file (default: selected for the GPUs found)"
    )
    which.add_argument(
        "--miniature",
        action="store_true",
        help="train the toy model, on one GPU of any kind or on the CPU",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change one value; the run is not for submission",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="default: the GPUs if there are any (ROCm's are cuda as well)",
    )
    parser.add_argument(
        "--print", action="store_true", help="print the config and the command, and start nothing"
    )
    if name == "run":
        limit = f"end the series when more than N attempts failed; default {series.MAX_FAILURES}, for a single run 0"
        parser.add_argument("--max-failures", type=int, metavar="N", help=limit)
        same = "with the same config, code, data and GPUs; a larger NEXP adds runs"
        parser.add_argument(
            "--resume",
            action="store_true",
            help=f"continue the last series in LOGDIR that lacks good runs, {same}",
        )
        help_save = "after the clock, write the trained model to model/ of the run's directory, for transformers"
        parser.add_argument("--save", action="store_true", help=help_save)
        help_tune = "make the settings of `tuning apply` while it runs, by sudo, and put them back at its end"
        parser.add_argument("--tune", action="store_true", help=help_tune)
        help_checkpoint = "save the state of training: WHEN is 2 for every second evaluation, 600s for every ten minutes"
        parser.add_argument(
            "--track",
            action="append",
            default=[],
            choices=TRACKERS,
            help="send losses, speed, GPU samples and config to this package during the run",
        )
        parser.add_argument("--checkpoint", metavar="WHEN", help=help_checkpoint)
        help_continue = (
            "go on from the checkpoint in this run's directory; for research, never for submission"
        )
        parser.add_argument(
            "--continue",
            dest="continues",
            type=lambda run: Path(run).absolute(),
            metavar="RUN",
            help=help_continue,
        )
    else:
        for key, text in {
            "steps": "measure N steps",
            "warmup": "after N steps",
            "layers": "of a model with N layers",
        }.items():
            parser.add_argument(
                f"--{key}",
                type=count,
                metavar="N",
                help=text,
                default=2 if (name, key) == ("profile", "steps") else None,
            )
        parser.add_argument(
            "--eval-sequences",
            type=count,
            metavar="N",
            help="time an evaluation of N sequences as well",
        )
    if name == "profile":
        parser.add_argument(
            "--out", type=Path, metavar="DIR", help="default: a new directory in LOGDIR/profiles"
        )
        other = parser.add_mutually_exclusive_group()
        other.add_argument(
            "--memory",
            action="store_true",
            help="instead of the time: what holds a GPU's memory at its peak",
        )
        help_with = f"instead: rank 0 under {', '.join(profilers.TOOLS)}; further options of it may follow its name, in quotes"
        other.add_argument("--with", dest="tool", metavar="TOOL", help=help_with)
    return parser


def main(arguments: list[str]) -> int:
    outlive_readers()
    raise_at_signals()
    name, benchmark, *rest = arguments

    def work() -> int:
        options = parser(name, benchmark).parse_args(rest)
        options.command = shlex.join([PROGRAM, benchmark, name, *rest])
        return start(benchmark, name, options)

    return exit_code_of(work)


def start(benchmark: str, name: str, options: argparse.Namespace) -> int:
    request = (
        series.request_from(os.environ, options.max_failures, options.resume)
        if name == "run"
        else None
    )
    job = job_from(benchmark, options, measurement=name != "run")
    if request and job.continues:
        request = series.continued(request, job.continues, benchmark, job.config)
    inform(
        *header(
            benchmark,
            job.selection,
            job.rules,
            (job.data_dir, job.log_dir) if request else None,
            job.cpus,
        )
    )
    if job.selection.device == "cuda":
        inform(*job.engines.lines())
    if request and not job.config.miniature:
        inform(
            *(
                f"NOTE       {doubt}: package will refuse these runs"
                for doubt in doubts(ROOT, os.environ)
            )
        )
        if not options.tune and (advice := tuning.advice()):
            inform(
                f"NOTE       {advice}: ./run_and_time.sh tuning check; --tune sets them for this run"
            )
    if name == "profile":
        options.out = profile_directory(job, options)
    if options.print:
        print(
            shlex.join(
                trainer_command(job, Path("DIR"), 0)
                if request
                else bench_command(job, Path("DIR"), options)
            )
        )
        return 0
    if job.selection.device == "cuda":
        require_fitting_torch(job.gpus, installed(job.gpus.driver), os.environ)
        if missing := missing_compiler():
            inform(f"NOTE       {missing}")
    if request:
        with tuning.tuned(ROOT) if options.tune else contextlib.nullcontext():
            return run_all(job, request)
    return profile(job, options) if name == "profile" else bench(job, options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
