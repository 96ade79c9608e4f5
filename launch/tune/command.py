"""Search for the fastest config on this machine.

Keys that decide convergence and the format of the linear layers stay as they are. A new directory
in LOGDIR/tune gets the journal, the page, the fastest config, and a folder with config and output
for each measurement.
"""

from __future__ import annotations

import argparse
import glob
import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from common.atomic_write import write_whole
from common.command_line import Parser
from common.errors import ConfigError, Interrupted, RunError
from common.known_issues import installed
from common.paths import ROOT
from common.repository import commit_of
from common.terminal import Progress, inform, print_stderr, shown
from common.values import minutes
from launch import diagnosis, run_directory
from launch.job import Job, job_from, torchrun_command, trainer_environment
from launch.job_command import job_main, job_parser, print_header, require_software
from launch.processes.supervise import kill_processes_of, supervise
from launch.selection.check import MEASURED_ANYWAY
from launch.tune import results
from launch.tune.candidates import Changes, Value, changed, memory_candidates, settings
from launch.tune.search import Journal, Measurement, Search, as_json, text_of, text_of_value
from launch.tune.target import Target

WARMUP_STEPS = {"short": 1, "long": 2}
RESULT = "result.json"
EXAMPLES = ("{} tune", "{} tune --minutes 60", "{} tune --resume --minutes 90")


def parser(benchmark: str) -> Parser:
    """Return the argument parser of `tune`."""
    parser = job_parser(benchmark, "tune", __doc__, EXAMPLES)
    parser.add_argument(
        "--minutes",
        type=minutes,
        default=20,
        metavar="N",
        help="total time limit, including the search that is resumed (default: %(default)s)",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue the newest search in LOGDIR with the same config, commit, packages and GPUs",
    )
    return parser


def start(benchmark: str, options: argparse.Namespace) -> int:
    """Search, print the table, and write page and config; with --print, only name the candidates.

    Return 0. Raises the errors of `job_from` and `fastest`, and ConfigError for a config of several
    nodes.
    """
    job = job_from(benchmark, options, *MEASURED_ANYWAY)
    print_header(job, None)
    if job.config.nodes > 1:
        raise ConfigError(
            f"the config is for {job.config.nodes} nodes",
            "tune starts each measurement on this node only",
            "tune a config for one node, then set nodes in its file",
        )
    require_software(job, only_note=options.print)
    if options.print:
        print_candidates(job)
        return 0
    fastest(Target.of(job), options.minutes, options.resume, options.command)
    return 0


def candidates_of(target: Target) -> tuple[list[Changes], dict[str, list[Value]]]:
    """Return the memory candidates, and the values of each other setting, for this machine."""
    job = target.job
    kind = None
    if job.selection.device == "cuda":
        kind = job.machine.kind
    return (
        memory_candidates(job.config, target.work, kind),
        settings(job.config, target.work, kind, job.environment),
    )


def print_candidates(job: Job) -> None:
    """Print the values that `tune` would try."""
    candidates, values_of_settings = candidates_of(Target.of(job))
    print("memory settings (one candidate per line):")
    for changes in [{}, *candidates]:
        print(f"  {text_of(changes)}")
    print("other settings (recommended value first):")
    for name, values in values_of_settings.items():
        print(f"  {name}: {', '.join(map(text_of_value, values))}")


def fastest(target: Target, minutes: float, resume: bool, command: str) -> results.SearchResult:
    """Search, print the table, and write page and config. Return the result.

    `minutes`: total time limit. `resume`: whether to continue the newest search
        for the target. `command`: the user's command line, for page and config.

    Raises ConfigError for `resume` without a search to resume, Interrupted after a signal, and the
    first failure if no candidate could be measured.
    """
    folder, journal = _open(target, resume)
    budget_s = 60.0 * minutes
    candidates, values_of_settings = candidates_of(target)
    inform(f"tune       {shown(folder)}, at most {minutes:g} min")
    with Progress("tune", budget_s, "s") as progress:

        def on_result(measurement: Measurement) -> None:
            inform(results.line(measurement, len(journal.measurements)))

        measure = _measure(target, folder, journal)
        config = target.job.config
        search = Search(config, journal, measure, budget_s, progress.at, on_result)
        finished = search.run(candidates, values_of_settings)
    if not any(each.outcome == "done" for each in journal.measurements):
        raise _failure(journal, folder)
    result = results.SearchResult(target, journal, search.best, command)
    _conclude(result, folder, finished)
    return result


