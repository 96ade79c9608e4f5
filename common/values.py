"""Parsers of the values that options, environment variables and config keys share.

Each parser takes a text and returns a value. It raises argparse.ArgumentTypeError, whose message
quotes the text. argparse adds the name of the option to it, and `of_variable` that of the variable.
Standard library only.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
from collections.abc import Callable, Collection, Mapping
from decimal import Decimal
from pathlib import Path
from typing import TypeVar

from common.errors import ConfigError
from common.gpu_kinds import KINDS, kind_in

Value = TypeVar("Value")
DIGITS = r"(?:\d{1,30}(?:\.\d*)?|\.\d+)(?:e[+-]?\d{1,3})?"
NUMBER = re.compile(rf"([+-]?{DIGITS})([kmbt]?)", re.I | re.A)
FACTORS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
DURATION = re.compile(rf"({DIGITS})\s*(s|sec|m|min|h|d)?", re.I | re.A)
SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def plain(text: str) -> str:
    """Return the letters and digits of `text` in lower case, in which spellings are compared."""
    return re.sub(r"[\W_]+", "", text).lower()


def spelled_as(text: str, known: Collection[str]) -> str:
    """Return the name of `known` that is `text`, or that differs from it in case or separators.

    The last numbers of a version may be missing, as in 6.1 for 6.1.0. Return `text` if there is no
    such name, or more than one.
    """
    if text in known:
        return text
    same = [name for name in known if plain(name) == plain(text)]
    if not same and re.fullmatch(r"v?\d+\.\d+", text):
        same = [name for name in known if name.startswith(f"{text.lstrip('v')}.")]
    return same[0] if len(same) == 1 else text


def _decimal(
    text: str, kind: str, is_valid: Callable[[Decimal], bool], kilo: int = 1000
) -> Decimal:
    """Return the number in `text`, such as 5, 1e9, 8k or 1.5T. `kind`: its name in the error."""
    if match := NUMBER.fullmatch(text.strip()):
        value = Decimal(match[1]) * (FACTORS | {"k": kilo})[match[2].lower()]
        if math.isfinite(value) and is_valid(value):
            return value
    raise argparse.ArgumentTypeError(f"'{text}' is not {kind}")


def number(text: str) -> float:
    """Parse a number, such as 0.5, 405e9, 8B or 1T."""
    return float(_decimal(text, "a number", lambda value: True))


def amount(text: str) -> float:
    """Parse a positive number, such as 405e9 or 1T."""
    return float(_decimal(text, "a positive number", lambda value: value > 0))


def whole_number(low: int, high: int | None = None, kilo: int = 1000) -> Callable[[str], int]:
    """Return a parser of a whole number from `low` to `high` (default: any larger one).

    `kilo`: value of the suffix k.
    """
    limits = f"of at least {low}" if high is None else f"from {low} to {high}"

    def is_valid(value: Decimal) -> bool:
        return value == value.to_integral_value() and low <= value <= (high or math.inf)

    return lambda text: int(_decimal(text, f"a whole number {limits}", is_valid, kilo))


count = whole_number(1)
length = whole_number(1, kilo=1024)  # number of tokens of a sequence: 8k is 8,192


def number_between(
    low: float, high: float, parse: Callable[[str], float] = number
) -> Callable[[str], float]:
    """Return a parser of a number from `low` to `high`, both included. `parse`: its form."""

    def parse_between(text: str) -> float:
        value = parse(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"'{text}' is not from {low:g} to {high:g}")
        return value

    return parse_between


def seconds(text: str, unit: str = "s") -> float:
    """Parse a positive duration, such as 90, 90s, 5m or 2h, and return seconds.

    `unit`: that of a number without one.
    """
    match = DURATION.fullmatch(text.strip())
    value = float(match[1]) if match else 0
    if not match or not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a duration such as 90s, 5m or 2h")
    return value * SECONDS[(match[2] or unit).lower()]


def minutes(text: str) -> float:
    """Parse a positive duration, in minutes if it has no unit, and return minutes."""
    return seconds(text, "m") / 60


def path(text: str) -> Path:
    """Parse the path of a file or folder. A leading ~ is a home directory."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"'{text}' names no file or folder")
    try:
        return Path(text).expanduser()
    except RuntimeError:  # no home directory
        raise argparse.ArgumentTypeError(f"the home directory in '{text}' is unknown") from None


def existing_path(text: str) -> Path:
    """Parse the path of a file or folder that exists."""
    given = path(text)
    if not given.exists():
        raise argparse.ArgumentTypeError(f"'{text}' does not exist")
    return given


def folder(text: str) -> Path:
    """Parse the path of a folder, which need not exist. A leading ~ is a home directory."""
    given = path(text)
    if given.exists() and not given.is_dir():
        raise argparse.ArgumentTypeError(f"'{text}' is not a folder")
    return given


def gpu_kind(text: str) -> str:
    """Return the GPU kind that a name in any case, or a driver's product name, stands for.

    Any other text is returned as it is.
    """
    return kind_in(text) or spelled_as(text, KINDS)


def config_name(text: str) -> str:
    """Return the name of a config: from its path, its file's name, or a name in any case."""
    name = Path(text.strip()).name.removesuffix(".toml")
    match = re.fullmatch(r"(.+)[_ ](\d+)x(\d+)", name, re.IGNORECASE)
    if not match:
        return name
    return f"{spelled_as(match[1], (*KINDS, 'CPU'))}_{match[2]}x{match[3]}"


def of_variable(
    environment: Mapping[str, str], name: str, parse: Callable[[str], Value]
) -> Value | None:
    """Return the value of the variable `name`, None if it is unset or empty.

    Raises ConfigError if it cannot be parsed.
    """
    text = environment.get(name, "")
    if not text:
        return None
    try:
        return parse(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(
            f"{name}={shlex.quote(text)} cannot be used", str(error), f"correct or unset {name}"
        ) from None
