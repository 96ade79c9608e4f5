"""The argument parser of every command: suggestions for typos, help as wide as the terminal, and
exit codes.

Standard library only: a command line is parsed before any package is installed.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import math
import os
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from common.errors import ConfigError, Interrupted, StorageError, failure_of
from common.terminal import QUIET, print_stderr

PROGRAM = "./run_and_time.sh"
# accepted by every command, passed on as environment variables
SWITCHES = {"--no-color": "NO_COLOR", "--quiet": QUIET}
EVERYWHERE = ("--help", "--version", *SWITCHES)
# Options that users try, and the environment variables that are meant.
VARIABLES = {
    "--nexp": "NEXP",
    "--runs": "NEXP",
    "--seed": "SEED",
    "--datadir": "DATADIR",
    "--data-dir": "DATADIR",
    "--model": "MODEL",
    "--logdir": "LOGDIR",
    "--log-dir": "LOGDIR",
    "--gpus": "DGXNGPU",
    "--ngpu": "DGXNGPU",
    "--dgxngpu": "DGXNGPU",
    "--dgxsystem": "DGXSYSTEM",
    "--gpu-kind": "GPU_KIND",
}
PIPE_CLOSED = 141  # exit code that a shell reports for a program ended by SIGPIPE


def exit_code_of(work: Callable[[], int | None]) -> int:
    """Call `work` and return its exit code, with 0 for None.

    On a failure, print its three lines and return the exit code of its kind. A reader that leaves
    early, such as `head`, causes no traceback.
    """
    try:
        code = work()
        sys.stdout.flush()
        return code or 0
    except BrokenPipeError:
        # The interpreter flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print_stderr("note: the reader closed the output before everything was written")
        return PIPE_CLOSED
    except (Exception, KeyboardInterrupt) as error:
        failure = (
            Interrupted(signal.SIGINT)
            if isinstance(error, KeyboardInterrupt)
            else failure_of(error)
        )
        if failure is None and isinstance(error, OSError):
            what = str(error.strerror or error)
            if error.filename:
                what = f"{error.filename}: {what}"
            failure = StorageError(
                what,
                "the operating system refused a file operation",
                "check free space, permissions and the mount",
            )
        if failure is None:
            raise
    print_stderr(failure.lines())
    return failure.exit_code


def program(parser: Callable[[], Parser], work: Callable[[Any], int | None]) -> Callable[..., int]:
    """Return the `main` of a command. It parses its arguments (default: those of this process),
    calls `work` and returns the exit code.
    """
    return lambda arguments=None: exit_code_of(lambda: work(parser().parse_args(arguments)))


def imported(name: str) -> Callable[[Any], int | None]:
    """Return a function that imports `name` ("module:function") and calls the function.

    It is the `work` of a command whose function needs packages, which --help must not need.
    """
    module, _, function = name.partition(":")
    return lambda options: getattr(importlib.import_module(module), function)(options)


def meant(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return a suggestion for an unknown `word`: the closest of `known`, otherwise `otherwise`, or
    all known words.
    """
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), names, 1, 0.7)  # 0.7: gpu does not match cpu
    if near:
        return f"did you mean {names[near[0]]}?"
    return otherwise or f"choose one of: {', '.join(names.values())}"


def split_benchmark(arguments: list[str]) -> tuple[str, list[str]]:
    """Return the first word, or "" if there is none or it is an option, and the remaining
    arguments.
    """
    given = bool(arguments) and not arguments[0].startswith("-")
    return (arguments[0], arguments[1:]) if given else ("", arguments)


def count(text: str) -> int:
    """Parse an argument that is a whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def minutes(text: str) -> float:
    """Parse an argument that is a positive, finite number of minutes."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of minutes")
    return number


def help_width() -> int:
    """Return the width of help texts: that of the terminal (COLUMNS), at most 100."""
    return min(shutil.get_terminal_size().columns - 2, 100)


def reflow(text: str, width: int) -> str:
    """Fold paragraphs to `width` columns between words. Indented lines stay as they are."""
    blocks = []
    for block in text.strip().split("\n\n"):
        is_prose = not re.search(r"^(  |usage)", block, re.MULTILINE)
        blocks.append(_fill(block, width) if is_prose else block)
    return "\n\n".join(blocks)


