"""The argument parser of all commands: suggestions for typos, help texts, exit codes.

Standard library only: a command line is parsed before any package is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import math
import re
import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from common.errors import (
    STOP_SIGNALS,
    ConfigError,
    Interrupted,
    RunError,
    StorageError,
    failure_of,
)
from common.terminal import QUIET, guarded, print_stderr

PROGRAM = "./run_and_time.sh"
# Options of every command -> environment variables by which they are passed on.
SWITCHES = {"--no-color": "NO_COLOR", "--quiet": QUIET}
EVERYWHERE = ("--help", "--version", *SWITCHES)
# Options that do not exist but that users may try -> environment variables that set the value.
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
PIPE_CLOSED = 141  # exit code that a shell reports for a program killed by SIGPIPE


def exit_code_of(work: Callable[[], int | None]) -> int:
    """Call `work` and return its exit code, with 0 for None.

    If it raises a known error, print the error's three lines and return its exit code. The signals
    in STOP_SIGNALS are such errors, unless a handler of the caller or of `work` takes them. After
    Ctrl-C nothing is printed, unless there is something to do.

    A reader of the output that exits early, such as `head`, causes no traceback. An output that is
    closed or full is a StorageError. Messages on a stderr that is closed or full are dropped.
    """
    with _guarded_streams():
        try:
            with _interruptible():
                code = work()
                sys.stdout.flush()
            return code or 0
        except BrokenPipeError:
            print_stderr("note: the reader closed the output before everything was written")
            return PIPE_CLOSED
        except KeyboardInterrupt:
            failure: RunError = Interrupted(signal.SIGINT)
        except Exception as error:
            known = failure_of(error)
            if known is None and isinstance(error, OSError):
                known = _refused_file_operation(error)
            if known is None:
                raise
            failure = known
        if failure.exit_code != 128 + signal.SIGINT or failure.do:
            print_stderr(failure.lines())
        return failure.exit_code


@contextlib.contextmanager
def _guarded_streams() -> Iterator[None]:
    """Guard stdout and stderr, and flush them at the end.

    Otherwise the interpreter would flush them at exit, and fail if they cannot be written.
    """
    before: Any = (sys.stdout, sys.stderr)
    output: Any = guarded(sys.stdout)
    messages: Any = guarded(sys.stderr, drops=True)
    sys.stdout = output
    sys.stderr = messages
    try:
        yield
    finally:
        with contextlib.suppress(OSError, StorageError):
            output.flush()
        messages.flush()
        sys.stdout, sys.stderr = before


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Raise Interrupted at those of STOP_SIGNALS that would end this process at once."""

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted(number)

    signals = []
    if threading.current_thread() is threading.main_thread():
        signals = [each for each in STOP_SIGNALS if signal.getsignal(each) is signal.SIG_DFL]
    for number in signals:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in signals:
            if signal.getsignal(number) is interrupt:  # `work` may have its own handler now
                signal.signal(number, signal.SIG_DFL)


def _refused_file_operation(error: OSError) -> StorageError:
    what = str(error.strerror or error)
    if error.filename:
        what = f"{error.filename}: {what}"
    return StorageError(
        what,
        "the operating system refused a file operation",
        "check free space, permissions and the mount",
    )


def program(parser: Callable[[], Parser], work: Callable[[Any], int | None]) -> Callable[..., int]:
    """Return the `main` of a command.

    It parses its arguments (default: sys.argv[1:]), calls `work` with them and returns the exit
    code.
    """

    def main(arguments: list[str] | None = None) -> int:
        return exit_code_of(lambda: work(parser().parse_args(arguments)))

    return main


def imported(name: str) -> Callable[[Any], int | None]:
    """Return a function that imports `name` ("module:function") and calls the function.

    It is the `work` of a command whose function needs packages, which --help must not need.
    """
    module, _, function = name.partition(":")
    return lambda options: getattr(importlib.import_module(module), function)(options)


def meant(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return a suggestion for an unknown `word`: the most similar one of `known`.

    If none is similar, return `otherwise`, or all known words if that is empty.
    """
    known = list(known)
    if near := most_similar(word, known):
        return f"did you mean {near}?"
    return otherwise or f"choose one of: {', '.join(known)}"


def most_similar(word: str, known: Iterable[str]) -> str:
    """Return the most similar one of the `known` words, or "" if none is similar to `word`."""
    # Without the dashes, which would make all short options similar.
    names = {name.lower().lstrip("-"): name for name in known}
    near = difflib.get_close_matches(word.lower().lstrip("-"), names, 1, 0.7)  # gpu is not cpu
    return names[near[0]] if near else ""


def split_benchmark(arguments: list[str]) -> tuple[str, list[str]]:
    """Return (benchmark, remaining arguments). The benchmark is "" if the first is an option."""
    if not arguments or arguments[0].startswith("-"):
        return "", arguments
    return arguments[0], arguments[1:]


def count(text: str) -> int:
    """Parse an argument that is a whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 1")
    return number


def existing_path(text: str) -> Path:
    """Parse an argument that is the path of an existing file or directory."""
    if not text or not Path(text).exists():
        raise argparse.ArgumentTypeError(f"'{text}' does not exist")
    return Path(text)


def float_or_nan(text: str) -> float:
    """Return the number in `text`, or NaN, which no comparison accepts, if there is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def refuse_without(needed: str, given: Mapping[str, object]) -> None:
    """Raise ConfigError if an option that only applies with `needed` has a value.

    `given`: option -> value. Call it if the option `needed` was not given.
    """
    for option, value in given.items():
        if value is not None and value is not False:
            raise ConfigError(
                f"{option} without {needed}",
                f"{option} applies to {needed} only",
                f"add {needed}, or leave out {option}",
            )


def number_between(low: float, high: float) -> Callable[[str], float]:
    """Return a parser of an argument that is a number from `low` to `high`."""

    def parse(text: str) -> float:
        number = float_or_nan(text)
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"'{text}' is not a number from {low:g} to {high:g}")
        return number

    return parse


def minutes(text: str) -> float:
    """Parse an argument that is a positive, finite number of minutes."""
    number = float_or_nan(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive number of minutes")
    return number


def help_width() -> int:
    """Return the width of help texts in columns: the terminal's (or COLUMNS), at most 100."""
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
    """A help formatter that never breaks a line inside a word or an option."""

    def __init__(self, prog: str):
        super().__init__(prog, width=help_width())

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return reflow(text, width)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _fill(text, width).split("\n")


def complete(action: argparse.Action, words: Iterable[str]) -> None:
    """Let shells complete the values of `action` with `words`. Other values are accepted too."""
    action.words = list(words)  # type: ignore[attr-defined]


def add_command(
    commands: argparse._SubParsersAction[Parser],
    name: str,
    text: str,
    work: Callable[..., None],
    *parents: Parser,
) -> Parser:
    """Add a subcommand with the options of `parents`, and return its parser.

    `text`: its help, also in the list of commands. `work`: attribute of its parsed arguments.
    """
    sentence = f"{text[0].upper()}{text[1:]}."
    command = commands.add_parser(name, parents=parents, help=text, description=sentence)
    command.set_defaults(work=work)
    return command


def add_set_option(parser: Parser, keys: Iterable[str], note: str = "") -> None:
    """Add --set KEY=VALUE, whose completions are `keys`. `note`: added to the help text."""
    changed = parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"change one key of the config (can be repeated){note}",
    )
    complete(changed, keys)


