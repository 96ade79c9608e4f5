"""Table of all subcommands, and the parser that maps a command line to a module.

A command line is read before any package is installed. Each module has `parser(benchmark)`, whose
Parser (common/command_line.py) raises ConfigError. A module that cannot be imported without
packages parses its arguments itself, later. This module uses only the standard library.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

from common import benchmarks
from common.command_line import EVERYWHERE, PROGRAM, SWITCHES, Parser, meant
from common.errors import ConfigError
from common.paths import ROOT
from launch.environment import ALL, LOGS
from launch.run_directory import git

PACKAGE = "mlperf-llama-training"

NEVER, MAY, ALWAYS = range(3)
# Packages whose parser is in their __main__ module.
PACKAGES = ("launch.preflight", "throughput", "system_tuning")


@dataclass(frozen=True)
class Verb:
    about: str
    module: str  # {} is the benchmark; words after the module are its first arguments
    benchmark: int = NEVER  # whether the subcommand accepts a benchmark
    needs: str = ALL  # requirements file that the subcommand needs; "" for none


VERBS = {
    "run": Verb(
        "train to the target and check the log; the default after a benchmark",
        "launch.commands run",
        ALWAYS,
    ),
    "prepare": Verb("fetch, convert or verify data", "{}.prepare", ALWAYS),
    "bench": Verb("throughput on synthetic tokens", "launch.commands bench", ALWAYS),
    "profile": Verb(
        "bench, then steps under torch's profiler: a trace, and where the time went",
        "launch.commands profile",
        ALWAYS,
    ),
    "gemms": Verb(
        "record, tune and check GEMM solutions of AMD's libraries",
        "throughput.gemm_tuning.cli",
        ALWAYS,
    ),
    "merge": Verb("adapters into a base, where a benchmark has adapters", "{}.merge", ALWAYS),
    "plan": Verb(
        "memory and time of a config, or of any model with --model; no GPU needed",
        "launch.plan.command",
        MAY,
        "",
    ),
    "preflight": Verb(
        "is this machine fit? GPUs, host, versions, and their speed", "launch.preflight", MAY
    ),
    "throughput": Verb(
        "how fast is this machine? matrix products, training steps of many models", "throughput"
    ),
    "tuning": Verb(
        "settings of the operating system: check, apply, revert", "system_tuning", NEVER, ""
    ),
    "check": Verb("official checker and our lint on logs", "submission.check", NEVER, LOGS),
    "runs": Verb("all runs of LOGDIR and how they ended", "submission.run_list", NEVER, LOGS),
    "report": Verb("the HTML page of a run, or of a series", "submission.report"),
    "score": Verb(
        "RCP verdict and score of a series, and how much of it was luck",
        "submission.score",
        NEVER,
        LOGS,
    ),
    "describe": Verb("the system description of this machine", "submission.describe", NEVER, LOGS),
    "package": Verb("the tree of a submission, checked", "submission.package", NEVER, LOGS),
    "setup": Verb(
        "install the packages into .venv, also for another machine", "launch.setup", NEVER, ""
    ),
    "completion": Verb("completion of this command in bash or zsh", "launch.completion", NEVER, ""),
}

OVERVIEW = Path(__file__).with_name("overview.txt")  # text that --help prints


def read(arguments: list[str]) -> tuple[str, list[str]]:
    """Parse a command line: return its requirements file and Python's arguments for its module.

    The requirements file is that of Verb.needs, "" for none. Raise ConfigError for a command line
    that is not valid. Raise SystemExit after printing the help or the version.
    """
    os.environ.update({SWITCHES[word]: "1" for word in arguments if word in SWITCHES})
    words = [word for word in arguments if word not in SWITCHES]
    words[:2] = ["--help" if word == "help" else word for word in words[:2]]
    if "--version" in words or words[:1] in (["-h"], ["--help"]):
        print(version() if "--version" in words else overview())
        raise SystemExit(0)
    benchmark, name, rest = _split(words, benchmarks.names())
    verb = VERBS[name]
    module, *own = verb.module.format(benchmark).split()
    if not has_verb(benchmark, name):
        others = ", ".join(each for each in benchmarks.names() if has_verb(each, name))
        raise ConfigError(
            f"{benchmark} has no verb {name}",
            f"it is one of {others}",
            f"{PROGRAM} {others} {name} ...",
        )
    if parser := parser_of(name, benchmark):
        parser.parse_args(rest)
    own += [benchmark] if benchmark and not module.startswith(f"{benchmark}.") else []
    return verb.needs, ["-m", module, *own, *rest]


def has_verb(benchmark: str, name: str) -> bool:
    """Return whether the subcommand `name` exists for `benchmark`."""
    return VERBS[name].module != f"{{}}.{name}" or (ROOT / benchmark / f"{name}.py").is_file()


def _split(words: list[str], known: Sequence[str]) -> tuple[str, str, list[str]]:
    """Return the benchmark ("" for none), the subcommand and the remaining words.

    The benchmark may come before or after its subcommand. Raise ConfigError for words that are not
    known.
    """
    if not words:
        raise ConfigError(
            "which benchmark or verb?",
            f"benchmarks: {', '.join(known)}",
            f"{PROGRAM} --help lists the verbs, too",
        )
    if variable := next((word for word in words[:2] if re.match("[A-Z_]+=", word)), ""):
        line = " ".join([variable, PROGRAM, *(word for word in words if word != variable)])
        raise ConfigError(
            f"{variable} is no benchmark or verb",
            "a variable of the environment stands before the command",
            line,
        )
    first, *rest = words
    second = rest[0] if rest and not rest[0].startswith("-") else ""
    if first in VERBS:
        name, benchmark = first, second if VERBS[first].benchmark and second in known else ""
    elif first in known:
        name, benchmark = second or "run", first
    elif first.startswith("-"):
        found = next((word for word in words if word in known or word in VERBS), "")
        do = f"{PROGRAM} {found or known[-1]} {first} ..."
        raise ConfigError(
            f"{first} comes before the benchmark or verb",
            "options follow them",
            do if found else meant(first, EVERYWHERE, do),
        )
    else:
        why = "no benchmark and no verb has this name"
        raise ConfigError(
            f"unknown benchmark or verb {first}", why, meant(first, [*known, *VERBS, *EVERYWHERE])
        )
    if name not in VERBS:
        raise ConfigError(
            f"unknown verb {name}", f"no verb of {benchmark} has this name", meant(name, VERBS)
        )
    if benchmark and VERBS[name].benchmark == NEVER:
        raise ConfigError(
            f"{name} takes no benchmark",
            VERBS[name].about,
            f"{PROGRAM} {' '.join([name, *rest[1:]])}",
        )
    if VERBS[name].benchmark == ALWAYS and not second and {"-h", "--help"} & {*rest}:
        benchmark = benchmark or next(each for each in reversed(known) if has_verb(each, name))
    if VERBS[name].benchmark == ALWAYS and not benchmark:
        what = f"unknown benchmark {second}" if second else f"{name} needs a benchmark"
        do = meant(second, known) if second else f"{PROGRAM} {known[-1]} {name} ..."
        raise ConfigError(what, f"benchmarks: {', '.join(known)}", do)
    return benchmark, name, rest[1:] if benchmark and second else rest


def parser_of(name: str, benchmark: str) -> Parser | None:
    """Return the parser of a subcommand, None if packages that its module imports are missing."""
    module, *own = VERBS[name].module.format(benchmark).split()
    module += ".__main__" * (module in PACKAGES)
    try:
        found = importlib.import_module(module)
    except ImportError:
        return None
    if hasattr(found, "parser"):
        return found.parser(*own, benchmark)
    # system_tuning imports nothing from this project, since it is also copied to bare hosts.
    parser = Parser(name)
    found.add_arguments(parser)
    return parser


def overview() -> str:
    kinds = (ALWAYS, MAY, NEVER)
    lists = (
        "\n".join(
            f"{name:<12}{verb.about}" for name, verb in VERBS.items() if verb.benchmark == kind
        )
        for kind in kinds
    )
    always, may, never = (indent(text, "  ") + "\n" for text in lists)
    return (
        OVERVIEW.read_text()
        .rstrip()
        .format(benchmarks=", ".join(benchmarks.names()), always=always, may=may, never=never)
    )


def version() -> str:
    """Return the program's name and version, followed by the commit in a git repository.

    Name and version are those of pyproject.toml, or else of the installed package.
    """
    try:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    except FileNotFoundError:
        project = {"name": PACKAGE, "version": importlib.metadata.version(PACKAGE)}
    commit, changes = git(ROOT, "rev-parse", "HEAD"), git(ROOT, "status", "--porcelain")
    return (
        f"{project['name']} {project['version']}"
        + (f", commit {commit}" if commit else "")
        + (", modified" if changes else "")
    )
