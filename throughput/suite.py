"""All measurements in one sitting, each in a separate process, and one page of the results.

Run again with the same --out, it continues where it was interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError, DataError, Interrupted, RunError
from common.hardware import probe
from launch.processes.supervise import supervise
from throughput import options as common
from throughput import report, result
from throughput.tables import Section

NAME = "suite.json"
SCHEDULED = 60.0  # seconds: less time left than this is not reported


@dataclass(frozen=True)
class Part:
    """One command of the suite.

    `words` follow `python3 -m throughput`. With --quick, `quick` replaces them ("" skips the part).
    {gpus} is replaced by 1,2,4 or the value of --gpus. `seconds`, `quick_seconds`: used to estimate
    the time left, measured on one H200, scaling on two.
    """

    name: str
    words: str
    quick: str
    seconds: float
    quick_seconds: float


PARTS = (
    Part("gemm", "gemm", "gemm", 26, 26),
    Part("mlp", "mlp", "mlp", 10, 10),
    Part(
        "llama_full",
        "llama --precision fp8 --gpus {gpus} --warmup 2 --steps 5",
        "llama --precision fp8 --layers 8",
        105,
        74,
    ),
    Part(
        "llama_lora", "llama --model qwen3-8b --lora --gpus {gpus} --warmup 2 --steps 5", "", 43, 0
    ),
    Part("gpt", "gpt", "gpt --steps 5", 32, 22),
    Part("scaling", "scaling --gpus {gpus}", "", 70, 0),
    Part("flux", "flux --gpus {gpus}", "flux --gpus {gpus} --warmup 1 --steps 4", 34, 34),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick", action="store_true", help="ten minutes on one H200: fewer models and batches"
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="default: the GPUs if there are any (ROCm's are cuda as well)",
    )
    common.add(
        parser,
        gpus={
            "default": None,
            "help": "numbers of GPUs to measure; default: 1, 2, 4, ... up to all",
        },
    )


def main(options: argparse.Namespace) -> int:
    """Run the suite and return the exit code.

    It is 0 if every part ended with 0, otherwise that of the first part that did not. Raises
    RunError.
    """
    found = probe(os.environ)
    device = common.device_of(options.device, found)
    common.check_torch(device, found)
    gpus = options.gpus or doubled(len(found.devices) if device == "cuda" else 1)
    common.check_gpus(gpus, device, found)
    folder = options.out or result.default_directory("suite")
    asked = {"quick": options.quick, "device": device, "gpus": gpus}
    ended = resume(folder, asked)
    for number, part in enumerate(chosen(options.quick)):
        if part.name in ended:
            print(f"suite: {part.name} is done", flush=True)
            continue
        print(
            f"suite: part {number + 1} of {len(chosen(options.quick))}, {part.name}{time_left(ended, options.quick)}",
            flush=True,
        )
        ended[part.name] = run(part, folder, asked)
        result.write_json(folder / NAME, asked | {"parts": ended})
    # Restore the order of the parts, since repeated parts were added last.
    ended = {part.name: ended[part.name] for part in chosen(options.quick)}
    report.write(folder, "suite", sections(folder, ended))
    failed = next((part["exit_code"] for part in ended.values() if part["exit_code"]), 0)
    return 128 - failed if failed < 0 else failed  # as a shell reports signals


def chosen(quick: bool) -> list[Part]:
    return [part for part in PARTS if part.quick or not quick]


def doubled(count: int) -> list[int]:
    """Return 1, 2, 4, ... and `count` itself."""
    return sorted({count, *(2**power for power in range(count.bit_length()) if 2**power <= count)})


def resume(folder: Path, asked: dict[str, Any]) -> dict[str, dict]:
    """Return the parts that ended successfully in `folder`, and create it if it is missing.

    Results of an interrupted or failed part are moved aside. Raises ConfigError if `folder`
    contains anything else, or a suite with other options. Raises DataError if suite.json cannot be
    read.
    """
    path = folder / NAME
    if not path.is_file():
        result.claim(folder)
        result.write_json(path, asked | {"parts": {}})
        return {}
    try:
        before = json.loads(path.read_text())
        ended = dict(before.pop("parts"))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"{path} cannot be read",
            f"{type(error).__name__}: {error}",
            "name a new directory with --out",
        ) from None
    if before != asked:
        why = f"it was started with {before}, and now with {asked}"
        raise ConfigError(
            f"{folder} holds another suite",
            why,
            "repeat its options, or name a new directory with --out",
        )
    good = {name: part for name, part in ended.items() if part["exit_code"] == 0}
    for part in PARTS:
        left = folder / part.name
        if left.exists() and part.name not in good:
            how = "failed" if part.name in ended else "interrupted"
            left.rename(folder / f"{part.name}.{how}-{time.strftime('%Y%m%d-%H%M%S')}")
    return good


def run(part: Part, folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Run a part. Return its command, exit code and seconds. Raises Interrupted."""
    words = (part.quick if asked["quick"] else part.words).format(
        gpus=",".join(map(str, asked["gpus"]))
    )
    command = [
        "-m",
        "throughput",
        *words.split(),
        "--device",
        asked["device"],
        "--out",
        str(folder / part.name),
    ]
    began = time.monotonic()
    ending = supervise(
        [sys.executable, *command], dict(os.environ), (folder / part.name).absolute()
    )
    if ending.signal_number:
        raise Interrupted(ending.signal_number)
    return {
        "command": shlex.join(["python3", *command]),
        "exit_code": ending.returncode,
        "seconds": round(time.monotonic() - began, 1),
    }