def _fill(text: str, width: int) -> str:
    return textwrap.fill(
        " ".join(text.split()), width, break_long_words=False, break_on_hyphens=False
    )


class Help(argparse.RawDescriptionHelpFormatter):
    """Help without lines that break inside a word or an option."""

    def __init__(self, prog: str):
        super().__init__(prog, width=help_width())

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return reflow(text, width)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _fill(text, width).split("\n")


def complete(action: argparse.Action, words: Iterable[str]) -> None:
    """Let shells complete the values of `action` with `words`. Other values are accepted, too."""
    action.words = list(words)  # type: ignore[attr-defined]


def add_set_option(parser: Parser, keys: Iterable[str], note: str = "") -> None:
    """Add --set KEY=VALUE, which completes `keys`. `note`: continues the help."""
    changed = parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"change one key of the config (can be repeated){note}",
    )
    complete(changed, keys)


def complete_below(action: argparse.Action, parsers: Callable[[], dict[str, Parser]]) -> None:
    """Let shells complete what follows each choice of `action`: the options of its parser."""
    action.parsers = parsers  # type: ignore[attr-defined]


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError instead of ending the process.

    `examples`: command lines without `PROGRAM`, for the help.
    `prog`: the command without `PROGRAM`.
    """

    def __init__(
        self,
        prog: str,
        description: str | None = None,
        examples: Iterable[str] = (),
        **settings: Any,
    ):
        lines = "".join(f"\n  {PROGRAM} {example}" for example in examples)
        settings |= {"allow_abbrev": False, "formatter_class": Help}
        prog = prog if prog.startswith(PROGRAM) else f"{PROGRAM} {prog}"
        super().__init__(
            prog, description=description, epilog="examples:" + lines if lines else None, **settings
        )

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, unknown = self.parse_known_args(args, namespace)
        if not unknown:
            return options
        name, _, value = unknown[0].partition("=")
        if name in VARIABLES:
            self._point_to_variable(name, value or " ".join(unknown[1:2]))
        if name.startswith("-"):
            raise ConfigError(
                f"unknown option: {name}",
                f"{self.prog} has no such option",
                meant(name, dict.fromkeys([*self.options(), *EVERYWHERE])),
            )
        self.error(f"unexpected argument: {name}")

    def _point_to_variable(self, name: str, value: str) -> NoReturn:
        """Raise ConfigError: the option is not one, but an environment variable sets its value."""
        setting = f"{VARIABLES[name]}={value or '...'}"
        raise ConfigError(
            f"unknown option: {name}",
            f"the environment variable {VARIABLES[name]} sets this value",
            f"use {setting} {self.prog.removesuffix(' run')}",
        )

    def options(self) -> Iterator[str]:
        """Yield the options of this parser and of its subcommands."""
        for action in self._actions:
            yield from () if action.help == argparse.SUPPRESS else action.option_strings[-1:]
            for each in self.subcommands(action):
                yield from each.options()

    @staticmethod
    def subcommands(action: argparse.Action) -> list[Parser]:
        return (
            list(dict(action.choices or {}).values())
            if isinstance(action, argparse._SubParsersAction)
            else []
        )

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            name = (action.option_strings or [f"unknown {action.metavar or action.dest}:"])[-1]
            known = [str(choice) for choice in action.choices]
            raise ConfigError(
                f"{name} {value}",
                f"it must be one of: {', '.join(known)}",
                meant(str(value), known, f"choose one; {self.prog} --help describes them"),
            )

    def error(self, message: str) -> NoReturn:
        required = "the following arguments are required: "
        why = "the command line cannot be parsed"
        if message.startswith(required):
            missing = message.removeprefix(required)
            message = f"missing argument: {missing}"
            why = self._meaning_of(missing.split(", ")[0])
        raise ConfigError(message, why, f"see {self.prog} --help")

    def _meaning_of(self, name: str) -> str:
        """Return a sentence about the argument `name`: its choices, or else its help."""
        for action in self._actions:
            if name in (action.metavar, action.dest, *action.option_strings):
                if action.choices:
                    return f"choose one of {', '.join(map(str, action.choices))}"
                if action.help:
                    return f"{name}: {action.help}"
        return f"{self.prog} needs {name}"
