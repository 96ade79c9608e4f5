"""Table of all commands, and the parser that maps a command line to a module.

A command line is checked before any package is installed: each command's module has a function
`parser`, whose Parser (common/command_line.py) raises ConfigError. These modules, and this one, can
be imported with the standard library alone.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import textwrap
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import benchmarks
from common.command_line import (
    EVERYWHERE,
    PROGRAM,
    SWITCHES,
    Parser,
    UnknownOption,
    help_width,
    reflow,
)
from common.errors import ConfigError
from common.machine.hardware import config_names
from common.paths import ROOT
from common.repository import changes_of, commit_of
from common.suggestions import nearest, suggestion
from launch import variables
from launch.environment import ALL, CLI, LOGS

# Whether the name of a benchmark goes with a command. ALWAYS: the command needs one.
NEVER = "never"
MAY = "may"
ALWAYS = "always"
# Module of a command that each benchmark implements. A benchmark without this file has no such
# command.
IN_BENCHMARK = "<benchmark>/<command>.py"


@dataclass(frozen=True)
class Command:
    """The module that executes a command, and what it needs."""

    module: str  # IN_BENCHMARK, or the name of a module
    benchmark: str = NEVER  # NEVER, MAY or ALWAYS
    needs: str = ALL  # requirements file that the command needs; "" for none
    bare_with: str = "print"  # option, if it has it, with which nothing is installed
    stray: str = ""  # option that words without a benchmark are meant for


COMMANDS = {  # overview.txt describes them
    "run": Command("launch.run_command", ALWAYS),
    "prepare": Command(IN_BENCHMARK, ALWAYS),
    "bench": Command("launch.bench", ALWAYS),
    "profile": Command("launch.profile", ALWAYS),
    "tune": Command("launch.tune.command", ALWAYS),
    "gemms": Command("throughput.gemm_tuning.cli", ALWAYS),
    "eval": Command(IN_BENCHMARK, ALWAYS),
    "generate": Command(IN_BENCHMARK, ALWAYS),
    "export": Command(IN_BENCHMARK, ALWAYS),
    "merge": Command(IN_BENCHMARK, ALWAYS),
    "plan": Command("launch.plan.command", MAY, needs="", stray="--model"),
    "preflight": Command("launch.preflight.__main__", MAY, stray="--nodes"),
    "throughput": Command("throughput.__main__"),
    "system-tuning": Command("system_tuning.__main__", needs=""),
    "check": Command("submission.check", needs=LOGS),
    "runs": Command("submission.run_list", needs=LOGS, bare_with="series"),
    "report": Command("submission.report"),
    "score": Command("submission.score", needs=LOGS),
    "describe": Command("submission.describe", needs=LOGS),
    "package": Command("submission.package", needs=LOGS),
    "setup": Command("launch.setup", needs=""),
    "completion": Command("launch.completion", needs=CLI),
}

# Former words that still work -> words that they stand for.
ALIASES = {
    ("tuning",): ("system-tuning",),
    ("series", "status"): ("runs", "--series="),
}
# Commands that read the runs of a benchmark.
OF_RUNS = ("runs", "check", "report", "score")

QUOTES = "\u2018\u2019\u201a\u201b\u201c\u201d\u201e\u201f"
ALL_COMMANDS = f"{PROGRAM} --help lists the commands"
OVERVIEW = Path(__file__).with_name("overview.txt")  # text that --help prints


def read(arguments: list[str]) -> tuple[str, list[str], bool]:
    """Parse a command line. Return its requirements file, its module followed by arguments, and
    whether missing packages are installed.

    The requirements file is Command.needs, "" for none. Raise ConfigError for a line that is not
    valid. Raise SystemExit after printing the help or the version.
    """
    _require_typed_characters(arguments)
    words: list[str] = []
    asks_for_help = False
    for word in arguments:
        name, equals, _ = word.partition("=")
        if equals and name in EVERYWHERE:
            raise ConfigError(f"{name} takes no value: {word}", "it is a switch", f"write {name}")
        if word in SWITCHES:
            os.environ[SWITCHES[word]] = "1"
        elif word == "help" and len(words) < 2:
            asks_for_help = True
        else:
            words.append(word)
    if asks_for_help:
        words.append("--help")  # last, so that `help plan` is `plan --help`
    if "--version" in words or words == ["-V"]:
        print(version())
        raise SystemExit(0)
    if words[:1] in (["-h"], ["--help"]):
        print(overview())
        raise SystemExit(0)
    for old, new in ALIASES.items():
        if words[: len(old)] == [*old]:
            words[: len(old)] = new
    benchmark, name, rest = _split(words, benchmarks.names())
    command = COMMANDS[name]
    if not has_command(benchmark, name):
        raise _command_of_others(benchmark, name)
    parser = parser_of(name, benchmark)
    try:
        options = parser.parse_args(rest)
    except UnknownOption as error:
        raise _option_of_other_form(error, name, benchmark, rest) from None
    variables.judge(os.environ, name, parser.variables)
    installs = getattr(options, command.bare_with, None) in (None, False)
    # A module in the benchmark's own package knows its benchmark.
    if benchmark and command.module != IN_BENCHMARK:
        rest = [benchmark, *rest]
    return command.needs, [_module_of(name, benchmark), *rest], installs


def has_command(benchmark: str, name: str) -> bool:
    """Return whether the command `name` exists for `benchmark`."""
    if COMMANDS[name].module != IN_BENCHMARK:
        return True
    return (ROOT / benchmark / f"{name}.py").is_file()


def commands_of(benchmark: str) -> list[str]:
    """Return the commands that go with `benchmark`."""
    names = [name for name, command in COMMANDS.items() if command.benchmark != NEVER]
    return [name for name in names if has_command(benchmark, name)]


def _module_of(name: str, benchmark: str) -> str:
    module = COMMANDS[name].module
    return f"{benchmark}.{name}" if module == IN_BENCHMARK else module


def _command_of_others(benchmark: str, name: str) -> ConfigError:
    """Return the error for a command that exists only for other benchmarks."""
    owners = owners_of(name)
    why = f"{name} belongs to {', '.join(owners) or 'no benchmark here'}"
    do = " or ".join(f"{PROGRAM} {owner} {name} ..." for owner in owners) or ALL_COMMANDS
    return ConfigError(f"{benchmark} has no command {name}", why, do)


def _option_of_other_form(
    error: UnknownOption, name: str, benchmark: str, words: list[str]
) -> ConfigError:
    """Return `error`, with the command that has the option, with or without a benchmark.

    `words`: those after the command.
    """
    if COMMANDS[name].benchmark != MAY:
        return error
    other = "" if benchmark else _example(benchmarks.names())
    parser = parser_of(name, other)
    if parser and error.option in parser.options():
        line = shlex.join([PROGRAM, *filter(None, (other, name)), *words])
        whose = "a benchmark" if other else "no benchmark"
        return ConfigError(error.what, f"{name} has it with {whose}", f"did you mean {line}?")
    return error


def _require_typed_characters(words: list[str]) -> None:
    """Raise ConfigError if a word begins with a dash or quote of a word processor."""
    typed = [re.sub(r"^-?[\u2010-\u2015\u2212]+-?(?=\w)", "--", word) for word in words]
    typed = [word.strip(QUOTES) if word.startswith(tuple(QUOTES)) else word for word in typed]
    for word, plain_word in zip(words, typed, strict=True):
        if word != plain_word:
            raise ConfigError(
                f"{word!r} has a dash or quote that no keyboard types",
                "documents and chats replace -- by a long dash, and straight quotes by curved ones",
                f"use {plain_word}: {shlex.join([PROGRAM, *typed])}",
            )


def _split(words: list[str], known: Sequence[str]) -> tuple[str, str, list[str]]:
    """Return the benchmark ("" for none), the command and the remaining words.

    The benchmark may come before or after its command. Raise ConfigError for unknown words.
    """
    if not words:
        raise ConfigError(
            "no benchmark or command given", f"benchmarks: {', '.join(known)}", ALL_COMMANDS
        )
    if not all(word.strip() for word in words[: 1 + (words[0] in known)]):
        raise ConfigError(
            f"an argument is empty: {words!r}",
            "it stands where a benchmark or command is expected",
            "leave it out; a variable in the command may be unset",
        )
    name, *rest = words
    second = rest[0] if rest and not rest[0].startswith("-") else ""
    benchmark = ""
    if name in known:
        benchmark = name
        name = second or "run"
        rest = rest[1:] if second else rest
    if name not in COMMANDS:
        raise _unknown_word(name, benchmark, [word for word in words if word != name])
    takes = COMMANDS[name].benchmark
    if takes == NEVER:
        if benchmark and (rest or name not in OF_RUNS):
            raise ConfigError(
                f"{name} does not accept a benchmark",
                "it does the same for all benchmarks",
                shlex.join([PROGRAM, name, *rest]),
            )
        return "", name, [benchmark] if benchmark else rest
    if benchmark:
        return benchmark, name, rest
    if second in known:
        return second, name, rest[1:]
    if takes == ALWAYS and not second and {"-h", "--help"} & {*rest}:
        return _example(owners_of(name)), name, rest
    if takes == ALWAYS or second:
        raise _missing_benchmark(name, rest)
    return "", name, rest


def _unknown_word(word: str, benchmark: str, others: list[str]) -> ConfigError:
    """Return the error for a word that is neither a benchmark nor a command.

    `benchmark`: the word before it, "" if it is the first one. `others`: all other words.
    """
    known = benchmarks.names()
    what = f"unknown benchmark or command: {word!r}"
    why = f"benchmarks: {', '.join(known)}"
    do = ALL_COMMANDS
    meant = [*EVERYWHERE] if word.startswith("-") else [*known, *COMMANDS, *EVERYWHERE]
    if benchmark:
        what = f"unknown command: {word!r}"
        why = f"{benchmark} has no such command"
        do = f"choose one of: {', '.join(commands_of(benchmark))}"
        meant = [name for name in COMMANDS if has_command(benchmark, name)]
    first = [other for other in others if other in known or other in COMMANDS][:1]
    if word in known:
        do = f"name one benchmark: {PROGRAM} {word}"
    elif re.match("[A-Z_]+=", word):
        why = "environment variables come before the command"
        do = " ".join([word, PROGRAM, *others])
    elif word.endswith(".toml"):
        # The benchmark whose folder of configs/ has the file, or else the one without such a folder
        owners = [name for name in known if name == Path(word).parent.name]
        owners += [name for name in known if not config_names(ROOT, name)] + list(known)
        do = f"did you mean {PROGRAM} {benchmark or owners[0]} --config {word}?"
    elif meaning := nearest(word.partition("=")[0], meant):
        do = suggestion(f"{PROGRAM} {_words_of(meaning.ours, benchmark)}", meaning.note)
    elif word.startswith("-") and first:
        why = "options come after the benchmark and the command"
        rest = [other for other in others if other not in first]
        do = shlex.join([PROGRAM, *first, word, *rest])
    return ConfigError(what, why, do)


def _missing_benchmark(name: str, words: list[str]) -> ConfigError:
    """Return the error for a command without a known benchmark. `words`: those after it."""
    owners = owners_of(name)
    why = f"benchmarks: {', '.join(owners)}"
    line = shlex.join([PROGRAM, _example(owners), name, *words])
    if not words or words[0].startswith("-"):
        return ConfigError(f"{name} needs a benchmark", why, line)
    if meaning := nearest(words[0], owners):
        line = shlex.join([PROGRAM, meaning.ours, name, *words[1:]])
    elif option := COMMANDS[name].stray:
        line = f"{PROGRAM} {name} {option} {shlex.quote(','.join(words))}"
    return ConfigError(f"unknown benchmark: {words[0]!r}", why, f"did you mean {line}?")


def owners_of(name: str) -> list[str]:
    """Return the benchmarks that have the command `name`."""
    return [benchmark for benchmark in benchmarks.names() if has_command(benchmark, name)]


def _example(known: Sequence[str]) -> str:
    """Return the benchmark to name in an example or a help: one of MLPerf's if there is any."""
    closed = [name for name in known if name in benchmarks.closed()]
    return (closed or list(known) or benchmarks.names())[-1]