def time_left(ended: dict[str, dict], quick: bool) -> str:
    """Return the time left in words.

    The expected seconds are scaled by the ratio of actual to expected time of the finished parts.
    """
    expected = {part.name: part.quick_seconds if quick else part.seconds for part in chosen(quick)}
    spent, planned = (
        sum(ended[name]["seconds"] for name in ended),
        sum(expected[name] for name in ended),
    )
    left = sum(seconds for name, seconds in expected.items() if name not in ended) * (
        spent / planned if planned else 1.0
    )
    return f"; about {max(left / 60, 1):.0f} min left" if left > SCHEDULED else ""


# --- the page -------------------------------------------------------------------------------------


def sections(folder: Path, ended: dict[str, dict]) -> list[Section]:
    """Return the sections of the page.

    They are the machine, the parts, each part's tables, and the published tables.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in ended:
        try:
            found[name] = result.read(folder / name)
        except RunError:  # the part wrote no result; its row says how it ended
            continue
    command = shlex.join(["python3", "-m", "throughput", *sys.argv[1:]])
    made = (
        [report.facts([("", next(iter(found.values())) | {"command": command})])] if found else []
    )
    made.append(parts_section(ended, found))
    for name, data in found.items():
        made += report.relabeled(
            [part for table in data["tables"] for part in report.measured(table, data)], name
        )
    return made + report.others(table for data in found.values() for table in data["tables"])


def parts_section(ended: dict[str, dict], found: dict[str, dict[str, Any]]) -> Section:
    rows = []
    for name, part in ended.items():
        measured = [row for row in found.get(name, {}).get("rows", [])]
        failed = sum("error" in row for row in measured)
        how = "ended" if part["exit_code"] == 0 else f"failed, {how_it_failed(part['exit_code'])}"
        rows.append(
            (
                name,
                how,
                f"{part['seconds']:,.0f}",
                str(len(measured) - failed),
                str(failed),
                part["command"],
            )
        )
    heads = ("Part", "", "Seconds", "Rows measured", "Rows failed", "Command")
    return Section(
        "Parts", "measured here", heads, (False, False, True, True, True, False), tuple(rows)
    )


def how_it_failed(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
