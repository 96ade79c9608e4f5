"""Run all measurements, each in a separate process, and write one page with the results.

If the same command is run again with the same --out, it continues where it was interrupted. The
exit code is 0 if every part succeeded, otherwise the first failed part's. With
--against, it is 20 if a row is slower than the baseline allows. The part of such a row is measured
again before the row is judged.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.command_line import refuse_without
from common.errors import ConfigError, Interrupted
from common.measure.files import read_json, write_json
from common.measure.tables import Section, Table
from common.terminal import Progress, inform, print_stderr
from launch.processes.supervise import Ending, supervise
from launch.run_directory import create_new, date
from launch.selection.machine import Machine
from throughput import baseline, result, shared_options, suite_page
from throughput.machine import kind_of

NAME = "suite.json"
AGAIN = ".again"  # suffix of a part that is measured a second time
LOG_LINES = 10  # number of lines of a failed part's log that a terminal shows
SHORTEST_REPORTED = 60.0  # seconds; less remaining time is not reported


@dataclass(frozen=True)
class SuitePart:
    """One command of the suite.

    In `arguments` and `quick`, {gpus} is replaced by the numbers of GPUs, such as 1,2,4. {layers}
    is replaced by --layers 8 on a GPU, and by nothing on a CPU, whose model has 4 layers.
    """

    name: str
    arguments: str  # of `python3 -m throughput`
    quick: str  # arguments with --quick; "" skips the part
    # Duration on one H200 (for `scaling`, on two), from which the remaining time is estimated.
    seconds: float
    quick_seconds: float


PARTS = (
    SuitePart("gemm", "gemm", "gemm", 26, 26),
    SuitePart("mlp", "mlp", "mlp", 10, 10),
    SuitePart(
        "llama_full",
        "llama --precision fp8 --gpus {gpus} --warmup 2 --steps 5",
        "llama --precision fp8 {layers}",
        105,
        74,
    ),
    SuitePart(
        "llama_lora", "llama --model qwen3-8b --lora --gpus {gpus} --warmup 2 --steps 5", "", 43, 0
    ),
    SuitePart("gpt", "gpt", "gpt --steps 5", 32, 22),
    SuitePart("scaling", "scaling --gpus {gpus}", "", 70, 0),
    SuitePart("flux", "flux --gpus {gpus}", "flux --gpus {gpus} --warmup 1 --steps 4", 34, 34),
)


def main(options: argparse.Namespace) -> int:
    """Run the suite and return the exit code (see the top of this file).

    Raises CheckFailed if a row fails against the baseline, and other RunErrors.
    """
    if not options.against:
        refuse_without("--against", {"--tolerance": options.tolerance})
    machine = Machine.of(os.environ)
    shared_options.settle(options, machine.probe)
    device = options.device
    gpus = options.gpus or doubled(machine.gpus if device == "cuda" else 1)
    reference = None
    if options.against:
        reference = baseline.find(options.against, declared_tables())
        note_other_kind(reference, "CPU" if device == "cpu" else kind_of(machine))
    if options.save_baseline:
        require_new(options.save_baseline)
    folder = options.out or result.default_directory("suite")
    suite_options = {"quick": options.quick, "device": device, "gpus": gpus}
    parts = selected_parts(options.quick)
    ended = run_parts(folder, suite_options, parts)
    results = suite_page.read_results(folder, ended)
    measured = baseline.of_results(results.values())
    verdicts: list[baseline.BaselineVerdict] = []
    comparison: list[Section] = []
    if reference:
        verdicts = baseline.compare(reference, results, options.tolerance)
        slow = {verdict.part for verdict in verdicts if verdict.verdict == baseline.FAIL}
        again = [replace(part, name=part.name + AGAIN) for part in parts if part.name in slow]
        if again and not first_exit_code(ended):
            print("suite: rows are below their limits and are measured again", flush=True)
            ended |= run_parts(folder, suite_options, again)
            results = suite_page.read_results(folder, ended)
            verdicts = baseline.compare(reference, results, options.tolerance)
        comparison = [baseline.section(reference, verdicts)]
    suite_page.write(folder, ended, results, verdicts, comparison)
    if code := first_exit_code(ended):
        return code
    if options.save_baseline:
        baseline.write(options.save_baseline, measured)
        print(f"baseline: {options.save_baseline}", flush=True)
    if reference and (error := baseline.failure(reference, verdicts, folder / "page.html")):
        raise error
    return 0


def first_exit_code(ended: dict[str, dict]) -> int:
    """Return the exit code of the first part that failed, 0 if none did."""
    codes = [part["exit_code"] for part in ended.values() if part["exit_code"]]
    if not codes:
        return 0
    # A shell reports a process that signal N ended as 128 + N.
    return 128 - codes[0] if codes[0] < 0 else codes[0]


def note_other_kind(reference: baseline.Baseline, kind: str) -> None:
    """Print a note if the baseline is of another GPU kind than `kind`, which is measured."""
    if kind != reference.gpu:
        inform(f"NOTE       the baseline is of {reference.gpu}, but this suite measures {kind}")


def run_parts(
    folder: Path, suite_options: dict[str, Any], parts: list[SuitePart]
) -> dict[str, dict]:
    """Run `parts` that have not yet succeeded in `folder`. Return part -> command and outcome.

    `suite_options`: quick, device and gpus, as suite.json records them.
    """
    ended = resume(folder, suite_options)
    for number, part in enumerate(parts, start=1):
        if part.name in ended:
            print(f"suite: {part.name} is done", flush=True)
            continue
        left = time_left(ended, suite_options["quick"])
        print(f"suite: part {number} of {len(parts)}, {part.name}{left}", flush=True)
        ended[part.name] = run(part, folder, suite_options)
        write_json(folder / NAME, suite_options | {"parts": ended})
    return {part.name: ended[part.name] for part in parts}


def declared_tables() -> list[Table]:
    """Return the tables of all measurements of the suite."""
    tables: list[Table] = []
    for name in dict.fromkeys(part.arguments.split()[0] for part in PARTS):
        tables += importlib.import_module(f"throughput.{name}").TABLES
    return tables


def require_new(path: Path) -> None:
    """Raise ConfigError if the baseline file exists, or if its directory does not."""
    if path.exists():
        raise ConfigError(
            f"--save-baseline {path}", "the file exists", "name a new file, or remove it"
        )
    if not path.parent.is_dir():
        raise ConfigError(
            f"--save-baseline {path}",
            f"the directory {path.parent} does not exist",
            "create it first",
        )


def selected_parts(quick: bool) -> list[SuitePart]:
    return [part for part in PARTS if part.quick or not quick]


def doubled(count: int) -> list[int]:
    """Return 1, 2, 4, ... up to `count`, and `count` itself."""
    powers = {2**power for power in range(count.bit_length())}
    return sorted(powers | {count})


def resume(folder: Path, suite_options: dict[str, Any]) -> dict[str, dict]:
    """Return the parts that succeeded in `folder`, which is created if it is missing.

    Directories of interrupted or failed parts are renamed. Raises ConfigError if `folder` contains
    other files, or a suite with other options. Raises DataError if suite.json cannot be read.
    """
    path = folder / NAME
    if not path.is_file():
        result.claim(folder)
        write_json(path, suite_options | {"parts": {}})
        return {}

    def parse(data: dict[str, Any]) -> tuple[dict[str, Any], dict[str, dict]]:
        parts = dict(data.pop("parts"))
        return data, parts

    before, ended = read_json(
        path, parse, f"{path} cannot be read", "name a new directory with --out"
    )
    if before != suite_options:
        why = f"it was started with {before}, and now with {suite_options}"
        raise ConfigError(
            f"{folder} contains another suite",
            why,
            "repeat its options, or name a new directory with --out",
        )
    good = {name: part for name, part in ended.items() if part["exit_code"] == 0}
    for name in (part.name + suffix for part in PARTS for suffix in ("", AGAIN)):
        left = folder / name
        if left.exists() and name not in good:
            how = "failed" if name in ended else "interrupted"
            left.rename(create_new(folder / f"{name}.{how}-{date()}"))
    return good


def run(part: SuitePart, folder: Path, suite_options: dict[str, Any]) -> dict[str, Any]:
    """Run a part. Return its command, exit code and seconds. Raises Interrupted."""
    template = part.quick if suite_options["quick"] else part.arguments
    arguments = template.format(
        gpus=",".join(map(str, suite_options["gpus"])),
        layers="--layers 8" if suite_options["device"] == "cuda" else "",
    )
    command = ["-m", "throughput", *arguments.split()]
    command += ["--device", suite_options["device"], "--out", str(folder / part.name)]
    began = time.monotonic()
    run_directory = (folder / part.name).absolute()
    if sys.stdout.isatty():
        ending = _run_with_bar(part, [sys.executable, *command], run_directory)
    else:
        ending = supervise([sys.executable, *command], dict(os.environ), run_directory)
    if ending.signal_number:
        raise Interrupted(ending.signal_number)
    return {
        "command": shlex.join(["python3", *command]),
        "exit_code": ending.returncode,
        "seconds": round(time.monotonic() - began, 1),
    }


def _run_with_bar(part: SuitePart, command: list[str], folder: Path) -> Ending:
    """Run a part while a progress bar shows its elapsed time. Its output goes to <folder>.log.

    If the part fails, the end of the log is printed.
    """
    path = folder.with_name(f"{folder.name}.log")
    with path.open("w") as log, Progress(part.name, 0, "rows") as progress:

        def show() -> bool:
            progress.at(0)
            return False

        environment = dict(os.environ)
        ending = supervise(command, environment, folder, stop=show, stdout=log, stderr=log)
    if ending.returncode:
        lines = path.read_text(errors="replace").splitlines()
        print_stderr(*lines[-LOG_LINES:], f"log: {path}")
    return ending


def time_left(ended: dict[str, dict], quick: bool) -> str:
    """Return the estimated remaining time in words, or "" if it is short.

    The expected time of the remaining parts is multiplied by the ratio of actual to expected time
    of the finished parts.
    """
    expected = {
        part.name: part.quick_seconds if quick else part.seconds for part in selected_parts(quick)
    }
    spent = sum(part["seconds"] for part in ended.values())
    planned = sum(expected[name.removesuffix(AGAIN)] for name in ended)
    left = sum(seconds for name, seconds in expected.items() if name not in ended)
    if planned:
        left *= spent / planned
    return f"; about {max(left / 60, 1):.0f} min left" if left > SHORTEST_REPORTED else ""
