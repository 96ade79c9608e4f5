"""The argument parser of all commands: suggestions for typos, help texts, exit codes.

Standard library only: a command line is parsed before any package is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import re
import shlex
import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from common.errors import (
    STOP_SIGNALS,
    ConfigError,
    Interrupted,
    RunError,
    StorageError,
    failure_of,
    file_of,
)
from common.suggestions import Meaning, nearest, suggestion, unknown
from common.terminal import QUIET, guarded, print_stderr
from common.values import path, spelled_as, whole_number

PROGRAM = "./run_and_time.sh"
# Options of every command -> environment variables by which they are passed on.
SWITCHES = {"--no-color": "NO_COLOR", "--quiet": QUIET}
EVERYWHERE = ("--help", "--version", *SWITCHES)
PIPE_CLOSED = 141  # exit code that a shell reports for a program killed by SIGPIPE
_received: list[int] = []  # numbers of the signals that raised Interrupted in this command


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
                code = work() or 0
                # A code that names the signal is the command's own answer to it.
                if code not in [128 + number for number in _received]:
                    raise_if_interrupted()
                sys.stdout.flush()
            return code
        except BrokenPipeError:
            print_stderr("note: the reader closed the output before everything was written")
            return PIPE_CLOSED
        except KeyboardInterrupt:  # of a library: `_interruptible` raises Interrupted
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
    """Raise Interrupted at those of STOP_SIGNALS that would end this process."""

    def interrupt(number: int, frame: object) -> None:
        _received.append(number)
        raise Interrupted(number)

    endings = (signal.SIG_DFL, signal.default_int_handler)
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            if signal.getsignal(number) in endings:
                before[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        _received.clear()
        for number, handler in before.items():
            if signal.getsignal(number) is interrupt:  # `work` may have its own handler now
                signal.signal(number, handler)


def raise_if_interrupted() -> None:
    """Raise Interrupted if a signal did, for a caller of code that catches every exception."""
    if _received:
        raise Interrupted(_received[0])


def _refused_file_operation(error: OSError) -> StorageError:
    named = filter(None, (file_of(error), str(error.strerror or error)))
    return StorageError(
        ": ".join(named),
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
        type=_assignment,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"change one key of the config (can be repeated){note}",
    )
    complete(changed, keys)


def _assignment(text: str) -> str:
    """Parse a value of --set. Raises ConfigError if it has not the form KEY=VALUE."""
    pairs_of("--set", [text])
    return text


def pairs_of(
    option: str, texts: Iterable[str], known: Collection[str] = (), form: str = "KEY=VALUE"
) -> dict[str, str]:
    """Return key -> value of the texts KEY=VALUE of a repeated option. `form`: its words in errors.

    Raises ConfigError for a text of another form, for a key that is given twice, and for one that
    is not `known`, if any are.
    """
    pairs: dict[str, str] = {}
    for text in texts:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not key:
            what = f"{option} {text!r} is not {form}"
            split = re.fullmatch(r"([\w.-]+)(?:[\s:]+(\S+))?", text.strip())
            example = f"{split[1]}={split[2] or form.partition('=')[2]}" if split else form
            raise ConfigError(what, "the name or the = is missing", f"write {option} {example}")
        if known and key not in known:
            raise unknown(f"{option} {key}={value}: unknown name {key!r}", key, known)
        if key in pairs:
            raise ConfigError(
                f"{option} {key} is given twice: {pairs[key]!r} and {value!r}",
                "only one of the values could count",
                f"leave out one of them, or give {option} once for each name",
            )
        pairs[key] = value
    return pairs


class UnknownOption(ConfigError):
    """A word of the command line that looks like an option and is none."""

    def __init__(self, option: str, why: str, do: str):
        super().__init__(f"unknown option: {option}", why, do)
        self.option = option


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError instead of ending the process.

    It refuses empty values, and an option that is given twice. Choices are accepted in any case,
    and a leading ~ of a path is expanded.

    `examples`: command lines without `PROGRAM`, for the help.
    `prog`: the command without `PROGRAM`.
    """

    # Variables that the command reads to choose what it does, () if it chooses nothing.
    variables: tuple[str, ...] = ()

    def __init__(
        self,
        prog: str,
        description: str | None = None,
        examples: Iterable[str] = (),
        **settings: Any,
    ):
        lines = "".join(f"\n  {PROGRAM} {example}" for example in examples)
        settings |= {
            "allow_abbrev": False,
            "formatter_class": lambda prog: Help(prog, width=help_width()),
        }
        prog = prog if prog.startswith(PROGRAM) else f"{PROGRAM} {prog}"
        super().__init__(
            prog, description=description, epilog="examples:" + lines if lines else None, **settings
        )
        self.register("type", Path, path)
        self.register("type", int, whole_number(0))
        self._values: dict[str, Sequence[str]] = {}  # option -> its values in this pass
        self._chosen = self  # the parser of the subcommand, if one is given

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse `args`. Raises ConfigError, with a suggestion, if one is unknown."""
        self._values.clear()
        self._chosen = self
        options, unknown = self.parse_known_args(args, namespace)
        # Options may stand between positional arguments: argparse's condition.
        can_intermix = all(
            action.nargs not in (argparse.PARSER, argparse.REMAINDER) for action in self._actions
        )
        if can_intermix and any(not word.startswith("-") for word in unknown):
            # An optional positional argument behind an option, as in `runs --json DIR`.
            self._values.clear()
            options, unknown = self.parse_known_intermixed_args(args, namespace)
        if unknown:
            raise self._chosen._unknown(*unknown)
        return options

    def _unknown(self, word: str, following: str = "", *_: str) -> ConfigError:
        """Return the error for an unknown `word`. `following`: the next unknown one."""
        name, equals, value = word.partition("=")
        see = f"see {self.prog} --help"
        words = getattr(self._option_string_actions.get("--set"), "words", ())
        keys = [key.rstrip("=") for key in words]
        if not name.startswith("-"):
            do = f"leave it out, or {see}"
            if equals and name in keys:
                do = f"did you mean --set {word}?"
            elif equals and name.isupper():
                do = f"variables come before the command: {word} {self.prog}"
            elif name.endswith(".toml") and "--config" in self.options():
                do = f"did you mean --config {word}?"
            return ConfigError(
                f"unexpected argument: {word!r}", f"{self.prog} takes no further words", do
            )
        if not equals and not following.startswith("-"):
            value = following
        variables = self.variables or ("LOGDIR",)
        meaning = nearest(name, [*self.options(), *EVERYWHERE, *keys, *variables])
        do = self._advice(meaning, value, keys) if meaning else see
        return UnknownOption(name, f"{self.prog} has no such option", do)

    def _advice(self, meaning: Meaning, value: str, keys: Collection[str]) -> str:
        """Return how to give `value` by the option, variable or config key that is meant."""
        ours, note = meaning
        setting = f"{ours}={shlex.quote(value) if value and not note else '...'}"
        if ours.isupper():
            command = f"use {setting} {self.prog.removesuffix(' run')}"
            return f"{command} ({note})" if note else command
        return suggestion(f"--set {setting}" if ours in keys else ours, note)

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

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Return the values of `action`. Raises ConfigError if one is empty or given twice."""
        name = str([action.metavar or action.dest, *action.option_strings][-1])
        is_free = action.const == "" or action.nargs in (argparse.PARSER, argparse.REMAINDER)
        is_free = is_free or action.metavar == "TEXT"  # a prompt
        if not is_free and any(not text.strip() for text in arg_strings):
            raise ConfigError(
                f"the value of {name} is empty: {arg_strings[0]!r}",
                self._meaning_of(name),
                "give a value; a variable in the command may be unset",
            )
        if isinstance(action, argparse._SubParsersAction):
            self._chosen = dict(action.choices or {}).get(arg_strings[0], self)
        if action.option_strings and isinstance(action, argparse._StoreAction):
            if any(self._values.get(name, ())):
                both = " and ".join(map(repr, [*self._values[name], *arg_strings]))
                raise ConfigError(
                    f"{name} is given twice: {both}",
                    "only one of the values could count",
                    "leave out one of them",
                )
            self._values[name] = arg_strings
        return super()._get_values(action, arg_strings)  # type: ignore[misc]

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if action.choices is not None and not self.subcommands(action):
            arg_string = spelled_as(arg_string, [str(choice) for choice in action.choices])
        return super()._get_value(action, arg_string)  # type: ignore[misc]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            what = f"unknown {action.metavar or action.dest}: {value!r}"
            if action.option_strings:
                what = f"unknown value of {action.option_strings[-1]}: {value!r}"
            choose = "name one before its options" if self.subcommands(action) else "choose one"
            known = map(str, action.choices)
            raise unknown(what, str(value), known, f"{choose}; see {self.prog} --help")

    def error(self, message: str) -> NoReturn:
        kind, _, rest = message.partition(": ")
        why = f"{self.prog} needs it"
        do = f"see {self.prog} --help"
        if one := re.fullmatch("one of the arguments (.*) is required", message):
            names = one[1].split()
            message = f"missing argument: {' or '.join(names)}"
            why = self._meaning_of(names[0])
        elif kind == "the following arguments are required":
            message = f"missing argument: {rest}"
            why = self._meaning_of(rest.split(", ")[0])
        elif kind.startswith("argument "):  # argument -o/--option: what is wrong with its value
            argument = kind.removeprefix("argument ")
            message = f"{argument}: {rest}"
            name = argument.split("/")[-1]
            why = self._meaning_of(name)
            text, _, other = rest.partition(" argument ")
            if text == "ignored explicit":
                message = f"{name} takes no value: {other}"
                do = f"write {name} alone"
            elif text == "not allowed with":
                message = f"{argument} cannot be combined with {other}"
                do = f"leave out {argument} or {other}"
            elif rest == "expected one argument":
                message = f"{name} needs a value"
                do = f"write {name} and its value, or {name}=... for one that begins with a dash"
        raise ConfigError(message, why, do)

    def _meaning_of(self, name: str) -> str:
        """Describe the argument `name` by its choices, or else by its help."""
        for action in self._actions:
            if name in (action.metavar, action.dest, *action.option_strings):
                if action.choices:
                    return f"choose one of {', '.join(map(str, action.choices))}"
                if action.help:
                    return f"{name}: {self._get_formatter()._expand_help(action)}"
        return f"{self.prog} needs {name}"