def overrides_of(texts: Sequence[str]) -> dict[str, str]:
    """Return key -> value of the texts KEY=VALUE of --set.

    If a key is given twice, the last value wins. Raises ConfigError for a text of another form.
    """
    overrides: dict[str, str] = {}
    for text in texts:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not key:
            raise ConfigError(
                f"--set {text} is not KEY=VALUE",
                "the key or the = is missing",
                "write, for example, --set micro_batch_size=1",
            )
        if key.startswith("env."):
            variable = f"{key.removeprefix('env.')}={value}"
            raise ConfigError(
                f"--set {text} sets an environment variable",
                "--set changes whole keys of the config",
                f"set the variable before the command: {variable} {PROGRAM} ...",
            )
        overrides[key] = value
    return overrides


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
        """Parse `args`. Raises ConfigError, with a suggestion, if one is unknown."""
        options, unknown = self.parse_known_args(args, namespace)
        if any(not word.startswith("-") for word in unknown) and self._can_intermix():
            # An optional positional argument behind an option, as in `runs --json DIR`.
            options, unknown = self.parse_known_intermixed_args(args, namespace)
        if not unknown:
            return options
        name, _, value = unknown[0].partition("=")
        # A command that selects a config reads all of these variables, any other only LOGDIR.
        of_config = name in VARIABLES and "--config" in self.options()
        if of_config or VARIABLES.get(name) == "LOGDIR":
            self._point_to_variable(name, value or " ".join(unknown[1:2]))
        if name.startswith("-"):
            raise ConfigError(
                f"unknown option: {name}",
                f"{self.prog} has no such option",
                meant(name, dict.fromkeys([*self.options(), *EVERYWHERE])),
            )
        self.error(f"unexpected argument: {name}")

    def _point_to_variable(self, name: str, value: str) -> NoReturn:
        """Raise ConfigError for an unknown option whose value an environment variable sets."""
        setting = f"{VARIABLES[name]}={value or '...'}"
        raise ConfigError(
            f"unknown option: {name}",
            f"the environment variable {VARIABLES[name]} sets this value",
            f"use {setting} {self.prog.removesuffix(' run')}",
        )

    def options(self) -> Iterator[str]:
        """Yield the options of this parser and of its subcommands."""
        for action in self._actions:
            if action.help != argparse.SUPPRESS:
                yield from action.option_strings[-1:]
            for subcommand in self.subcommands(action):
                yield from subcommand.options()

    @staticmethod
    def subcommands(action: argparse.Action) -> list[Parser]:
        """Return the parsers of the subcommands that `action` selects, if it does."""
        if isinstance(action, argparse._SubParsersAction):
            return list(dict(action.choices or {}).values())
        return []

    def _can_intermix(self) -> bool:
        """Return whether options may stand between positional arguments: argparse's condition."""
        return all(
            action.nargs not in (argparse.PARSER, argparse.REMAINDER) for action in self._actions
        )

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            what = f"unknown {action.metavar or action.dest}: {value}"
            if action.option_strings:
                what = f"unknown value of {action.option_strings[-1]}: {value}"
            known = [str(choice) for choice in action.choices]
            raise ConfigError(
                what,
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
        elif message.startswith("argument "):  # argument -o/--option: what is wrong with its value
            message = message.removeprefix("argument ")
            why = self._meaning_of(message.split(": ")[0].split("/")[-1])
            message = re.sub("invalid int value: (.*)", r"\1 is not a whole number", message)
            message = re.sub("invalid float value: (.*)", r"\1 is not a number", message)
        raise ConfigError(message, why, f"see {self.prog} --help")

    def _meaning_of(self, name: str) -> str:
        """Describe the argument `name` by its choices, or else by its help."""
        for action in self._actions:
            if name in (action.metavar, action.dest, *action.option_strings):
                if action.choices:
                    return f"choose one of {', '.join(map(str, action.choices))}"
                if action.help:
                    return f"{name}: {action.help}"
        return f"{self.prog} needs {name}"
