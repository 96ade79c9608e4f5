"""Options that several measurements share, and checks of their values."""

from __future__ import annotations

import argparse
import os
from typing import Any, NamedTuple

from common.errors import ConfigError
from common.known_issues import installed
from common.machine.hardware import Probe
from common.machine.host import cpu_count
from common.values import count
from launch.torch_build import require_fitting_torch

MAX = "max"  # --batch max: the largest batch that fits


def count_or_max(text: str) -> int | str:
    """Parse an argument that is MAX or a whole number of at least 1."""
    return MAX if text == MAX else count(text)


def counts(text: str) -> list[int]:
    """Parse an argument of whole numbers of at least 1, separated by commas."""
    return [count(part) for part in text.split(",")]


class ByDevice(NamedTuple):
    """The default of an option on a GPU and on a CPU. `settle` replaces it by one of them."""

    cuda: int
    cpu: int

    def __str__(self) -> str:  # for %(default)s in a help text
        return f"{self.cuda}, on a CPU {self.cpu}"


COMMON: dict[str, dict[str, Any]] = {
    "device": {
        "choices": ("cpu", "cuda"),
        "help": "device to measure; cuda includes ROCm (default: cuda if there is a GPU)",
    },
    "precision": {
        "choices": ("bf16", "fp8"),
        "default": "bf16",
        "help": "precision of the matrix products",
    },
    "seq": {"type": count, "metavar": "N", "help": "tokens per sequence"},
    "batch": {
        "type": count_or_max,
        "metavar": "N|max",
        "help": "batch per GPU, or max for the largest that fits",
    },
    "gpus": {
        "type": counts,
        "metavar": "N,N,...",
        "default": [1],
        "help": "numbers of GPUs to measure, such as 1,2,4 (default: 1)",
    },
    "warmup": {
        "type": count,
        "metavar": "N",
        "default": 5,
        "help": "number of untimed steps before the timed ones (default: %(default)s)",
    },
    "steps": {
        "type": count,
        "metavar": "N",
        "default": 20,
        "help": "number of timed steps (default: %(default)s)",
    },
}


def add(parser: argparse.ArgumentParser, *names: str, **changes: dict[str, Any]) -> None:
    """Add the options `names` of COMMON to `parser`.

    `changes`: options with changed settings, as in add(parser, "steps", seq={"default": 1024}).
    """
    for name in (*names, *(name for name in changes if name not in names)):
        parser.add_argument(f"--{name}", **COMMON[name] | changes.get(name, {}))


def settle(options: argparse.Namespace, detected: Probe) -> None:
    """Set the device, and the defaults that depend on it.

    Raises ConfigError for a device, a number of GPUs or a batch that this machine does not have,
    and PreflightError if torch is not built for its GPUs.
    """
    options.device = device_of(options.device, detected)
    check_torch(options.device, detected)
    if getattr(options, "gpus", None):
        check_gpus(options.gpus, options.device, detected)
    if options.device == "cpu" and getattr(options, "batch", None) == MAX:
        raise ConfigError(
            f"--batch {MAX} needs a GPU",
            "trying batches could fill the memory of the whole host",
            "give a number, such as --batch 2",
        )
    use_defaults(options)


def use_defaults(options: argparse.Namespace) -> None:
    """Set the defaults that depend on `options.device`."""
    for name, value in vars(options).items():
        if isinstance(value, ByDevice):
            setattr(options, name, getattr(value, options.device))


def device_of(option: str | None, detected: Probe) -> str:
    """Return the device, "cuda" (also for ROCm) or "cpu".

    Raises ConfigError for "cuda" without a GPU.
    """
    if option == "cuda" and not detected.devices:
        raise ConfigError(
            "--device cuda: no GPU found",
            "neither the NVIDIA nor the AMD driver shows a GPU",
            "use --device cpu, or make a GPU visible",
        )
    return option or ("cuda" if detected.devices else "cpu")


def check_torch(device: str, detected: Probe) -> None:
    """Raise PreflightError if `device` is "cuda" and torch is not built for these GPUs."""
    if device == "cuda":
        require_fitting_torch(detected, installed(detected.driver), os.environ)


def check_gpus(wanted: list[int], device: str, detected: Probe) -> None:
    """Raise ConfigError if there are fewer GPUs than the largest number in `wanted`.

    On a CPU the numbers count processes, at most one per core.
    """
    available = len(detected.devices)
    kind = "GPUs"
    if device == "cpu":
        available = cpu_count()
        kind = "CPU cores"
    if max(wanted) > available:
        raise ConfigError(
            f"--gpus {max(wanted)}",
            f"this machine has {available} {kind}",
            f"use at most {available}",
        )