def _words_of(name: str, benchmark: str = "") -> str:
    """Return the words of a command, benchmark or option, with `benchmark` or an example of one."""
    if name not in COMMANDS:
        return name
    if name in OF_RUNS:
        return f"{name} {benchmark}".strip()
    takes = COMMANDS[name].benchmark
    if takes == NEVER or (takes == MAY and not benchmark):
        return name
    named = benchmark or _example(owners_of(name))
    return named if name == "run" else f"{named} {name}"


def parser_of(name: str, benchmark: str) -> Parser:
    """Return the parser of a command."""
    command = importlib.import_module(_module_of(name, benchmark))
    if not hasattr(command, "parser"):
        # system_tuning imports nothing from this project, since it is also copied to bare hosts.
        parser = Parser(name)
        command.add_arguments(parser)
        return parser
    parser = command.parser() if COMMANDS[name].benchmark == NEVER else command.parser(benchmark)
    if name == "run":
        others = ", ".join(each for each in commands_of(benchmark) if each != name)
        parser.description += f"\n\nOther commands of {benchmark}, each with --help: {others}."
    return parser


def overview() -> str:
    """Return the text of --help, folded to the width of the terminal."""
    width = help_width()
    text = OVERVIEW.read_text().format(benchmarks=", ".join(benchmarks.names()))
    lines = text.splitlines()
    for index, line in enumerate(lines):
        if re.match(r"  [\w-]+  ", line):  # a name and what it does
            indent = " " * 17
            lines[index] = textwrap.fill(line, width, subsequent_indent=indent)
    return reflow("\n".join(lines), width)


def version() -> str:
    """Return the program's name and version, followed by the commit in a git repository."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    commit = commit_of(ROOT)
    text = f"{project['name']} {project['version']}"
    if commit:
        text += f", commit {commit}"
    if changes_of(ROOT):
        text += ", modified"
    return text