def _open(target: Target, resume: bool) -> tuple[Path, Journal]:
    """Return the search's directory and journal: new ones, or with `resume` the newest ones."""
    job = target.job
    identity = {
        "benchmark": job.benchmark,
        "config": job.config.as_toml(),
        "gpus": job.selection.gpus,
        "commit": commit_of(ROOT) or "unknown",
        "versions": installed(job.gpus.driver),
        "model": list(target.model),
    }
    parent = job.log_dir / "tune"
    stem = f"{job.benchmark}_{job.selection.path.stem}"
    if resume:
        return _resumed(parent, stem, identity)
    folder = run_directory.create_new(parent / f"{stem}_{run_directory.date()}")
    journal = Journal(folder)
    journal.begin(identity)
    return folder, journal


def _resumed(parent: Path, stem: str, identity: dict) -> tuple[Path, Journal]:
    """Return the newest search in `parent` with this identity. Raises ConfigError without one."""
    searches = [(Journal(folder), folder) for folder in parent.glob(f"{glob.escape(stem)}_[0-9]*")]
    searches = [each for each in searches if as_json(each[0].identity) == as_json(identity)]
    if searches:
        journal, folder = max(searches, key=lambda each: (each[0].started, each[1].name))
        return folder, journal
    raise ConfigError(
        f"--resume: {parent} has no search that can be continued",
        "a search can only continue with the same config, commit, packages and GPUs",
        "leave out --resume",
    )


def _measure(target: Target, folder: Path, journal: Journal) -> Callable[..., Measurement]:
    """Return a function that measures a candidate by common.measure.bench in new processes."""
    job = target.job

    def measure(
        changes: Changes, length: str, steps: int, stop: Callable[[float], bool]
    ) -> Measurement:
        place = folder / f"measurement_{len(journal.measurements) + 1:03}"
        if place.exists():  # left by a search that was killed, whose ranks may still be ending
            kill_processes_of(place)
            shutil.rmtree(place)
        place.mkdir()
        config = changed(job.config, changes)
        candidate = replace(job, selection=replace(job.selection, config=config))
        file = place / job.selection.path.name
        file.write_text(config.as_toml())
        arguments = ["-m", "common.measure.bench", "--benchmark", job.benchmark]
        arguments += ["--config", str(file), "--device", job.selection.device]
        arguments += ["--steps", str(steps), "--warmup", str(WARMUP_STEPS[length])]
        arguments += ["--result", str(place / RESULT), *target.model]
        began = time.monotonic()
        with (place / "output.txt").open("w") as output:
            ending = supervise(
                torchrun_command(candidate, place, arguments),
                trainer_environment(candidate, "no"),
                place,
                stop=lambda: stop(time.monotonic() - began),
                stdout=output,
                stderr=output,
            )
        if ending.signal_number:
            interrupted = Interrupted(ending.signal_number)
            interrupted.do = "continue with --resume"
            raise interrupted
        seconds = time.monotonic() - began
        if ending.stopped:
            return Measurement(changes, length, "stopped", seconds)
        if ending.returncode == 0 and (place / RESULT).is_file():
            result = json.loads((place / RESULT).read_text())
            times_ms = tuple(result["times_ms"])
            return Measurement(changes, length, "done", seconds, times_ms, result["allocated"])
        error, _ = diagnosis.diagnose(place, config.world_size)
        return Measurement(changes, length, error.kind, seconds, error=error.as_dict())

    return measure


def _conclude(result: results.SearchResult, folder: Path, finished: bool) -> None:
    """Print the table, and write page and config into `folder`. `finished`: within the time."""
    config = folder / result.job.selection.path.name
    write_whole(config, result.toml().encode())
    write_whole(folder / "page.html", result.page().encode())
    print("\n".join(result.table()))
    if not finished:
        print_stderr("NOTE       time ran out before all candidates were measured")
        print_stderr("           continue with --resume and more minutes")
    print_stderr(f"page       {shown(folder / 'page.html')}")
    use = "" if result.target.model else ": use it with --config"
    print_stderr(f"config     {shown(config)}{use}")


def _failure(journal: Journal, folder: Path) -> RunError:
    """Return the first failure as an error, for a search in which nothing could be measured."""
    errors = [each.error for each in journal.measurements if each.error]
    if not errors:
        return ConfigError(
            "no candidate was measured",
            "time ran out before the first measurement ended",
            "continue with --resume and more minutes",
        )
    error = RunError(
        f"no candidate could be measured; the first failed: {errors[0]['what']}",
        str(errors[0]["why"]),
        f"see output.txt in {folder}/measurement_*",
    )
    error.kind = str(errors[0]["kind"])
    error.exit_code = int(str(errors[0]["exit_code"]))
    return error


main = job_main("tune", parser, start)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
